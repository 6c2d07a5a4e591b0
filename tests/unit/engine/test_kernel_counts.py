"""Kernels of an engine with several profiles are counted for one, and the number of profiles is said."""

import json
from pathlib import Path

import pytest

from qdqbench.quantize.engine.layers import format_count, kernel_kind, select_profile
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.lint.inspection import inspect_layers

from ...support.layer_tables import bert

GOLDEN = Path(__file__).parents[2] / "golden"


def copies(number: int) -> list:
    """The table of an engine with that many profiles."""
    return [
        row.model_copy(update={"name": row.name.replace("_myl0_", f"_myl{copy}_")})
        for copy in range(number)
        for row in bert()
    ]


def test_one_profile_is_counted_and_the_others_are_said() -> None:
    rows, profiles = select_profile(bert())
    assert profiles == 1
    assert format_count(bert()) == f"{len(rows)} kernels"
    four = copies(4)
    assert (len(select_profile(four)[0]), select_profile(four)[1]) == (len(rows), 4)
    assert format_count(four) == f"{4 * len(rows)} kernels, {len(rows)} for each of 4 profiles"
    assert sum(inspect_layers(four).kernel_counts.values()) == len(rows)


def test_profiles_with_other_kernels_are_told_by_the_most() -> None:
    less = [row for row in copies(2) if not row.name.endswith("_myl1_3")]
    rows, _ = select_profile(bert())
    total = len(less) - (len(copies(2)) - 2 * len(rows))
    assert format_count(less) == f"{total} kernels, at most {len(rows)} for each of 2 profiles"


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_layernorms_of_cpu_runtimes_are_counted(backend: str) -> None:
    """OpenVINO's kernel of the statistics, MVN, is named after no ONNX node; what scales it is."""
    rows = json.loads((GOLDEN / f"layers_{backend}.json").read_text(encoding="utf-8"))
    layers = [LayerRow.model_validate(row) for row in rows]
    assert sum(inspect_layers(layers).layernorm.values()) == 2 * 6 + 1
    assert "elementwise" not in {kernel_kind(row) for row in layers if row.kind == "MVN"}
