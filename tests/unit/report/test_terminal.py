"""What every command prints as a table is whole in a terminal of 80 columns: no cut word, no lost cell."""

import re
from collections import Counter

import pytest

from qdqbench.quantize.report.render import write_report

from ...support.pages import on_terminal
from ...support.reports import REPORTS

FRAME = re.compile(r"[─-╿]")  # of panels


@pytest.mark.parametrize("name", REPORTS)
def test_80_columns_hold_every_word_of_it(name):
    report = REPORTS[name]()
    narrow, wide = (FRAME.sub(" ", on_terminal(report, width)) for width in (80, 400))
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    assert Counter(wide.split()) - Counter(narrow.split()) == Counter()


@pytest.mark.parametrize("name", ["auto", "methods", "sensitivity"])
def test_what_is_only_to_know_is_no_warning(name, tmp_path):
    report = REPORTS[name]()
    shown = on_terminal(report)
    assert 0 < shown.index("\nwarning: a warning") < shown.index("\nnote: a note")
    pages = {
        path.suffix: path.read_text(encoding="utf-8") for path in write_report(report, tmp_path, "report")
    }
    warned = pages[".html"].partition('id="warnings"')[2].partition("</section>")[0]
    assert "a warning" in warned
    assert "a note" not in warned
    assert "a note" in pages[".html"].lower()
    assert "a warning" in pages[".md"]
