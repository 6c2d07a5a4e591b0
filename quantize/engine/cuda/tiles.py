"""The tile of each GEMM: by a model of Hopper's, or by timing at the first use of a size."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qdqbench.quantize.engine.cuda.names import (
    BROAD,
    NARROW,
    SLIM,
    STATIONARY,
    TILES,
    Target,
    Tile,
    fits_stationary,
)
from qdqbench.quantize.utils.capture import capture_graph

# us on one H200 of a block's first tile and of each further one, which the first hides in part: fixed, and
# for each 128 of K
_COSTS = {
    TILES[0]: (2.2, 0.33, -0.3, 0.42),
    TILES[1]: (2.2, 0.155, -0.2, 0.3),
    TILES[2]: (2.0, 0.106, 0.05, 0.16),
    BROAD: (2.2, 0.49, 3.5, 0.49),
    NARROW: (2.2, 0.12, -0.2, 0.2425),
    SLIM: (1.93, 0.103, 0.28, 0.112),  # half of the multiprocessors load as much of it as the L2 gives
}
_LEAST_STATIONARY = 5  # tiles of a block; with fewer, loading the weights first costs more than it saves
MOST_ITEMS = 4  # tiles, or parts of them, of a multiprocessor that have room for their sums
_PARTS = (1, 2, 4, 8)  # of K that different blocks may sum
_MOST_CACHE = 4 << 20  # bytes of a file of tiles


def choose_tile(m: int, n: int, k: int, multiprocessors: int, tiles: Sequence[Tile]) -> Tile:
    """Return the tile that is expected to be fastest, of those that a GEMM has.

    Weights that stay save power, not cycles. Power bounds the clock of a GPU under load.
    """

    def count(tile: Tile) -> int:
        return math.ceil(m / tile.m) * math.ceil(n / tile.n)

    def cost(tile: Tile) -> float:
        first, first_k, more, more_k = _COSTS[tile]
        busy = multiprocessors / 2 if tile == SLIM else multiprocessors
        waves, steps = math.ceil(count(tile) / busy), k / 128
        return first + first_k * steps + (waves - 1) * (more + more_k * steps)

    fastest = min((tile for tile in tiles if not tile.stationary), key=cost)
    stays = STATIONARY in tiles and fits_stationary(k)
    enough = count(STATIONARY) >= _LEAST_STATIONARY * multiprocessors
    return STATIONARY if fastest == TILES[0] and stays and enough else fastest


def may_split(form: Tile, m: int, n: int, k: int, multiprocessors: int) -> bool:
    """Return whether there is room for the sums of the parts of K, and enough of K for each."""
    items = math.ceil(m / form.m) * math.ceil(n / form.n) * form.parts
    enough = math.ceil(k / form.k) >= 2 * form.parts
    return form.parts == 1 or (form.splits and enough and items <= MOST_ITEMS * multiprocessors)


def list_forms(m: int, n: int, k: int, multiprocessors: int, tiles: Sequence[Tile]) -> list[Tile]:
    """Return the tiles of mma.sync that may be the fastest, with parts of K that different blocks sum."""
    forms = [tile._replace(parts=parts) for tile in tiles for parts in _PARTS]

    def fits(form: Tile) -> bool:
        """Return whether a multiprocessor has some work, and not too many small pieces."""
        items = math.ceil(m / form.m) * math.ceil(n / form.n) * form.parts
        some = multiprocessors / 4 <= items <= 16 * multiprocessors
        return some and may_split(form, m, n, k, multiprocessors)

    large = m * n >= tiles[0].m * tiles[0].n * multiprocessors
    return [*filter(fits, forms)] or [tiles[0] if large else tiles[-1]]


def guess_form(m: int, n: int, k: int, multiprocessors: int, tiles: Sequence[Tile]) -> Tile:
    """Return a tile of mma.sync where none was timed: the largest that gives each multiprocessor one."""
    forms = list_forms(m, n, k, multiprocessors, tiles)
    sizes = ((math.ceil(m / each.m) * math.ceil(n / each.n) * each.parts, each) for each in forms)
    return next((form for items, form in sizes if items >= 0.9 * multiprocessors), forms[-1])


def round_size(m: int) -> int:
    """Return the tokens that a GEMM is timed for: four sizes for each power of two."""
    step = max(1, (1 << (m - 1).bit_length()) // 8)
    return -(-m // step) * step


def time_launches(launch: Callable[[], None]) -> float:
    """Return the milliseconds of launches in a CUDA graph, the least of three."""
    import torch

    launch()  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph):
        launch()
    times: list[float] = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times[1:])


class TileFile:
    """The tiles that were fastest on this GPU, kept in a file if there is one. They only save time."""

    def __init__(self, path: Path | None, codes: Mapping[str, bytes], target: Target) -> None:
        self._path, self._target = path, target
        self._tiles: dict[str, list[int]] = {}
        if path is None or target.wgmma:
            return
        import torch

        digest = hashlib.sha256(b"".join(code for _, code in sorted(codes.items()))).hexdigest()[:16]
        self._place = f"{torch.cuda.get_device_name()}, {target.name}, {digest}"
        self._tiles |= self._read().get(self._place, {})

    def _read(self) -> dict[str, Any]:
        """Return the tiles of all GPUs and engines; none where the file is absent or another's."""
        assert self._path is not None
        try:
            if self._path.stat().st_size > _MOST_CACHE:
                return {}
            found = json.loads(self._path.read_bytes())
            return {place: dict(tiles) for place, tiles in dict(found).items()}
        except (OSError, ValueError, TypeError, RecursionError):
            return {}

    def get(self, instance: str, m: int, n: int, k: int, multiprocessors: int) -> Tile | None:
        """Return the tile of a GEMM that was timed at about this size, if the GPU can launch it so."""
        found = self._tiles.get(f"{instance} {round_size(m)} {n} {k}")
        forms = (tile._replace(parts=parts) for tile in self._target.tiles for parts in _PARTS)
        named = (form for form in forms if [form.m, form.n, form.parts] == found)
        return next((form for form in named if may_split(form, m, n, k, multiprocessors)), None)

    def add(self, form: Tile, instance: str, m: int, n: int, k: int) -> None:
        self._tiles[f"{instance} {round_size(m)} {n} {k}"] = [form.m, form.n, form.parts]

    def keep(self) -> None:
        """Write the file, if it can be written."""
        if self._path is None:
            return
        made = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            made.write_text(json.dumps(self._read() | {self._place: self._tiles}, indent=1))
            made.replace(self._path)
        except OSError:
            made.unlink(missing_ok=True)
