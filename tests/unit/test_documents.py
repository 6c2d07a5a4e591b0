"""The documents stay short: few words, results that begin with their table, few measured files."""

import re
from pathlib import Path

import pytest
from tools.pages import MARK
from tools.tables import MEASURED

from ..support.prose import read_prose

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = sorted((DOCS / "results").glob("*.md"))
QUESTIONS = {  # what a reader looks for, and the page that answers it
    "slower than FP16": "how-to/int8-is-slower.md",
    "for my GPU or CPU": "how-to/choose-a-backend.md",
    "Accuracy fell": "how-to/accuracy-fell.md",
    "in production": "how-to/production.md",
    "trust the numbers": "explanation/what-is-proven.md",
}


def words(paths) -> int:
    """Count the words of pages without their generated references, tables and figures included."""
    return sum(len(path.read_text(encoding="utf-8").partition(MARK)[0].split()) for path in paths)


def test_documents_are_few_words():
    assert words(DOCS.rglob("*.md")) <= 35_000
    assert words(RESULTS) <= 6_000
    assert words([ROOT / "README.md"]) <= 900


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


@pytest.mark.parametrize(("question", "page"), QUESTIONS.items())
def test_a_question_is_one_link_from_the_readme(question, page):
    rows = re.findall(r"^\|([^|]+)\|(.+)\|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    (answer,) = (links for asked, links in rows if question in asked)
    assert f"docs/{page}" in answer
    assert page in read_prose(DOCS / "README.md")
