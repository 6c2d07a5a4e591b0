"""Reports of every kind as Markdown and on 80 columns, some as pages too, and sentences, as they were.

A change that is meant to change a report writes the files anew, to be read as a diff:

RECORD_GOLDEN=1 .venv/bin/python -m pytest tests/unit/report/test_golden.py
"""

import os
import re
from pathlib import Path

import pytest

from qdqbench.quantize.report.render import render_html, render_markdown

from ...support.findings import LINTED
from ...support.pages import on_terminal
from ...support.reports import REPORTS
from ...support.words import WORDS

HELD = REPORTS | LINTED

GOLDEN = Path(__file__).parents[2] / "golden"
BESIDES = ("run-alone", "run-two-splits", "bench-many-shapes", "bench-measured")  # shown by others as well

PAGES = ("document", "run", "compare", "bench", "check")


def on_page(report):
    """The page without what all pages share, and of charts what they are called."""
    html = re.sub(r"(?s)<(style|script)>.*?</\1>\n?", "", render_html(report))
    return re.sub(r'(?s)<svg [^>]*aria-label="([^"]*)".*?</svg>', r"<svg>\1</svg>", html)


def on_screen(report):
    """What a terminal shows, and the tiles, which only a page has."""
    tiles = [f"{tile.title}: {tile.value} [{tile.state}] {tile.remark}" for tile in report.tiles]
    lines = [*on_terminal(report).splitlines(), *(["", "Tiles of the page:"] if tiles else []), *tiles]
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("name", [name for name in HELD if name not in BESIDES])
def test_a_report_is_as_it_was(name):
    report = HELD[name]()
    texts = {"md": render_markdown(report), "txt": on_screen(report)}
    texts |= {"html": on_page(report)} if name in PAGES else {}
    for kind, text in texts.items():
        hold(GOLDEN / "reports" / f"{name}.{kind}", text)


def hold(path, text):
    if os.environ.get("RECORD_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name}: {__doc__}"


@pytest.mark.parametrize("name", WORDS)
def test_sentences_are_as_they_were(name):
    hold(GOLDEN / "words" / f"{name}.txt", "\n".join(line.rstrip() for line in WORDS[name]()) + "\n")


def test_no_file_is_left_over():
    held = {name for name in HELD if name not in BESIDES}
    assert {path.stem for path in (GOLDEN / "reports").iterdir()} == held
    assert {path.stem for path in (GOLDEN / "words").iterdir()} == {*WORDS}
