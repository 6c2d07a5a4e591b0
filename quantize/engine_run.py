"""Run an engine on a GPU: torch CUDA buffers, a stream of its own, shapes from the engine's first profile."""

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqbench.quantize.build import check_sidecar
from qdqbench.quantize.errors import CheckFailed, MissingDevice
from qdqbench.quantize.trt import choose_backend

OUTPUT = "logits"


class EngineRunner:
    """Callable on one batch: int64 [B, L] arrays to float32 logits [B, num_labels].

    Batches shorter than the profile's minimum are padded with masked positions; longer ones are refused by
    the profile of the recipe before they get here.

    Raises:
        UserError: the sidecar says that this engine is not for this machine, version or ONNX file.
        MissingDevice: no CUDA build of torch, or the backend cannot load the engine.
    """

    def __init__(self, path: Path, onnx_path: Path) -> None:
        import torch

        sidecar = check_sidecar(path, onnx_path)
        if not torch.cuda.is_available():
            raise MissingDevice(
                "engines run on torch CUDA buffers, and this torch has no CUDA; install a CUDA build"
            )
        self.torch = torch
        self.profile = sidecar.profiles[0]
        backend = choose_backend(sidecar.backend)  # type: ignore[arg-type]
        trt = backend.module
        self._logger = trt.Logger(trt.Logger.ERROR)
        self._runtime: Any = trt.Runtime(self._logger)
        self._engine: Any = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise MissingDevice(
                f"{backend.name} {backend.version} cannot load {path} on {backend.gpu}; build it here"
            )
        self._context: Any = self._engine.create_execution_context()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.inputs = [name for name in names if name != OUTPUT]

    @property
    def max_batch(self) -> int:
        """Largest batch of the profile."""
        return self.profile.max[0]

    def __call__(self, batch: dict[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.float32]:
        """Run one batch."""
        torch = self.torch
        missing = max(0, self.profile.min[1] - batch["input_ids"].shape[1])
        padded = {name: np.pad(batch[name], ((0, 0), (0, missing))) for name in self.inputs}
        with torch.cuda.stream(self._stream):
            buffers = {name: torch.from_numpy(array).cuda() for name, array in padded.items()}
            for name, tensor in buffers.items():
                if not self._context.set_input_shape(name, tuple(tensor.shape)):
                    raise CheckFailed(
                        f"the engine's profile does not take {name} of shape {tuple(tensor.shape)}"
                    )
                self._context.set_tensor_address(name, tensor.data_ptr())
            # NaN shows an element that the engine did not write
            shape = tuple(self._context.get_tensor_shape(OUTPUT))
            logits = torch.full(shape, float("nan"), dtype=torch.float32, device="cuda")
            self._context.set_tensor_address(OUTPUT, logits.data_ptr())
            if not self._context.execute_async_v3(self._stream.cuda_stream):
                raise CheckFailed(f"the engine failed to run a batch of shape {padded['input_ids'].shape}")
            self._stream.synchronize()
        return np.asarray(logits.cpu().numpy())

    def __enter__(self) -> "EngineRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # TensorRT wants contexts gone before engines, and engines before the runtime
        self._context = self._engine = self._runtime = None
