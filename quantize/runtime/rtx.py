"""What only TensorRT-RTX has at run time: kernels compiled just in time, their cache, and stream capture.

Nothing here may be called with TensorRT: tests/unit/engine/test_backend_bindings.py holds it to that.
"""

from pathlib import Path
from typing import Any, Literal

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.engine.caches import ignored, keep, read_cache

Specialize = Literal["EAGER", "LAZY", "NONE"]  # members of DynamicShapesKernelSpecializationStrategy


class RuntimeCache:
    """Kernels that contexts of one engine compiled, kept in a file where one is given."""

    def __init__(self, engine: Any, path: Path | None, here: dict[str, str]) -> None:
        self.path, self.here, self.notes = path, here, list[str]()
        runtime_config = engine.create_runtime_config()
        runtime_cache = runtime_config.create_runtime_cache()
        self._found = b""
        if path is not None:
            self._found, note = read_cache(path, here)
            if self._found and not runtime_cache.deserialize(self._found):
                self._found, note = b"", ignored(path, "the runtime refuses it")
            self.notes += [note] if note else []
        self._cache: Any = runtime_cache

    def config(self, trt: Any, engine: Any, specialize: Specialize) -> Any:
        """Settings of one execution context, which shares this cache.

        LAZY runs fallback kernels until those of a new shape are compiled, so that the first runs of a shape
        are slower than the rest, and a CUDA graph would keep the fallback; EAGER compiles first.
        """
        runtime_config = engine.create_runtime_config()
        strategies = trt.DynamicShapesKernelSpecializationStrategy.__members__
        runtime_config.dynamic_shapes_kernel_specialization_strategy = strategies[specialize]
        runtime_config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # graphs are captured by torch
        if not runtime_config.set_runtime_cache(self._cache):
            raise UserError("tensorrt_rtx refuses its own runtime cache; reinstall it")
        return runtime_config

    def save(self) -> None:
        """Write the cache if it changed; call it before the engine goes."""
        runtime_cache, self._cache = self._cache, None
        if self.path is None or runtime_cache is None:
            return
        self.notes += keep(self.path, self.here, runtime_cache.serialize(), self._found)
