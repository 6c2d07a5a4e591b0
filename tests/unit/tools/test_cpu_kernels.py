"""Kernel times by kind: the least of a few blocks of runs, from means of all runs or from the last one."""

import numpy as np
import pytest
from tools import cpu_kernels

from qdqbench.quantize.engine.cpu_runtimes import Kernel, Signature
from qdqbench.quantize.engine.results import LayerRow

IDS = {"input_ids": np.zeros((2, 3), dtype=np.int64)}


class Model:
    """One whose runs take 8 ms at first and 2 ms from then on, but 5 ms in a third block."""

    def __init__(self, means, *kinds):
        self.runs, self.means, self.inputs = 0, means, {"input_ids": Signature(np.dtype(np.int32), (None,))}
        empty = {"inputs": [], "constants": [], "outputs": []}
        self.rows = [
            LayerRow(name=f"/layer/{name}", kind=kind, onnx=[name], kernel=kind, **empty)
            for kind, name in kinds
        ]

    def run(self, feeds):
        assert feeds["input_ids"].dtype == np.int32
        self.runs += 1

    def kernels(self):
        block = cpu_kernels.REPEATED
        times = ([8.0] * block + [2.0] * block + [5.0] * block)[: self.runs]
        return [Kernel(row, sum(times) / self.runs if self.means else times[-1]) for row in self.rows]


@pytest.mark.parametrize(
    ("means", "kinds", "expected"),
    [
        (True, ["gemm a/Gelu", "gemm a/MatMul", "Eltwise b/Add", "Reorder w", "Gather g"], [2, 2, 0, 2, 2]),
        (False, ["gemm a/MatMul", "gemm b/MatMul", "FastGelu c", "Add d", "Cast e"], [4, 2, 0, 2, 2]),
        (False, ["Gelu a/Gelu_1", "gemm b/Gelu_output_0_QuantizeLinear"], [2, 2, 0, 0, 0]),
        (False, ["gemm MatMul", "Softmax Softmax", "Transpose t", "Gelu a/g"], [2, 0, 6, 0, 0]),
    ],
    ids=[
        "OpenVINO, means of all runs",
        "a GELU of its own",
        "what reads a GELU",
        "an attention that is not fused",
    ],
)
def test_the_least_time_of_blocks_counts_by_kind(means, kinds, expected):
    timed = cpu_kernels.Timed(Model(means, *(kind.split() for kind in kinds)), [IDS], means=means)
    for _ in range(3):
        timed.block()
    # Reorders convert weights once
    assert [*timed.by_kind().values()] == expected


def test_out_replaces_what_it_has_of_the_same_cpu_and_shape(tmp_path, monkeypatch):
    def entry(shape, ms):
        return {"model": "m", "shape": shape, "cpu": "c", "runtime": "r", "systems": {"INT8": {"other": ms}}}

    out, made = tmp_path / "kernels.json", [entry("1 x 8", 1.0), entry("2 x 8", 2.0)]
    monkeypatch.setattr(cpu_kernels, "measure", lambda *_: made)
    cpu_kernels.main(["run", "--shape", "1x8", "--out", str(out)])
    made[:] = [entry("2 x 8", 3.0)]
    cpu_kernels.main(["run", "--shape", "2x8", "--out", str(out)])
    assert cpu_kernels.json.loads(out.read_text()) == [entry("1 x 8", 1.0), entry("2 x 8", 3.0)]
