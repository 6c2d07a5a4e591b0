"""Time OpenVINO's kernels of a run's INT8 engine, of NNCF's and of the FP32 export, summed by kind.

    python -m tools.cpu_kernels runs/cpu --shape 8x128 --shape 32x32 --out docs/measured/kernels.json

The engines take turns. Of each kernel the least time of a few blocks of runs counts, as others may hold
a core; Reorders do not, which convert weights once. Token ids are random. A model and shape that OUT has
of the same CPU are replaced. docs/results/cpu.md shows it.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qdqbench.eval.bench.cpu import quantize_with_nncf
from qdqbench.eval.bench.target import run_target
from qdqbench.quantize.engine.cpu_runtimes import CompiledModel, choose_compute, compile_model
from qdqbench.quantize.engine.layers import ATTENTION
from qdqbench.quantize.standalone.runtimes import load_openvino
from qdqbench.quantize.utils.system.cpu import find_cpu

KINDS = {ATTENTION: "attention", "Eltwise": "elementwise", "MVN": "elementwise"}
BLOCKS, REPEATED = 10, 2  # runs of a block; the first block is not counted


class Timed:
    """A model of kernels with their times, in ms."""

    def __init__(self, model: CompiledModel) -> None:
        self.model, self.runs, self.least = model, 0, list[float]()
        self._sums = list[float]()

    def block(self, shape: tuple[int, int], ids: np.random.Generator) -> None:
        feeds = {
            name: np.full(shape, name == "attention_mask", takes.dtype)
            if name != "input_ids"
            else ids.integers(1000, 20000, shape).astype(takes.dtype)
            for name, takes in self.model.inputs.items()
        }
        for _ in range(REPEATED):
            self.model.run(feeds)
        self.runs += REPEATED
        sums = [kernel.ms * self.runs for kernel in self.model.kernels()]  # OpenVINO tells means of all runs
        if self._sums:
            made = [max(0.0, now - before) / REPEATED for now, before in zip(sums, self._sums, strict=True)]
            self.least = [*map(min, made, self.least or made)]
        self._sums = sums

    def by_kind(self) -> dict[str, float]:
        found = dict.fromkeys(("GEMM + GELU", "other GEMMs", *KINDS.values(), "other"), 0.0)
        for kernel, ms in zip(self.model.kernels(), self.least, strict=True):
            if kernel.row.kind == "Reorder":
                continue
            gelu = any("Gelu" in name for name in kernel.row.onnx)
            gemm = "GEMM + GELU" if gelu else "other GEMMs"
            found[gemm if kernel.row.kind == "gemm" else KINDS.get(kernel.row.kind, "other")] += ms
        return {kind: round(ms, 3) for kind, ms in found.items()}


def measure(folder: Path, shapes: Sequence[str], threads: int) -> list[dict[str, object]]:
    target, cpu, ov = run_target(folder), find_cpu(), load_openvino()
    compute = choose_compute("openvino", cpu, "fp16")
    models = {
        "INT8": target.int8_graph("openvino").read_bytes(),
        "NNCF": quantize_with_nncf(target),
        "without INT8": target.graphs["fp32"].read_bytes(),
    }
    found = []
    for shape in shapes:
        rows, length = map(int, shape.split("x"))
        timed = {
            name: Timed(
                compile_model("openvino", data, blob=False, compute=compute, threads=threads, profile=True)
            )
            for name, data in models.items()
        }
        for _ in range(BLOCKS):
            for each in timed.values():
                each.block((rows, length), np.random.default_rng(0))
        systems = {name: each.by_kind() for name, each in timed.items()}
        about = {"model": target.about.name, "shape": f"{rows} x {length}", "threads": threads}
        about |= {"cpu": str(cpu), "compute": compute, "openvino": ov.__version__}
        command = f"python -m tools.cpu_kernels {folder.name} --shape {shape} --threads {threads}"
        found.append({**about, "command": command, "systems": systems})
        print(json.dumps(found[-1]), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--shape", action="append", required=True, help="batch x tokens, as 8x128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    made = measure(given.run, given.shape, given.threads)
    if given.out:
        keys = ("model", "shape", "cpu")
        known = json.loads(given.out.read_text("utf-8")) if given.out.is_file() else []
        new = {tuple(each[key] for key in keys) for each in made}
        kept = [each for each in known if tuple(each.get(key) for key in keys) not in new]
        given.out.write_text(json.dumps([*kept, *made], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
