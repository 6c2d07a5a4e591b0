"""Time kernels of a run's INT8 engine and of what it is measured against on a CPU, summed by kind.

    python -m tools.cpu_kernels runs/cpu --shape 8x128 --dataset sst2 --out docs/measured/kernels.json

OpenVINO runs the engine, NNCF's and the FP32 export; ONNX Runtime the engine, dynamic INT8 and the export.
They take turns. Of each kernel the least time of a few blocks of runs counts, as others may hold a core;
Reorders do not, which convert weights once. Token ids of a shape are random; rows of a data set go in
batches of 32, as in `bench --dataset`. What OUT has of the same model, shape, runtime and CPU is replaced.
docs/results/cpu.md shows it.
"""

import argparse
import importlib.metadata
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qdqbench.eval.bench.cpu import quantize_dynamically, quantize_with_nncf
from qdqbench.eval.bench.measure import random_sets
from qdqbench.eval.bench.target import Target, batched_splits, run_target
from qdqbench.quantize.engine.cpu_runtimes import CompiledModel, choose_compute, compile_model
from qdqbench.quantize.engine.layers import ATTENTION
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.utils.arrays import Batch
from qdqbench.quantize.utils.system.cpu import find_cpu

ELEMENTWISE = (
    "Add DynamicQuantizeLinear Eltwise LayerNormalization MVN Mul QuantizeLinear SkipLayerNormalization Sub"
)
KINDS = {ATTENTION: "attention"} | dict.fromkeys(ELEMENTWISE.split(), "elementwise")
REPEATED, ROWS = 2, 32  # runs of a block


class Timed:
    """A model of kernels with their times, in ms of all batches."""

    def __init__(self, model: CompiledModel, batches: Sequence[Batch], *, means: bool) -> None:
        self.model, self.means, self.runs, self.least = model, means, 0, list[float]()
        self._sums = list[float]()
        self._batches = [
            {name: batch[name].astype(takes.dtype) for name, takes in model.inputs.items()}
            for batch in batches
        ]

    def block(self) -> None:
        for batch in self._batches * REPEATED:
            self.model.run(batch)
        self.runs += REPEATED * len(self._batches)
        made = [kernel.ms for kernel in self.model.kernels()]
        if self.means:  # OpenVINO's are of all runs so far
            sums, self._sums = self._sums, [mean * self.runs for mean in made]
            made = [max(0.0, now - sum_) / REPEATED for now, sum_ in zip(self._sums, sums, strict=False)]
        self.least = [*map(min, made, self.least or made)]

    def by_kind(self) -> dict[str, float]:
        found = dict.fromkeys(("GEMM + GELU", "other GEMMs", "attention", "elementwise", "other"), 0.0)
        rows = [kernel.row for kernel in self.model.kernels()]
        unfused = {module_of(row.name) for row in rows if row.kind == "Softmax"}
        for row, behind, ms in zip(rows, [*rows[1:], None], self.least, strict=True):
            gelu = any(re.search(r"Gelu(_\d+)?$", name) for name in (row.kind, *row.onnx))
            gemm = gelu or (behind is not None and "Gelu" in behind.kind)
            if row.kind == "Reorder":
                continue
            if module_of(row.name) in unfused:
                kind = "attention"
            elif row.kind == "gemm" or gelu:
                kind = "GEMM + GELU" if gemm else "other GEMMs"
            else:
                kind = KINDS.get(row.kind, "other")
            found[kind] += ms
        return {kind: round(ms, 3) for kind, ms in found.items()}


def measure(given: argparse.Namespace) -> list[dict[str, object]]:
    target, cpu, backend = run_target(given.run), find_cpu(), given.backend
    ort = backend == "onnxruntime"
    compute = choose_compute(backend, cpu, "fp16")
    models: dict[str, Any] = {
        "INT8": target.int8_graph(backend).read_bytes(),
        "dynamic" if ort else "NNCF": quantize_dynamically(target) if ort else quantize_with_nncf(target),
        "without INT8": target.graphs["fp32"].read_bytes(),
    }
    found = []
    for shape, batches in inputs(target, given).items():
        timed = {}
        for name, data in models.items():
            model = compile_model(
                backend, data, blob=False, compute=compute, threads=given.threads, profile=True
            )
            timed[name] = Timed(model, batches, means=not ort)
        for _ in range(given.blocks):
            for each in timed.values():
                each.block()
        systems = {name: each.by_kind() for name, each in timed.items()}
        about = {"model": target.about.name, "shape": shape, "threads": given.threads, "cpu": str(cpu)}
        about |= {"compute": compute, "runtime": f"{backend} {importlib.metadata.version(backend)}"}
        found.append({**about, "systems": systems})
        print(json.dumps(found[-1]), flush=True)
    return found


def inputs(target: Target, given: argparse.Namespace) -> dict[str, list[Batch]]:
    """Return batches of each shape, and of each data set, by what they are called."""
    found = dict[str, list[Batch]]()
    for shape in given.shape:
        sizes = tuple(map(int, shape.split("x")))
        ids = target.family.inputs, sizes, target.about.shape["vocabulary"]
        found[" x ".join(map(str, sizes))] = random_sets(*ids, 1, seed=0)
    for task in given.dataset:
        splits = batched_splits(target, task, batches=[ROWS], data=given.data, tokenizer=None, buckets=False)
        found[f"{ROWS} x {task}"] = splits[0].batches
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--shape", action="append", default=[], help="batch x tokens, as 8x128")
    parser.add_argument("--dataset", action="append", default=[], help="task, for OpenVINO")
    parser.add_argument("--data", help="of --dataset (default: the run's)")
    parser.add_argument("--backend", choices=["openvino", "onnxruntime"], default="openvino")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=10, help="OpenVINO's first is not counted")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if given.dataset and given.backend == "onnxruntime":
        parser.error("ONNX Runtime tells kernels of one run, and a data set is many")
    made = measure(given)
    if given.out:
        keys = ("model", "shape", "runtime", "cpu")
        known = json.loads(given.out.read_text("utf-8")) if given.out.is_file() else []
        new = {tuple(each[key] for key in keys) for each in made}
        kept = [each for each in known if tuple(each.get(key) for key in keys) not in new]
        given.out.write_text(json.dumps([*kept, *made], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
