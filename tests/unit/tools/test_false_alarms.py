"""What tools/false_alarms.py counts as a caught fault."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from onnx import helper
from tools import false_alarms

from qdqbench.eval.stages import stages
from qdqbench.eval.verification import engine
from qdqbench.quantize.pipeline import graphs, ownership
from qdqbench.quantize.utils.errors import UserError


@pytest.mark.parametrize(
    ("caught", "holds"),
    [({"a": [True], "b": [True]}, True), ({"a": [True], "b": []}, False), ({"a": [True, False]}, False)],
)
def test_a_fault_that_was_planted_nowhere_does_not_pass(caught, holds):
    assert false_alarms.catches_all(caught) is holds


def refuse(session):
    raise UserError("refused")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with an empty graph, whose fault "empty" can be planted, and whose stages do nothing."""
    path = tmp_path / "model.int8.onnx"
    path.write_bytes(helper.make_model(helper.make_graph([], "empty", [], [])).SerializeToString())
    monkeypatch.setitem(false_alarms.FAULTS, "empty", lambda graph: True)
    monkeypatch.setattr(ownership, "open_session", nullcontext)
    monkeypatch.setattr(graphs, "graph_path", lambda session: path)
    monkeypatch.setattr(stages, "build_stage", lambda session: None)
    monkeypatch.setattr(engine, "verify_engine", lambda session: SimpleNamespace(passed=False))
    return tmp_path


def test_a_graph_that_the_runtime_refuses_is_caught(run, monkeypatch):
    monkeypatch.setattr(engine, "verify_engine", refuse)
    monkeypatch.setattr(stages, "build_stage", refuse)
    assert false_alarms.catches(run, "empty")


def test_an_error_of_verification_catches_no_fault(run, monkeypatch):
    assert false_alarms.catches(run, "empty")
    monkeypatch.setattr(engine, "verify_engine", refuse)
    with pytest.raises(UserError, match="refused"):
        false_alarms.catches(run, "empty")
