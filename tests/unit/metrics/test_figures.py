"""Each figure has one form, whatever shows it."""

import pytest

from qdqbench.eval.metrics import figures
from qdqbench.quantize.report.document import Cell
from qdqbench.quantize.report.figures import coverage, uncovered

from ...support.records import comparison, speedup


def test_the_share_in_int8() -> None:
    assert coverage(35, 36, "linears") == "35 of 36 linears in INT8"
    assert uncovered(1, 36) == "1 of 36 GEMMs do not run in INT8"


@pytest.mark.parametrize(
    ("how", "within", "beyond"),
    [
        ({}, "-0.0010 ± 0.0020", "-0.0100 ± 0.0020"),
        ({"loss": True}, "+0.0010 ± 0.0020", "+0.0100 ± 0.0020"),
        ({"in_percent": True}, "-0.10 ± 0.20", "-1.00 ± 0.20"),
    ],
)
def test_a_change_and_whether_it_is_noise(how: dict[str, bool], within: str, beyond: str) -> None:
    small, large = (comparison({"accuracy": delta}, 0.002) for delta in (-0.001, -0.01))
    sign = -1 if how.get("loss") else 1
    assert figures.change(small, **how) == Cell(
        within, note="within noise", short=f"{within} ~", sort=-0.001 * sign
    )
    assert figures.change(large, **how) == Cell(beyond, sort=-0.01 * sign)
    assert figures.change_text(large) == "-0.0100 ± 0.0020, beyond noise"
    assert figures.change(comparison({"f1": 0.0}, 0.1), loss=True).text == "+0.0000 ± 0.1000"


@pytest.mark.parametrize(
    ("ratio", "cell", "clause"),
    [
        (speedup(1.31), Cell("1.31x", short="1.31x", sort=1.31), "1.31x as fast as FP16 engine at b32 s128"),
        (
            speedup(0.74, 0.7, 0.8),
            Cell("0.74x [0.70, 0.80] slower", "bad", short="0.74x", sort=0.74),
            "SLOWER than FP16 engine at b32 s128 (0.74x)",
        ),
        (
            speedup(1.31, 0.7, 1.4),
            Cell("1.31x [0.70, 1.40] inconclusive", "unclear", short="1.31x", sort=1.31),
            "1.31x as fast as FP16 engine at b32 s128 (95% CI [0.70, 1.40], inconclusive)",
        ),
        (
            speedup(1.31, 1.2, 1.4).model_copy(update={"quick": True}),
            Cell("1.31x [1.20, 1.40]", short="1.31x", sort=1.31),
            "1.31x as fast as FP16 engine at b32 s128 (quick bench, 95% CI [1.20, 1.40])",
        ),
    ],
)
def test_a_speed_up_is_a_cell_and_a_clause(ratio, cell, clause) -> None:
    assert (figures.speed(ratio), figures.speed_clause(ratio)) == (cell, clause)
    assert figures.speed(None) == Cell()


def test_milliseconds() -> None:
    shown = {None: "", 0.67123: "0.6712", 9.94: "9.94", 31.52: "31.52", 1234.5: "1234", 123456.7: "123457"}
    assert {value: figures.latency(value) for value in shown} == shown
    assert figures.latency(speedup(2, ms=1.5)) == "1.5"
