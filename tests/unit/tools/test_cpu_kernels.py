"""Kernel times by kind: the least of a few blocks of runs, from means that OpenVINO keeps over all runs."""

import numpy as np
from tools import cpu_kernels

from qdqbench.quantize.engine.cpu_runtimes import Kernel, Signature
from qdqbench.quantize.engine.results import LayerRow


class Model:
    """One whose runs take 8 ms at first and 2 ms from then on, but 5 ms in a third block."""

    def __init__(self):
        self.runs, self.inputs = 0, {"input_ids": Signature(np.dtype(np.int64), (None, None))}

    def run(self, feeds):
        assert feeds["input_ids"].shape == (2, 3)
        self.runs += 1

    def kernels(self):
        block = cpu_kernels.REPEATED
        times = [8.0] * block + [2.0] * block + [5.0] * block
        mean = sum(times[: self.runs]) / self.runs
        kinds = ("gemm", ["a/Gelu"]), ("gemm", ["a/MatMul"]), ("Eltwise", []), ("Reorder", []), ("Gather", [])
        empty = {"inputs": [], "constants": [], "outputs": []}
        rows = [LayerRow(name=kind, kind=kind, onnx=onnx, kernel=kind, **empty) for kind, onnx in kinds]
        return [Kernel(row, mean) for row in rows]


def test_the_least_time_of_blocks_counts_by_kind():
    timed = cpu_kernels.Timed(Model())
    for _ in range(3):
        timed.block((2, 3), np.random.default_rng(0))
    found = timed.by_kind()
    assert {kind for kind, ms in found.items() if ms} == {
        "GEMM + GELU",
        "other GEMMs",
        "elementwise",
        "other",
    }
    assert {round(ms, 9) for ms in found.values()} == {0.0, 2.0}  # Reorders convert weights once


def test_out_replaces_what_it_has_of_the_same_cpu_and_shape(tmp_path, monkeypatch):
    def entry(shape, ms):
        return {"model": "m", "shape": shape, "cpu": "c", "systems": {"INT8": {"other": ms}}}

    out, made = tmp_path / "kernels.json", [entry("1 x 8", 1.0), entry("2 x 8", 2.0)]
    monkeypatch.setattr(cpu_kernels, "measure", lambda *_: made)
    cpu_kernels.main(["run", "--shape", "1x8", "--out", str(out)])
    made[:] = [entry("2 x 8", 3.0)]
    cpu_kernels.main(["run", "--shape", "2x8", "--out", str(out)])
    assert cpu_kernels.json.loads(out.read_text()) == [entry("1 x 8", 1.0), entry("2 x 8", 3.0)]
