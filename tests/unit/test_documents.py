"""The documents stay short: few words, results that begin with their table, few measured files."""

import re

import pytest
from tools.pages import MARK
from tools.tables import MEASURED

from ..support.prose import DOCS, ROOT, read_prose

RESULTS = [path for path in DOCS if path.parent.name == "results"]
QUESTIONS = {  # what a reader asks, as the README has it, with words of a search, and the page that answers
    "slower than FP16": ("my INT8 engine is slower", "how-to/int8-is-slower.md"),
    "for my GPU or CPU": ("recipe for bge-base on L4", "how-to/quantize-bge-e5-gte.md"),
    "Accuracy fell": ("accuracy loss", "how-to/accuracy-fell.md"),
    "in production": ("cost in production", "how-to/production.md"),
    "trust the numbers": ("can I trust the number", "explanation/what-is-proven.md"),
}


def words(paths):
    """Count the words of pages without their generated references, tables and figures included."""
    return sum(len(path.read_text(encoding="utf-8").partition(MARK)[0].split()) for path in paths)


def test_documents_are_few_words():
    assert words(DOCS) <= 35_000
    assert words(RESULTS) <= 6_000
    assert words([ROOT / "README.md"]) <= 850


def test_measured_files_are_few_and_small():
    found = [*(ROOT / MEASURED).rglob("*")]
    assert sum(path.stat().st_size for path in found if path.is_file()) <= 4_000_000
    assert {path.name for path in found if path.is_dir()} == {"runs", "benches", "report"}


@pytest.mark.parametrize("page", RESULTS, ids=lambda path: path.stem)
def test_a_page_of_results_begins_with_the_table_that_answers_it(page):
    title, _, rest = page.read_text(encoding="utf-8").partition("\n")
    before = re.split(r"^\|", rest, maxsplit=1, flags=re.MULTILINE)[0]
    assert title.startswith("# ")
    assert len(re.sub("<!--.*?-->", "", before).split()) <= 45
    assert len(re.findall(r"^\|", rest, flags=re.MULTILINE)) <= 45


@pytest.mark.parametrize(("question", "asked", "page"), [(key, *value) for key, value in QUESTIONS.items()])
def test_a_question_is_one_link_from_the_readme_and_one_search_from_its_page(question, asked, page):
    """The search of the site finds a section that has all words, or words that begin with them."""
    rows = re.findall(r"^\|([^|]+)\|(.+)\|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    (answer,) = (links for row, links in rows if question in row)
    assert f"docs/{page}" in answer
    assert page in read_prose(ROOT / "docs/README.md")
    section = re.findall(r"\w+", (ROOT / "docs" / page).read_text().partition("\n## ")[0].lower())
    assert [word for word in re.findall(r"\w+", asked.lower())
            if not any(each.startswith(word) for each in section)] == []  # fmt: skip
