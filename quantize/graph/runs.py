"""Layers whose weights run several times: each run has nodes of its own in a graph, whose names say which."""

import re
from typing import TYPE_CHECKING

import onnx

from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.models.families.any_family import RUN
from qdqbench.quantize.models.families.known import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AGAIN = re.compile(r"(.+)_(\d+)")  # of a module's second call and all after it, as the exporter writes it


def name_runs(graph: onnx.GraphProto, model: "PreTrainedModel") -> None:
    """Name nodes of shared layers by module and run, in place: `/a/query_3/MatMul` is `/a/query/MatMul@3`.

    Runs are counted over the whole encoder, from 0 on. Graphs of other families stay as they are.
    """
    family = family_of(model.config)
    if not family.shared_layers:
        return
    first: dict[str, int] = {}
    for run, layer in enumerate(family.runs(model)):
        first.setdefault(layer, run)
    modules = {name for name, _ in model.named_modules()}
    for node in graph.node:
        path, _, operator = node.name.rpartition("/")
        again = None if module_of(node.name) in modules else _AGAIN.fullmatch(path)
        path, call = (again[1], int(again[2])) if again else (path, 0)
        place = family.place(module_of(f"{path}/{operator}"))
        if place is not None:
            node.name = f"{path}/{operator}@{first[f'{place.layers}.{place.number}'] + call}"


def run_of(name: str) -> str:
    """`@3` of a node of run 3 of a shared layer; else empty."""
    found = RUN.search(name)
    return found[0] if found else ""


def use_of(name: str) -> str:
    """Module of a node, with its run where that is shared: `albert.encoder.(...).attention.query@3`."""
    return module_of(name) + run_of(name)
