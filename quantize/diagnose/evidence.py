"""Files of one build joined by the names of their nodes: ONNX node, engine kernel, measured time."""

from collections.abc import Collection, Iterable
from functools import cached_property

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.results import LayerRow
from qdqbench.quantize.diagnose.sources import Sources
from qdqbench.quantize.engine.facts import Facts, Graph, graph_of
from qdqbench.quantize.engine.inspection import Inspection, inspect_layers
from qdqbench.quantize.engine.layers import computing_rows

Share = tuple[float, str]  # a part of 1, and of what


class Evidence:
    """The sources, and what only several of them together tell."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.onnx = sources.onnx
        self.log = sources.log
        self.layers = sources.layers
        self.other_build = ""  # why table and graph could not be joined

    @cached_property
    def graph(self) -> Graph | None:
        """Nodes of the ONNX file."""
        stopped = self.onnx is None or not self.onnx.products
        return None if stopped or self.onnx is None else graph_of(self.onnx.path)

    @cached_property
    def inspection(self) -> Inspection | None:
        """The layer table, held against the graph and the profile where they are at hand."""
        if not self.layers:
            return None
        times = self.sources.profile or None
        try:
            joined = inspect_layers(self.layers, self.graph, times=times)
        except UserError as error:
            self.other_build = str(error)
        else:
            known = len(self.graph.linears) + len(self.graph.products) if self.graph else 0
            if 2 * len(joined.proof.unknown) <= known:
                return joined
            found = known - len(joined.proof.unknown)
            self.other_build = f"the table names {found} of {known} MatMul and Gemm nodes"
        return inspect_layers(self.layers, times=times)

    @property
    def facts(self) -> Facts | None:
        """What one copy of the network does in the engine."""
        return self.inspection.facts if self.inspection else None

    @cached_property
    def joined_time(self) -> bool:
        """Whether kernels of the profile are those of the table."""
        time = self.inspection.time if self.inspection else None
        return time is not None and bool(time.by_kernel)

    @cached_property
    def _kernels(self) -> dict[str, list[LayerRow]]:
        if self.facts is None or self.inspection is None:
            return {}
        graph = self.inspection.graph
        known = [*graph.linears, *graph.products, *graph.softmaxes]
        return {name: rows[0] for name, rows in computing_rows(self.facts.rows, known).items()}

    def share_of_nodes(self, nodes: Collection[str]) -> Share | None:
        """Share of profiled time that kernels of these GEMMs take, else of FLOPs; None: unknown."""
        rows = {row.name: row for node in nodes for row in self._kernels.get(node, ())}
        if self.joined_time and rows:
            return self.share_of_kernels(rows.values())
        products = self.onnx.products if self.onnx else {}
        total = sum(product.flops for product in products.values())
        touched = [products[node].flops for node in dict.fromkeys(nodes) if node in products]
        if total and touched:
            return sum(touched) / total, "GEMM FLOPs"
        gemms = self.inspection.gemms if self.inspection else 0
        return (min(1.0, len({*nodes}) / gemms), "GEMMs") if gemms and nodes else None

    def share_of_kernels(self, rows: Iterable[LayerRow]) -> Share | None:
        """Share of profiled time, else of kernels."""
        names = {row.name for row in rows}
        time = self.inspection.time if self.inspection else None
        if time is not None and time.total and self.joined_time:
            return sum(time.by_kernel.get(name, 0.0) for name in names) / time.total, "profiled time"
        kernels = len(self.facts.rows) if self.facts else 0
        return (len(names) / kernels, "kernels") if kernels and names else None

    def not_int8(self) -> list[str]:
        """Linears that the layer table shows outside of INT8."""
        return [] if self.inspection is None else self.inspection.proof.not_int8
