"""What teams of warps would give attention over long rows (teams.cu), beside the kernels that are shipped.

    python -m tests.tools.native_attention.bench --out native_attention.json

Each contestant is a CUDA graph of 12 launches on inputs of their own, as in a model, with one to three heads
a block. Codes are random. Its answers are held to those of the shipped kernel; all are timed in turns, in a
shuffled order. tests/unit/tools/test_native_attention.py compares the kernels without a GPU.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tests.tools.measure_tables import draw_squad_lengths

from qdqbench.quantize.engine.cuda.compile import compile_text, read_source
from qdqbench.quantize.engine.cuda.driver import AttentionArguments, Kernels
from qdqbench.quantize.engine.cuda.runtime import KEYS, WINDOW, find_reach

TEAMS = Path(__file__).with_name("teams.cu")
SHAPES = {2: (12, 6), 3: (12, 6), 4: (12,)}  # warps of a block, by warps of a team
SIZES = 32, 64  # of a head
LAUNCHES, ROUNDS, REPLAYS = 12, 9, 4
MOST_SHARED = 227 * 1024  # bytes of a block
CASES: dict[str, tuple[list[int], int, int]] = {  # rows, heads and their size
    "BERT-base 32 x 384": ([384] * 32, 12, 64),
    "BERT-base 8 x 384": ([384] * 8, 12, 64),
    "BERT-base 1 x 384": ([384], 12, 64),
    "BERT-base 48 x 256": ([256] * 48, 12, 64),
    "BERT-base 24 x 512": ([512] * 24, 12, 64),
    "BERT-large, as long as SQuAD's": ([], 16, 64),
    "MiniLM 32 x 384": ([384] * 32, 12, 32),
}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Contestant:
    """A kernel, and what its blocks take."""

    name: str
    queries: int  # of a block
    warps: int
    team: int = 1

    def count_bytes(self, size: int, reach: int, heads: int) -> int:
        """Return the shared memory of a block."""
        shown = 8 * self.team * self.queries if self.team > 1 else 0
        buffers = (self.queries + 2 * reach + 4) * size * (2 if heads > 1 else 1)
        return buffers + (self.team - 1) * self.queries * size * 4 + shown


def list_contestants(size: int, reach: int) -> Iterator[Contestant]:
    """Yield the shipped kernel, then the others."""
    yield Contestant(f"attention_{size}_{'short' if reach == KEYS else 'long'}", WINDOW, WINDOW // 16)
    for team, shapes in SHAPES.items():
        for warps in shapes:
            yield Contestant(f"teams_{size}_{team}_{warps}", 16 * (warps // team), warps, team)


def read_text() -> str:
    """Return the source of all contestants."""
    lines = [f"ATTENTION({size}, {size}, true, false)" for size in SIZES]
    for size, (team, shapes) in itertools.product(SIZES, SHAPES.items()):
        for warps in shapes:
            lines.append(f"TEAM(teams_{size}_{team}_{warps}, {size}, {team}, {warps}, true, false)")
    return "\n".join([read_source("attention"), TEAMS.read_text(), *lines, ""])


class Inputs:
    """Rows of random codes: NumPy's arrays, or what `move` makes of them."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        size: int,
        seed: int = 0,
        move: Callable[[Any], Any] = np.asarray,
    ) -> None:
        drawn, count = np.random.default_rng(seed), sum(lengths)
        tokens = -(-count // WINDOW) * WINDOW  # spare ones are rows of one
        self.starts = np.concatenate([np.cumsum([0, *lengths]), np.arange(count + 1, tokens + 1)])
        rows = np.diff(self.starts)
        codes = np.rint(drawn.standard_normal((tokens, 3 * heads * size)) * 30).clip(-127, 127)
        self.heads, self.size, self.codes = heads, size, move(codes.astype(np.int8))
        self.start, self.end = (
            move(np.repeat(each, rows).astype(np.int32)) for each in (self.starts[:-1], self.starts[1:])
        )
        self.factor = move(np.linspace(0.01, 0.03, heads * size, dtype=np.float32))

    def launch(
        self, kernels: Any, asked: Contestant, heads: int, out: Any, find: Callable[[Any], int]
    ) -> bool:
        """Launch into [T, H] codes; False where a block would need more shared memory than there is."""
        hidden, reach = self.heads * self.size, find_reach(self.starts, asked.queries)
        shared = asked.count_bytes(self.size, reach, heads)
        if shared > MOST_SHARED:
            return False
        parts = [find(self.codes) + part * hidden for part in range(3)]
        call = AttentionArguments(*parts, *map(find, (self.start, self.end, self.factor, out)))
        call.most, call.heads, call.scale, call.unit = reach, heads, 0.0005, 127.0
        call.tokens, call.hidden, call.pitch = len(self.codes), hidden, 3 * hidden
        grid = -(-len(self.codes) // asked.queries), -(-self.heads // heads)
        kernels.launch(asked.name, grid, 32 * asked.warps, [call], shared)
        return True


def measure(kernels: Kernels, lengths: list[int], heads: int, size: int) -> list[dict[str, Any]]:
    """Time all contestants on such rows."""
    import torch

    inputs = [
        Inputs(lengths, heads, size, seed, lambda array: torch.from_numpy(array).cuda()) for seed in range(4)
    ]
    codes = torch.full((len(inputs[0].codes), heads * size), 99, dtype=torch.int8, device="cuda")
    outs = [codes.clone() for _ in inputs]
    rows: list[dict[str, Any]] = []
    graphs: list[Any] = []
    wanted: Any = None
    listed = list_contestants(size, find_reach(inputs[0].starts))
    for asked, together in itertools.product(listed, (1, 2, 3)):

        def launch(number: int, asked: Contestant = asked, together: int = together) -> bool:
            each = number % len(inputs)
            return inputs[each].launch(kernels, asked, together, outs[each], lambda array: array.data_ptr())

        outs[0].fill_(99)
        if not launch(0):
            continue
        torch.cuda.synchronize()
        wanted = outs[0].clone() if wanted is None else wanted
        off = (outs[0].int() - wanted.int()).abs()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(LAUNCHES):
                launch(number)
        graphs.append(graph)
        differ = {"most_off": int(off.max()), "share_off": float((off > 0).float().mean())}
        rows.append({"kernel": asked.name, "heads": together, **differ, "us": []})
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ROUNDS):
        for each in random.sample(range(len(graphs)), len(graphs)):
            graphs[each].replay()
            start.record()
            for _ in range(REPLAYS):
                graphs[each].replay()
            end.record()
            end.synchronize()
            rows[each]["us"].append(start.elapsed_time(end) * 1e3 / REPLAYS / LAUNCHES)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("native_attention.json"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    import torch

    kernels = Kernels([compile_text("attention", read_text())])
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": options.seed}
    found: dict[str, Any] = {"about": about, "cases": {}}
    header = ["rows", "kernel", "heads of a block", "us", "over the shipped kernel", "codes that differ"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for name, (given, heads, size) in CASES.items():
        rows = found["cases"][name] = measure(kernels, given or draw_squad_lengths(92).tolist(), heads, size)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        rows = sorted(rows, key=lambda row: median(row["us"]))
        best = {row["kernel"]: row for row in reversed(rows)}
        shipped = next(median(row["us"]) for row in rows if row["kernel"].startswith("attention"))
        for kernel, row in sorted(best.items(), key=lambda pair: median(pair[1]["us"])):
            us, off = median(row["us"]), f"{row['share_off']:.3%}, by {row['most_off']} at most"
            print(
                f"| {name} | {kernel} | {row['heads']} | {us:.1f} | {shipped / us:.2f}x | {off} |", flush=True
            )


if __name__ == "__main__":
    main()
