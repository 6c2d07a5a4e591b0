"""Where the engines of a cost measurement have INT8."""

from collections.abc import Sequence

import numpy as np

from qdqbench.eval.placement.space import Space, Unit
from qdqbench.quantize.families.family import ENCODER_KINDS

Chosen = tuple[frozenset[Unit], frozenset[int]]  # INT8 units, layers with INT8 attention


def choose_placements(space: Space, count: int, seed: int) -> list[Chosen]:
    """All linears, all with attention, each kind alone, pairs that matter, then random subsets; no twice."""
    units, layers = list(space.units), list(space.attention)
    of = {kind: frozenset(unit for unit in units if unit[1] == kind) for kind in ENCODER_KINDS}
    none: frozenset[int] = frozenset()
    found: list[Chosen] = [(frozenset(units), none), (frozenset(units), frozenset(layers))]
    found += [(of[kind], none) for kind in ENCODER_KINDS]
    found += [(of["ffn-in"] | of["ffn-out"], none), (of["qkv"] | of["output"], none)]
    found += [(of["output"], frozenset(layers)), (of["qkv"] | of["output"], frozenset(layers))]
    random = np.random.default_rng(seed)
    tries = 0
    while len(dict.fromkeys(found)) < count and tries < 100 * count:
        tries += 1
        share, part = random.uniform(0.15, 0.95), random.uniform(0, 1)
        chosen = frozenset(unit for unit in units if random.random() < share)
        fused = frozenset(n for n in layers if (n, "output") in chosen and random.random() < part)
        if chosen:
            found.append((chosen, fused))
    return list(dict.fromkeys(found))[:count]


def columns(chosen: Chosen, runs: Sequence[int]) -> dict[str, str]:
    """A placement as rows hold it; `runs` are layers in the order in which they run."""
    units, attention = chosen
    marks = {kind: "".join("01"[(n, kind) in units] for n in runs) for kind in ENCODER_KINDS}
    return marks | {"attention": "".join("01"[n in attention] for n in runs)}
