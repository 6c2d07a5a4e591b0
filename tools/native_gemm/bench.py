"""What native INT8 kernels of Hopper give at the GEMMs of BERT: ours, CUTLASS, Triton, cuBLASLt and PyTorch.

    python tools/native_gemm/bench.py --cutlass cutlass --out native_gemm.json

`--cutlass` (or CUTLASS_DIR) is a checkout of NVIDIA/cutlass, whose headers nvcc compiles; without one only
Triton and PyTorch are measured, and the result says so. Each contestant is a CUDA graph of 12 launches with
weights of their own, as in a model. Kernels of ours are checked against PyTorch's integers first; all are
timed in turns, in a shuffled order. The best of each kind then runs for half a second without a pause (hot).
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

LINEARS = ("q, k and v", "attention output", "feed-forward 1", "feed-forward 2")
MODELS = {"bert-base": (768, 3072, 12), "bert-large": (1024, 4096, 24)}  # hidden, feed-forward, layers
LAUNCHES = 12  # of a graph
BURST_MS = 6.0
HOT_MS = 500.0
KINDS = ("own", "cutlass", "triton", "cublaslt", "int_mm", "fp16")
FIRST_ROUNDS, ROUNDS, FINALISTS = 2, 7, 3


@dataclass
class Lane:
    """A contestant at one size."""

    name: str
    kind: str  # one of KINDS
    replay: Callable[[], None]
    us: list[float]  # of one launch, by round


def sizes(model: str) -> list[tuple[str, int, int, int]]:
    """(linear, N, K, epilogue of gemm.cu) of a layer."""
    hidden, wide, _ = MODELS[model]
    shapes = ((3 * hidden, hidden, 1), (hidden, hidden, 3), (wide, hidden, 2), (hidden, wide, 3))
    return [(name, *shape) for name, shape in zip(LINEARS, shapes, strict=True)]


def summed(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds of all GEMMs of a model, the best of each kind at each size; None where one is missing."""
    rows = []
    for model, tokens in dict.fromkeys((cell["model"], cell["tokens"]) for cell in cells):
        mine = [cell for cell in cells if (cell["model"], cell["tokens"]) == (model, tokens)]
        row: dict[str, Any] = {"model": model, "tokens": tokens}
        for kind in KINDS:
            best = [cell["best"].get(kind) for cell in mine]
            whole = len(mine) == len(LINEARS) and all(best)
            for what, key in (("us", "ms"), ("hot_us", "hot_ms")):
                total = sum(one[what] for one in best) * MODELS[model][2] / 1e3 if whole else None
                row[f"{kind}_{key}"] = total
        rows.append(row)
    return rows


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: TOPS of each GEMM, then the sums."""
    kinds = KINDS
    lines = ["| model | tokens | linear | N | K | " + " | ".join(kinds) + " | fastest CUTLASS kernel |"]
    lines += ["|---" * 12 + "|"]
    for cell in cells:
        tops = [f"{best['tops']:.0f}" if (best := cell["best"].get(kind)) else "" for kind in kinds]
        name = cell["best"].get("cutlass", {}).get("name", "").removeprefix("CUTLASS ")
        row = [cell["model"], cell["tokens"], cell["linear"], cell["n"], cell["k"], *tops, name]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += [
        "",
        "| model | tokens | " + " | ".join(f"{kind}, ms" for kind in kinds) + " |",
        "|---" * 8 + "|",
    ]
    for row in summed(cells):
        ms = [f"{row[f'{kind}_ms']:.3f}" if row[f"{kind}_ms"] else "" for kind in kinds]
        lines.append(f"| {row['model']} | {row['tokens']} | " + " | ".join(ms) + " |")
    return "\n".join(lines) + "\n"


def measure(cell: dict[str, Any], tiles: list[Any], triton_gemm: Any, own: Any, cublas: Any) -> None:
    """Time every contestant at one size; fills in what ran, what did not, and the best of each kind."""
    import torch
    from contestants import Operands, TorchFp16, torch_int8

    from qdqbench.quantize.engine.cuda.names import STATIONARY, TILES, fits_stationary

    made = Operands.random(cell["tokens"], cell["n"], cell["k"], cell["epilogue"], LAUNCHES)
    swizzles = (1, 8) if cell["tokens"] >= 4096 else (1,)
    runs: list[tuple[str, str, Callable[[], Any]]] = [
        (f"{tile.name} swizzle {swizzle}", "cutlass", partial(tile.run, made, swizzle))
        for tile in tiles
        for swizzle in swizzles
    ]
    for config in triton_gemm.CONFIGS if triton_gemm else []:

        def run(config=config) -> None:
            for a, b, c, d in made.launches():
                triton_gemm.launch(config, made.epilogue, a, b, c, made.scale, made.bias, made.next_scale, d)

        runs.append((f"Triton {config}", "triton", run))
    for tile in (*TILES, STATIONARY) if fits_stationary(made.k) else TILES:
        form = " stationary" if tile.stationary else ""
        runs.append((f"{tile.m}x{tile.n}x128{form}", "own", partial(own.run, tile, made)))
    offered = enumerate(cublas.algorithms(made))
    runs += [
        (f"cuBLASLt INT8 {number}", "cublaslt", partial(cublas.run, each, made)) for number, each in offered
    ]
    runs += [
        ("torch._int_mm", "int_mm", lambda: torch_int8(made)),
        ("cuBLASLt FP16", "fp16", TorchFp16(made).run),
    ]
    lanes = []
    for name, kind, call in runs:
        try:
            for output in made.outputs:
                output.fill_(99)
            call()
            torch.cuda.synchronize()
            wrong = made.wrong() if kind in {"own", "cutlass", "triton"} else ""
            wrong = cublas.wrong(made) if kind == "cublaslt" else wrong
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if wrong:
            cell["refused"][name] = wrong
            print(f"{name}: {wrong}", flush=True)
            torch.cuda.synchronize()  # a fault of the GPU ends the run here, with the kernel's name
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        lanes.append(Lane(name, kind, graph.replay, []))
    rounds(lanes, FIRST_ROUNDS)
    best: list[Lane] = []
    for kind in KINDS:
        mine = [lane for lane in lanes if lane.kind == kind]
        best += sorted(mine, key=lambda lane: median(lane.us))[:FINALISTS]
    for lane in lanes:
        cell["screened_us"][lane.name] = round(median(lane.us), 3)
        lane.us.clear()
    rounds(best, ROUNDS)
    operations = 2 * cell["tokens"] * cell["n"] * cell["k"]
    for lane in sorted(best, key=lambda lane: median(lane.us)):
        us = median(lane.us)
        found = {
            "name": lane.name,
            "us": us,
            "tops": operations / us / 1e6,
            "least_us": min(lane.us),
            "most_us": max(lane.us),
        }
        if lane.kind not in cell["best"]:
            cell["best"][lane.kind] = found | {"hot_us": hot(lane, us)}


def rounds(lanes: list[Lane], count: int) -> None:
    """Time every lane `count` times, in a new order each time, in bursts of about BURST_MS."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(count):
        for lane in random.sample(lanes, len(lanes)):
            start.record()
            for _ in range(2):
                lane.replay()
            end.record()
            end.synchronize()
            times = max(2, min(200, int(BURST_MS / max(start.elapsed_time(end) / 2, 1e-3))))
            start.record()
            for _ in range(times):
                lane.replay()
            end.record()
            end.synchronize()
            lane.us.append(start.elapsed_time(end) * 1e3 / times / LAUNCHES)


def hot(lane: Lane, us: float) -> float:
    """Microseconds of a launch over HOT_MS without a pause, the first half apart."""
    import torch

    times = max(1, int(HOT_MS * 1e3 / 2 / us / LAUNCHES))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(times):
        lane.replay()
    start.record()
    for _ in range(times):
        lane.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / times / LAUNCHES


def about(cutlass: Path | None, failed: list[str], seed: int) -> dict[str, Any]:
    """Hardware, versions and how it was measured."""
    import torch

    ask = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    smi = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    version = ""
    if cutlass:
        text = (cutlass / "include/cutlass/version.h").read_text()
        version = ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text))
    nvcc = subprocess.run("nvcc --version", shell=True, capture_output=True, text=True, check=False).stdout
    return {
        "gpu": smi,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": (re.findall(r"release [^\n]*", nvcc) or [""])[0],
        "cutlass": version or "absent: no checkout of NVIDIA/cutlass was given",
        "did_not_compile": failed,
        "seed": seed,
        "method": f"CUDA graphs of {LAUNCHES} launches with weights of their own, median of {ROUNDS} "
        f"rounds of {BURST_MS:.0f} ms in turns; the {FINALISTS} best of a kind after {FIRST_ROUNDS} rounds",
        "codes": "normal, amax at 5 standard deviations",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    checkout = os.environ.get("CUTLASS_DIR")
    parser.add_argument("--cutlass", type=Path, default=checkout, help="checkout of NVIDIA/cutlass")
    parser.add_argument("--build", type=Path, default=Path("build/native_gemm"), help="for compiled kernels")
    parser.add_argument("--out", type=Path, default=Path("native_gemm.json"))
    parser.add_argument("--model", action="append", choices=MODELS, help="both without it")
    parser.add_argument("--tokens", action="append", type=int, help="rows of a GEMM; 128 to 16384 without it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cutlass = Path(options.cutlass) if options.cutlass else None
    if cutlass and not (cutlass / "include/cutlass/version.h").is_file():
        sys.exit(f"{cutlass} has no include/cutlass: give a checkout of https://github.com/NVIDIA/cutlass")
    from contestants import CublasLt, Cutlass, Own, compile_tiles

    started = time.time()
    libraries, failed = compile_tiles(cutlass, options.build, options.jobs) if cutlass else ({}, [])
    print(f"{len(libraries)} kernels after {time.time() - started:.0f} s", *failed, sep="\n", flush=True)
    if options.compile_only:
        return int(bool(failed))
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("this benchmark needs a Hopper GPU (compute capability 9.0)")
    try:
        import triton_gemm
    except ImportError:
        triton_gemm = None
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    facts = about(cutlass, failed, options.seed)
    own, cublas = Own(), CublasLt()
    tiles, cells = [Cutlass(tile, path) for tile, path in libraries.items()], []
    for model in options.model or MODELS:
        for tokens in options.tokens or (128, 1024, 4096, 16384):
            for linear, n, k, epilogue in sizes(model):
                cell = {"model": model, "tokens": tokens, "linear": linear, "n": n, "k": k}
                cells.append(cell | {"epilogue": epilogue, "best": {}, "screened_us": {}, "refused": {}})
                measure(cells[-1], tiles, triton_gemm, own, cublas)
                found = {kind: round(best["tops"]) for kind, best in cells[-1]["best"].items()}
                print(f"{time.time() - started:5.0f} s {model} {tokens} {linear}: {found}", flush=True)
                result = {"about": facts, "cells": cells, "sums": summed(cells)}
                options.out.write_text(json.dumps(result, indent=1) + "\n")
                torch.cuda.empty_cache()
    print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
