"""What estimates of plans rest on."""

from io import StringIO

import pytest
from rich.console import Console

from qdqbench.eval.runs import pace
from qdqbench.eval.search.plan import SearchPlan, plan_lines
from qdqbench.eval.search.results import Source


@pytest.mark.parametrize(
    ("gpu", "backend", "said"),
    [
        (None, "openvino", ()),
        (None, None, ()),  # a cost model: no engine is made
        ("L4", "tensorrt_rtx", ("never checked on a GPU",)),
        ("L4", "tensorrt", ("never checked on a GPU", "never checked with TensorRT")),
    ],
)
def test_what_was_never_checked_here_is_said(gpu, backend, said, monkeypatch):
    monkeypatch.setattr(pace, "find_gpu", lambda: gpu)
    found = pace.unchecked(backend)
    assert all(part in found for part in said)
    assert found.count("never checked") == len(said)


@pytest.mark.parametrize("unchecked", ["", "never checked on a GPU"])
def test_the_plan_shows_it(unchecked):
    plan = SearchPlan(
        study="a",
        recipe="bert-int8-linears",
        task="sst2",
        units=4,
        attentions=0,
        trials=2,
        done=0,
        budget_s=None,
        samples=64,
        source=Source(
            mode="engine", label="measured", backend="tensorrt_rtx", version="1", batch=1, length=8
        ),
        basis="a few rows",
        unchecked=unchecked,
        **dict.fromkeys(("ranking_s", "trial_s", "trials_s", "confirm_s", "total_s"), 1.0),
        **dict.fromkeys(("confirmed", "rows", "disk_bytes", "disk_free_bytes"), 1),
    )
    shown = StringIO()
    Console(file=shown, width=80).print(plan_lines(plan))
    assert ("never checked on a GPU" in shown.getvalue()) == bool(unchecked)
