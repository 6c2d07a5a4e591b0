"""A search on a GPU: engines are built, proven and timed with their twin."""

import pytest

from qdqbench.eval.selection.search.results import read_search

from ..integration.cases import edited
from .conftest import invoke

SHAPES = {"batch": [1, 8, 8], "length": [16, 32, 64]}


def test_a_search_measures_engines(sst2, tmp_path):
    mine = {"name": "mine", "calibration": {"samples": 64, "bias_correction": False}}
    mine |= {"gate": {"max_drop": 0.2}, "engine": {"shapes": SHAPES}, "export": {"max_length": 64}}
    path = edited(tmp_path / "mine.yaml", mine)
    words = [path, *sst2.options, "--out", tmp_path / "out", "--trials", 5, "--samples", 64, "--batch", 8]
    outcome = invoke("search", *words, "--length", 32, "--speed", "latency")
    assert outcome.exit_code == 0 or "gate does not hold" in str(outcome.exception)
    found = read_search(tmp_path / "out" / "search.json")
    assert found.source.mode == "latency"
    tried = [trial for trial in found.trials if trial.failure is None]
    assert len(tried) >= 5, [trial.failure for trial in found.trials]
    for timed in (trial.speedup for trial in tried):
        assert timed.system_ms > 0
        assert timed.value == pytest.approx(timed.baseline_ms / timed.system_ms, rel=0.01)
    chosen = found.confirmed[0]
    assert chosen.engine["validation"].n == chosen.scores["validation"].n
    assert not list((tmp_path / "out" / "work").glob(".engines.*"))
