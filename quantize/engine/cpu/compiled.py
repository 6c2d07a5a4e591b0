"""What both CPU runtimes have in common: an engine's kernels, and how it computes what is not quantized."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx

from qdqbench.quantize.graph.index import MATMULS
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.results import LayerRow

Compute = Literal["fp32", "bf16"]
Run = Callable[[Mapping[str, Array]], dict[str, Array]]
Sizes = tuple[int | None, int | None]  # batch and length; None: free
FREE: Sizes = (None, None)


@dataclass(frozen=True)
class Kernel:
    """One executed kernel, and its milliseconds where they were measured."""

    row: LayerRow
    ms: float


@dataclass(frozen=True)
class Signature:
    """What an input takes."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]  # None: free, the batch on axis 0 and the length on the others


ATTENTION = "attention"  # kind of a row that is a whole one


def name_products(rows: Sequence[LayerRow], graph: onnx.GraphProto) -> None:
    """Add each product that no row names to the row that computes what it feeds first, in place.

    OpenVINO names an FP32 product after its bias, and q k^T inside of a fused attention after its scale.
    """
    places = {name: row for row in rows if row.kind in ("gemm", ATTENTION) for name in row.onnx}
    consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for tensor in dict.fromkeys(node.input):
            consumers[tensor].append(node)
    for node in graph.node:
        if node.op_type not in MATMULS or node.name in places:
            continue
        waiting, seen = [node], {node.name}
        while waiting:
            here = waiting.pop(0)
            # the last product of a graph is named after its output
            row = places.get(here.name) or places.get(here.output[0])
            if row is not None:
                row.onnx.append(node.name)
                break
            if here is not node and here.op_type in MATMULS:
                continue
            for after in (each for tensor in here.output for each in consumers[tensor]):
                if after.name not in seen:
                    seen.add(after.name)
                    waiting.append(after)
