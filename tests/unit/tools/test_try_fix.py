"""The table of docs/results/foreign-tools.md is that of its results file."""

import json

from tools import try_fix

from ..test_house import ROOT

RESULTS = ROOT / "docs" / "measured-foreign" / "sst2.json"


def test_the_table_is_that_of_the_results():
    text = (ROOT / "docs" / "results" / "foreign-tools.md").read_text()
    shown = text.split("<!-- foreign:begin -->\n")[1].split("\n<!-- foreign:end -->")[0]
    assert shown == try_fix.markdown(json.loads(RESULTS.read_text()))


def test_every_file_of_the_results_holds():
    rows = json.loads(RESULTS.read_text())["rows"]
    assert {*rows} == {"fp32", *try_fix.TITLES}
    for name, row in rows.items():
        if name != "fp32":
            report = row["report"]
            assert report["findings_after"] == {}
            assert report["left"] == []
            assert report["outputs"]["after_error"] <= report["outputs"]["limit"]
