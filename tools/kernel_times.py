"""Print what kernels of an engine of backend cuda take: each alone, and all in a CUDA graph without a pause.

    python -m tools.kernel_times model.int8.engine --shape 128x128 --shape 32x384

Alone, a kernel has the GPU's full clock; each time is a median over repetitions. The graph runs for half a
second first, so its time is that of a hot GPU. Token ids are random.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import torch

from qdqbench.quantize.engine.cuda.model import CudaModel, load_kernels
from qdqbench.quantize.engine.cuda.runtime import PACKED, choose_graph, fill
from qdqbench.quantize.engine.cuda.tokens import Tokens, count_positions

REPEATED, HOT_S, LAUNCHES = 7, 0.5, 50


def random_tokens(engine: CudaModel, rows: int, length: int) -> Tokens:
    """Return rows of one length."""
    drawn = np.random.default_rng(0).integers(2, len(engine.arrays["embed.word"]), (rows, length))
    positions = count_positions(drawn, engine.plan.embed.padding)
    ids, positions = (each.ravel().astype(np.int32) for each in (drawn, positions))
    starts = np.arange(0, rows * length + 1, length, dtype=np.int32)
    return Tokens(ids, positions, np.zeros_like(ids), starts, np.ones((rows, length), bool), {})


def time_alone(engine: CudaModel, tokens: Tokens) -> dict[str, list[float]]:
    """Return the microseconds of each launch, by kernel."""
    runs = [engine.profile(tokens) for _ in range(REPEATED)]
    found = defaultdict(list)
    for operation in zip(*runs, strict=True):
        for name in operation[0]:
            found[name].append(1000 * median(each[name] for each in operation))
    return dict(found)


def time_graph(engine: CudaModel, tokens: Tokens) -> float:
    """Return the milliseconds of a launch of all kernels, one launch directly after the other."""
    bucket, rows, longest, reach = choose_graph(tokens)
    bound = engine.bind(bucket, rows, longest, reach)
    host = torch.zeros(len(bound.inputs[PACKED]), dtype=torch.int32)
    fill(host.numpy(), tokens, bucket, rows)
    bound.inputs[PACKED].copy_(host)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    until = time.monotonic() + HOT_S
    while time.monotonic() < until:
        bound.launch()
        bound.stream.synchronize()
    begin.record(bound.stream)
    for _ in range(LAUNCHES):
        bound.launch()
    end.record(bound.stream)
    end.synchronize()
    return begin.elapsed_time(end) / LAUNCHES


def table(times: dict[str, list[float]], graph: float) -> str:
    """Return Markdown: a row for each kernel, the one that takes most first, then their sum and the graph."""
    whole = sum(map(sum, times.values()))
    lines = ["| kernel | launches | us, median | ms | share |", "|---|---|---|---|---|"]
    for name, each in sorted(times.items(), key=lambda pair: -sum(pair[1])):
        taken = f"{median(each):.1f} | {sum(each) / 1000:.3f} | {sum(each) / whole:.0%}"
        lines.append(f"| {name} | {len(each)} | {taken} |")
    launches = sum(map(len, times.values()))
    lines += [
        f"| all, each alone | {launches} | | {whole / 1000:.3f} | 100% |",
        f"| CUDA graph, hot | {launches} | | {graph:.3f} | |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--shape", action="append", required=True, help="rows and tokens, like 128x128")
    given = parser.parse_args()
    engine, _ = load_kernels(given.engine)
    for shape in given.shape:
        tokens = random_tokens(engine, *map(int, shape.split("x")))
        print(f"{given.engine.name}, {shape}, {torch.cuda.get_device_name()}\n")
        print(table(time_alone(engine, tokens), time_graph(engine, tokens)), flush=True)


if __name__ == "__main__":
    main()
