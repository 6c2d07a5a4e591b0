"""What the recipe changed is said with the counts of what calibration and export wrote down."""

import pytest

from qdqbench.eval.runs.collect import model_changes
from qdqbench.quantize.calibration.record import CalibrationRecord
from qdqbench.quantize.calibration.techniques.channel_splitting import ChannelSplit
from qdqbench.quantize.calibration.techniques.smoothing import Smoothing
from qdqbench.quantize.calibration.techniques.softmax_scale import SoftmaxRow
from qdqbench.quantize.recipe.plan import Plan

LAYER = "bert.encoder.layer.0"
SELF = f"{LAYER}.attention.self"
ROLES = [f"{SELF}.{name}" for name in ("query", "key", "value")]
LINEARS = [*ROLES, *(f"{LAYER}.{x}.dense" for x in ("attention.output", "intermediate", "output"))]


def said(scales="channel", attention=(), rewrites=None, half=True, to_tanh=True, **fields):
    plan = Plan(int8=dict.fromkeys(LINEARS, scales), high=("classifier",), attention=attention)
    record = CalibrationRecord(method="max", seed=0, data={}, notes=[], quantizers={}, **fields)
    changes = model_changes(
        plan, record, rewrites or {}, to_tanh=to_tanh, half=half, reconstructed=0, trained=0
    )
    return {change.what: (change.count, change.description) for change in changes}


def test_nothing_is_said_of_plain_qdq():
    assert said(half=False) == {}
    assert said() == {"FP16": (1, "What is not INT8 computes in FP16, 1 linear among it.")}


def test_each_change_is_counted():
    found = said(
        attention=(SELF,),
        rewrites={"tanh GELU": 12, "tokens first": 0, "short GELU": 12, "joined heads": 3},
        biases={LINEARS[4]: [0.1], LINEARS[5]: [0.2]},
        splits={LINEARS[5]: ChannelSplit(extra=64, outliers={3: (2, 1), 9: (4, 1)})},
        smoothing=Smoothing(inputs={name: [2.0] for name in ROLES}, rows={ROLES[0]: [0.5]}),
        softmax=[
            SoftmaxRow(module=SELF, length=n, amax=1, centered=True, zeroed=0, clipped=0, error=0)
            for n in (64, 384)
        ],
    )
    assert {what: count for what, (count, _) in found.items()} == {
        "bias correction": 2,
        "tanh GELU": 12,
        "smoothing": 3,
        "scaled rows": 1,
        "split channels": 2,
        "centered values": 1,
        "INT8 attention": 1,
        "FP16": 1,
        "joined heads": 3,
        "short GELU": 12,
    }
    assert "2 linears of 6 INT8 linears" in found["bias correction"][1]
    assert "1 feed-forward" in found["split channels"][1]


def test_biases_that_moved_are_told_from_values_that_were_centred():
    centers = {name: [0.5] for name in (ROLES[1], ROLES[2], LINEARS[3])}
    found = said(scales="tensor", attention=(SELF,), centers=centers)
    assert found["moved biases"][0] == 2
    assert "centered values" not in found


@pytest.mark.parametrize("to_tanh", [True, False])
def test_a_model_that_has_tanh_gelu_is_not_changed(to_tanh):
    assert ("tanh GELU" in said(rewrites={"tanh GELU": 6}, to_tanh=to_tanh)) == to_tanh
