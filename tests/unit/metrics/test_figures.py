"""Each figure has one form, whatever shows it."""

import pytest

from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.gate import judge_shapes
from qdqbench.quantize.report.document import Cell
from qdqbench.quantize.report.figures import coverage, uncovered

from ...support.records import comparison, speedup


def test_the_share_in_int8():
    assert coverage(35, 36, "linears") == "35 of 36 linears in INT8"
    assert uncovered(1) == "1 GEMM that should be in INT8 is not"


@pytest.mark.parametrize(
    ("how", "within", "beyond"),
    [({}, "-0.0010 ± 0.0020", "-0.0100 ± 0.0020"), ({"in_percent": True}, "-0.10 ± 0.20", "-1.00 ± 0.20")],
)
def test_a_change_and_whether_it_is_noise(how, within, beyond):
    small, large = (comparison({"accuracy": delta}, 0.002) for delta in (-0.001, -0.01))
    assert figures.change(small, **how) == Cell(within, note="within noise", short=f"{within} ~", sort=-0.001)
    assert figures.change(large, **how) == Cell(beyond, sort=-0.01)
    assert figures.change_text(large) == "-0.0100 ± 0.0020, beyond noise"
    assert figures.change(comparison({"f1": -0.0}, 0.1)).text == "+0.0000 ± 0.1000"


LOADED = speedup(0.73, 0.14, 4.07).model_copy(update={"cpu": speedup(1.1, 1.05, 1.2), "other_cores": 1.3})


@pytest.mark.parametrize(
    ("ratio", "cell", "place"),
    [
        (speedup(1.31), Cell("1.31x inconclusive", "unclear", sort=1.31), "1.31x"),
        (speedup(0.74, 0.7, 0.8), Cell("0.74x [0.70, 0.80] slower", "bad", sort=0.74), "0.74x [0.70, 0.80]"),
        (
            speedup(1.31, 0.7, 1.4),
            Cell("1.31x [0.70, 1.40] inconclusive", "unclear", sort=1.31),
            "1.31x [0.70, 1.40]",
        ),
        (speedup(1.01, 0.97, 1.04), Cell("1.01x [0.97, 1.04] as fast", sort=1.01), "1.01x [0.97, 1.04]"),
        (
            LOADED,
            Cell("1.10x [1.05, 1.20] by CPU time", note="by wall time 0.73x [0.14, 4.07]", sort=1.1),
            "1.10x [1.05, 1.20] by CPU time",
        ),
        (
            LOADED.model_copy(update={"other_cores": 0.1}),
            Cell("0.73x [0.14, 4.07] inconclusive", "unclear", sort=0.73),
            "0.73x [0.14, 4.07]",
        ),
    ],
)
def test_a_speed_up_is_a_cell_and_a_place(ratio, cell, place):
    assert figures.speed(ratio) == cell
    assert figures.speed_place(ratio) == f"{place} over FP16 engine at 32 x 128"
    assert figures.speed(None) == Cell()


def test_the_verdict_on_speed_is_the_worst_of_all_that_was_timed():
    fast, slow = speedup(1.31, 1.2, 1.4), speedup(0.89, 0.87, 0.89, config="8 x 128")
    again = [
        speedup(1.5, 1.4, 1.6, config="8 x 128"),  # a later bench takes no measured loss away
        speedup(0.5, 0.1, 2.0),  # what tells nothing takes no measured gain away
    ]
    shapes = judge_shapes([*again, fast, slow])
    assert shapes == [slow, fast]
    text = (
        "0.89x [0.87, 0.89] over FP16 engine at 8 x 128; best 1.31x [1.20, 1.40] over FP16 engine at 32 x 128"
    )
    assert figures.speed_verdict(shapes) == (f"SLOWER at 1 of 2 shapes: {text}", "bad")
    assert figures.speed_doubt(shapes) == "INT8 is slower at 1 of 2 shapes"
    assert figures.speed_verdict(judge_shapes([fast])) == (
        "faster at 32 x 128: 1.31x [1.20, 1.40] over FP16 engine at 32 x 128",
        "good",
    )
    same = speedup(1.0, 0.99, 1.01, config="8 x 128")
    doubts = [figures.speed_doubt(judge_shapes(each)) for each in ([fast], [fast, same], [same], [])]
    assert doubts == ["", "", "INT8 is no faster", ""]
    assert figures.speed_verdict([])[1] == ""


def test_milliseconds():
    shown = {None: "", 0.67123: "0.6712", 9.94: "9.94", 31.52: "31.52", 1234.5: "1234", 123456.7: "123457"}
    assert {value: figures.latency(value) for value in shown} == shown
    assert figures.latency(speedup(2, ms=1.5)) == "1.5"
