"""The schema of bench.json: documented, strict, and read back as written."""

import json
from pathlib import Path
from typing import Any

import pytest

from qdqbench.eval.bench import results
from qdqbench.quantize.utils.errors import UserError

from ...support.benches import sample_bench


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    bench = sample_bench()
    results.write_bench(tmp_path / "bench.json", bench)
    assert results.read_bench(tmp_path / "bench.json") == bench


@pytest.mark.parametrize(
    ("change", "where"),
    [({"schema_version": 1}, "schema_version"), ({"surplus": 1}, "surplus"), ({"device": "tpu"}, "device")],
)
def test_another_schema_is_refused_in_one_sentence(
    tmp_path: Path, change: dict[str, Any], where: str
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(sample_bench().model_dump(mode="json") | change))
    with pytest.raises(UserError, match=f"{where}.*run `qdqbench bench` again"):
        results.read_bench(path)


def test_rows_that_were_not_measured_are_not_found() -> None:
    cell = sample_bench().configs[0]
    assert results.config_label(cell, None) == "1 x 128"
    assert results.row_of(cell, "int8") is cell.rows[0]
    cell.rows[0].status = "error"
    assert results.row_of(cell, "int8") is None
    assert results.speedup_of(cell, "int8", "fp32") is not None
    assert results.speedup_of(cell, "fp32", "int8") is None


def test_a_later_bench_adds_to_what_was_measured_of_the_same_files(tmp_path: Path) -> None:
    path, first = tmp_path / "bench.json", sample_bench()
    files, recipe = first.target.files, {"engine": {"backend": None}, "precision": {"compute": None}}
    assert results.read_earlier(path, files, recipe) == []
    results.write_bench(path, first)
    second = sample_bench(created="2026-07-02", earlier=results.read_earlier(path, files, recipe))
    results.write_bench(path, second)
    third = sample_bench(created="2026-07-03", earlier=results.read_earlier(path, files, recipe))
    assert [each.created[:10] for each in third.all] == ["2026-07-03", "2026-07-02", "2026-07-01"]
    assert not any(each.earlier for each in third.earlier)
    speed = [*results.list_speed(third)]
    assert [row.config for row in speed] == ["1 x 128", "8 x 128", "32 x 128"] * 3
    assert {row.conditions.created[:10] for row in speed if row.conditions} == {
        "2026-07-03", "2026-07-02", "2026-07-01"
    }  # fmt: skip
    assert results.read_earlier(path, {"model.int8.onnx": "cd" * 32}, recipe) == []  # of other files
