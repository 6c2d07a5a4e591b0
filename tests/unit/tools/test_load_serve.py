"""Figures of the load test in the documents are those of its file, and the file says that all of it held."""

import json
from pathlib import Path

from tools.load_serve import verdict

ROOT = Path(__file__).parents[3]


def test_the_document_has_the_figures_of_the_file():
    found = json.loads((ROOT / "docs" / "measured-serve" / "fake.json").read_text())
    text = (ROOT / "docs" / "how-to" / "serve.md").read_text()
    assert found["does_not_hold"] == verdict(found) == []
    assert f"| 70%, Poisson | {found['poisson_70']['p50_ms']} | {found['poisson_70']['p99_ms']} |" in text
    assert f"{found['capacity']['answered_per_s']} answers a second" in text
    assert f"{len(found['killed']['replaced_after_s'])} workers were killed" in text
    assert found["machine"]["cpu"] in text


def test_what_does_not_hold_is_found():
    found = json.loads((ROOT / "docs" / "measured-serve" / "fake.json").read_text())
    found["overload_300"] |= {"lost": 2, "without": 0}
    found["killed"]["statuses"] |= {"500": 1}
    found["even_70"]["p99_ms"] = 2 * found["even_70"]["p50_ms"]
    found["stopped"]["status"] = 1
    assert len(verdict(found)) == 4
