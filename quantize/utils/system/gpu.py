"""The GPU that CUDA shows to this process, queried without torch."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from qdqbench.quantize.utils.errors import MissingDevice

# what CUDA's errors contain, with the sentences that explain them
_REFUSALS = {
    "busy or unavailable": (
        "the GPU takes no further process: it is in exclusive mode, or others use it through CUDA MPS; end "
        "them (nvidia-smi shows them), or choose another GPU by CUDA_VISIBLE_DEVICES"
    ),
    "out of memory": (
        "the GPU has too little free memory; end other processes on it (nvidia-smi shows them), take smaller "
        "batches, or choose another GPU by CUDA_VISIBLE_DEVICES"
    ),
}
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_DRIVER = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    name: str
    compute_capability: str  # "8.9"
    driver: str | None  # version of the kernel module; None where the system does not say


def explain_refusal(error: Exception) -> MissingDevice | None:
    """Return what an error of CUDA says of a GPU that has no memory left, or takes no further process."""
    text = str(error)
    found = (told for part, told in _REFUSALS.items() if "CUDA" in text and part in text)
    return next(map(MissingDevice, found), None)


def _load_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def count_gpus() -> int:
    """Return how many GPUs CUDA shows to this process."""
    cuda, count = _load_driver(), ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def find_gpu() -> Gpu | None:
    """Find the first GPU that CUDA shows to this process, by the driver library, as TensorRT does.

    torch may be a CPU build, and NVML neither heeds CUDA_VISIBLE_DEVICES nor counts in CUDA's order.
    """
    cuda, major, minor = _load_driver(), ctypes.c_int(), ctypes.c_int()
    if cuda is None or not count_gpus():
        return None
    name = ctypes.create_string_buffer(256)
    failed = cuda.cuDeviceGetName(name, len(name), 0)
    failed |= cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, 0)
    failed |= cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, 0)
    if failed:
        return None
    driver = _DRIVER.read_text().strip() if _DRIVER.is_file() else None
    return Gpu(name.value.decode(), f"{major.value}.{minor.value}", driver)
