"""`qdqbench inspect` with what only a GPU can say: the inspector's own table, and kernel times."""

import json
import shutil

from ..integration.tiny import call


def test_the_inspector_agrees_with_the_saved_table(linears, tmp_path, capsys):
    for name in ("model.int8.engine", "model.int8.engine.json"):
        shutil.copy(linears / "engine" / name, tmp_path / name)
    told = [
        json.loads(call(capsys, "inspect", target, "--json").out)
        for target in (linears, tmp_path / "model.int8.engine")
    ]
    assert [each["int8_gemms"] for each in told] == [12, 12]
    assert [each["attention_fused"] for each in told] == [2, 2]
    assert told[0]["kernel_counts"] == told[1]["kernel_counts"]


def test_kernel_times_are_of_the_kernels_in_the_table(linears, capsys):
    done = call(capsys, "inspect", linears, "--profile", "gpu", "--json")
    assert (done.code, done.err) == (0, "")
    time = json.loads(done.out)["time"]
    assert time["total"] > 0
    assert time["by_kind"]["gemm"] > 0
    assert {"embeddings", "layer.0", "layer.1", "head"} <= set(time["by_block"])
    assert sum(time["by_kernel"].values()) > 0.9 * time["total"]
