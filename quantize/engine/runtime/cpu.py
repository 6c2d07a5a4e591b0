"""An engine of a CPU runtime, loaded and run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from qdqbench.quantize.engine.cpu_runtimes import compile_model, warm_up
from qdqbench.quantize.engine.runtime.tensors import pad_to_profile
from qdqbench.quantize.engine.sidecar import check_sidecar, note_sidecar
from qdqbench.quantize.tasks.types.kind import LOGITS, join_outputs
from qdqbench.quantize.utils.arrays import Array, Float32, Int64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.results import LayerRow


@dataclass(frozen=True)
class CpuMemory:
    """Memory of a loaded engine, bytes."""

    engine_bytes: int  # the file
    resident_bytes: int  # of the process after loading minus before

    def __str__(self) -> str:
        """Return one clause for the report."""
        file = f"file {self.engine_bytes / 1e6:.1f} MB"
        return f"memory {self.resident_bytes / 1e6:.1f} MB after loading; {file}"


class CpuEngine:
    """An engine that a CPU runtime compiled, loaded; it takes any shape of its profiles.

    Args:
        path: the engine; its sidecar must lie beside it.
        onnx_path: the graph that it must have been built from.
        threads: of one inference; None: as the runtime chooses.
        profile: measure each kernel.

    Raises:
        UserError: the sidecar says that this engine is not for this machine, version or ONNX file.
        MissingDevice: the runtime cannot load it.
    """

    def __init__(
        self,
        path: Path,
        onnx_path: Path | None = None,
        *,
        threads: int | None = None,
        profile: bool = False,
    ) -> None:
        sidecar = check_sidecar(path, onnx_path)
        before = psutil.Process().memory_info().rss
        self._model = compile_model(
            sidecar.backend,  # type: ignore[arg-type]
            path.read_bytes(),
            blob=True,
            compute=sidecar.compute or "fp32",
            threads=threads,
            profile=profile,
        )
        used = max(0, psutil.Process().memory_info().rss - before)
        self.memory = CpuMemory(sidecar.engine_bytes, used)
        self.name, self.profiles, self.notes = path.name, sidecar.profiles, note_sidecar(sidecar, None)
        self.inputs, self.outputs = self._model.inputs, self._model.outputs

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; every output by name.

        Raises:
            UserError: inputs are missing or unknown.
        """
        wrong = [f"{name} is missing" for name in self.inputs if name not in feeds]
        wrong += [f"{name} is unknown" for name in feeds if name not in self.inputs]
        if wrong:
            raise UserError(f"inputs of {self.name} do not fit: {'; '.join(wrong)}")
        return self._model.run({name: np.ascontiguousarray(feeds[name]) for name in self.inputs})

    def kernels(self) -> list[LayerRow]:
        """Return the layer table, after one run of the first profile's opt shape."""
        warm_up(self._model, self.profiles[0].opt)
        return [kernel.row for kernel in self._model.kernels()]

    def kernel_times(self, feeds: Mapping[str, Array], repeats: int = 20) -> dict[str, float]:
        """Return mean milliseconds of each kernel, by the name in the layer table; needs `profile`."""
        self.run(feeds)  # compiles what is compiled at first use
        total: dict[str, float] = {}
        for _ in range(repeats):
            self.run(feeds)
            for kernel in self._model.kernels():
                total[kernel.row.name] = total.get(kernel.row.name, 0.0) + kernel.ms
        return {name: ms / repeats for name, ms in total.items() if ms > 0}

    def __enter__(self) -> "CpuEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class CpuRunner:
    """Callable on one batch: int64 [B, L] arrays to float32 answers [B, width] or [B, L or more, width].

    Args:
        path, onnx_path: as of CpuEngine.
        pad_id: token id of padding.
        outputs: of the graph, as the kind of task says; several are joined into one.

    Raises:
        UserError, MissingDevice: as of CpuEngine; UserError also where one of them is not there.
    """

    def __init__(self, path: Path, onnx_path: Path, *, pad_id: int, outputs: Iterable[str] = LOGITS) -> None:
        self._outputs, self.pad_id = list(outputs), pad_id
        self.engine = CpuEngine(path, onnx_path)
        if lost := [name for name in self._outputs if name not in self.engine.outputs]:
            raise UserError(f"{path} has no output {', '.join(lost)} but {', '.join(self.engine.outputs)}")

    @property
    def max_batch(self) -> int:
        """Largest batch of any profile."""
        return max(profile.max[0] for profile in self.engine.profiles)

    def __call__(self, batch: Mapping[str, Int64]) -> Float32:
        """Run one batch.

        Raises:
            CheckFailed: it is larger than every profile.
        """
        rows = len(next(iter(batch.values())))
        made = self.engine.run(
            pad_to_profile(batch, self.engine.profiles, self.engine.inputs, self.pad_id, 1)
        )
        return np.asarray(join_outputs(made, self._outputs)[:rows], dtype=np.float32)

    def __enter__(self) -> "CpuRunner":
        return self

    def __exit__(self, *_: object) -> None:
        pass
