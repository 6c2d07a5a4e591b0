"""An engine of a cut graph, built as the deployed one was."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from qdqbench.quantize.core.results import EngineResult
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.sidecar import Sidecar
from qdqbench.quantize.runtime.cpu import CpuEngine
from qdqbench.quantize.runtime.engine import Engine
from qdqbench.quantize.runtime.opened import open_engine


@contextmanager
def engine_of(
    model: onnx.ModelProto, sidecar: Sidecar, expected_gemms: Iterable[str] = ()
) -> Iterator[tuple[Engine | CpuEngine, EngineResult]]:
    """Build a cut graph as the deployed engine was built, load it, and remove it afterwards.

    Args:
        sidecar: of the deployed engine: its backend and shapes.
        expected_gemms: MatMul and Gemm nodes that must be in INT8; absent ones are passed over.

    Raises:
        UserError: the builder refuses the graph.
        MissingDevice: no GPU or library to run it with.
    """
    names = {node.name for node in model.graph.node}
    with tempfile.TemporaryDirectory(prefix="qdqbench-blocks-") as name:
        path, engine = Path(name) / "blocks.onnx", Path(name) / "blocks.engine"
        path.write_bytes(model.SerializeToString())
        result = build(
            path,
            engine,
            backend=sidecar.backend,  # type: ignore[arg-type]
            profiles=sidecar.profiles,
            expected_gemms=[gemm for gemm in expected_gemms if gemm in names],
            expected_attention=0,
            strict=False,
            compute=sidecar.compute or "fp32",
        )
        with open_engine(engine, path) as loaded:
            yield loaded, result
