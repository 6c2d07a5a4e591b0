"""Calibration methods side by side: the rows, one pass for all methods, and the table."""

import re

import pytest

from qdqbench.eval.selection import calibration_comparison as side_by_side
from qdqbench.eval.selection.calibration_comparison import METHODS, list_sections
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.errors import UserError

from ...support.tiny_bert import recipe_with

OWN = Calibration()


def differing(section, own):
    return {name for name, value in section if value != getattr(own, name)}


@pytest.mark.parametrize(
    "own",
    [
        OWN,
        Calibration(method="percentile/99.95", weights_method="mse", smoothing=0.5, bias_correction=True),
        Calibration(smoothing="gain", method="entropy"),
        Calibration(smoothing=0.65),
    ],
)
def test_default_rows_change_one_thing_beside_the_grid(own):
    found = list_sections(own, (), ())
    assert found[0] == own
    assert len(found) == len({section.model_dump_json() for section in found})
    single = [section for section in found if len(differing(section, own)) == 1]
    changed = {next(iter(differing(section, own))) for section in single}
    grid = {"method", "smoothing"}
    others = {"weights_method", "bias_correction", "outlier_channel_splitting", "centering"}
    assert changed == grid | others
    assert {section.method for section in found} == {*METHODS, own.method}
    assert {"none", own.smoothing, "gain"} <= {section.smoothing for section in found}
    assert all(differing(section, own) <= {"method", "smoothing"} or section in single for section in found)
    assert 10 <= len(found) <= 19


def test_a_softmax_over_the_largest_of_each_row_is_compared_with_scales():
    own = OWN.model_copy(update={"softmax_scale": "row-max", "centering": True})
    found = list_sections(own, (), ())
    assert [each.softmax_scale for each in found if differing(each, own) == {"softmax_scale"}] == [
        "min-error"
    ]
    assert [each.centering for each in found if differing(each, own) == {"centering"}] == [False]


def test_named_methods_and_smoothings_make_the_grid():
    found = list_sections(OWN, ("max", "mse"), ("none", "0.4", "gain"))
    assert {(section.method, section.smoothing) for section in found} == {
        (method, smoothing) for method in ("max", "mse") for smoothing in ("none", 0.4, "gain")
    }
    assert all(differing(section, OWN) <= {"method", "smoothing"} for section in found)
    assert list_sections(OWN, ("entropy",), ("0.4",))[0] == OWN


@pytest.mark.parametrize(
    ("methods", "smooths", "named"),
    [
        (["average"], [], "average"),
        (["percentile/30"], [], "percentile/30"),
        ([], ["much"], "much"),
        ([], ["1.5"], "1.5"),
        ([], ["nan"], "nan"),
    ],
)
def test_what_is_no_method_is_named(methods, smooths, named):
    with pytest.raises(UserError, match=re.escape(named)) as caught:
        list_sections(OWN, methods, smooths)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("match", ["encoder.layer.*", "encoder.layer.*.self.*"])
def test_splitting_is_a_row_where_there_is_something_to_split(tiny_bert, match):
    rules = [{"match": match, "type": "Linear", "weights": "int8/per-channel", "input": "int8/per-tensor"}]
    task = Task(name="x", text_columns=("sentence",), num_labels=3, metrics=("accuracy",))
    config = RunConfig(recipe=recipe_with(rules=rules), model=str(tiny_bert), task=task, data="none")
    cases = side_by_side.list_cases(Session(config, tiny_bert), (), ())
    split = {case.section.outlier_channel_splitting for case in cases}
    assert split == ({0, 64} if match == "encoder.layer.*" else {0})


def test_reconstruction_is_a_row_where_it_is_named(tiny_bert):
    task = Task(name="x", text_columns=("sentence",), num_labels=3, metrics=("accuracy",))
    config = RunConfig(recipe=recipe_with("bert-int8-linears"), model=str(tiny_bert), task=task, data="none")
    session = Session(config, tiny_bert)
    assert list_sections(OWN, ["reconstruction"], ()) == [OWN]  # asked before anything is loaded
    assert not any(case.recipe.reconstruction for case in side_by_side.list_cases(session, (), ()))
    for methods, count in ((["reconstruction"], 2), (["mse", "reconstruction"], 4)):
        *others, last = side_by_side.list_cases(session, methods, ())
        assert len(others) + 1 == count
        assert last.recipe.reconstruction is not None
        assert last.section == others[0].section
        assert last.key not in {case.key for case in others}
