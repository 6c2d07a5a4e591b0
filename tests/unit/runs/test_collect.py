"""What is said of an INT8 softmax: nothing where it loses little, else by figures."""

from types import SimpleNamespace

import numpy as np
import pytest

from qdqbench.eval.runs.collect import MOST_SOFTMAX_ERROR, softmax_warnings
from qdqbench.quantize.calibration.techniques.softmax_scale import SoftmaxRow


def record_of(*errors, longest=128):
    known = {"length": longest, "amax": 1, "centered": False, "zeroed": 0.3, "clipped": 0}
    rows = [SoftmaxRow(module=f"layer.{n}", error=error, **known) for n, error in enumerate(errors)]
    return SimpleNamespace(softmax=rows, data={"lengths": {"max": longest}})


def session_of(*lengths, setting="auto"):
    recipe = SimpleNamespace(calibration=SimpleNamespace(softmax_scale=setting))
    splits = {"validation": (None, SimpleNamespace(lengths=np.array(lengths)))}
    return SimpleNamespace(eval_splits=splits, recipe=recipe)


@pytest.mark.parametrize(
    ("record", "lengths"),
    [
        (record_of(), (500,)),  # no INT8 attention
        (record_of(0.0, MOST_SOFTMAX_ERROR), (9, 128)),
        (record_of(0.1, longest=40), (9, 128)),  # short is short, whatever calibration saw
        (record_of(0.1, longest=384), (384, 300)),
    ],
)
def test_little_loss_and_known_lengths_are_not_worth_a_word(record, lengths):
    assert [*softmax_warnings(session_of(*lengths), record)] == []


@pytest.mark.parametrize("setting", ["fixed", "auto", "min-error", "row-max"])
def test_a_large_loss_is_named_with_its_layers_and_the_cure(setting):
    (said,) = softmax_warnings(session_of(100, setting=setting), record_of(0.1, 0.25, 0.4))
    assert "layer.1, layer.2 off by up to 40%: at 128 tokens, 30% of the attention rounds to zero;" in said
    assert ("calibration.softmax_scale: auto" in said) == (setting == "fixed")
    assert "type Attention and precision fp16" in said


def test_longer_data_than_calibration_saw_are_counted():
    (said,) = softmax_warnings(session_of(100, 300, 384), record_of(0.1, longest=200))
    assert "2 of 3 evaluation samples have more than the 200 tokens" in said
    assert "the longest has 384" in said
