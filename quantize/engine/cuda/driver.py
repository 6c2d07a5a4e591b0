"""Kernels of a cubin, launched through the CUDA driver on memory and streams of torch."""

import ctypes as c
from collections.abc import Sequence
from functools import cache
from typing import Any

from qdqbench.quantize.engine.cuda.names import find_symbols
from qdqbench.quantize.utils.errors import QdqError

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_BYTES = 48 * 1024  # of shared memory that a kernel gets without asking
_UINT8, _SWIZZLE_128, _PROMOTE_256 = 0, 3, 3  # of CUtensorMap

Pointer = c.c_void_p


class TensorMap(c.Structure):
    """A CUtensorMap: 128 bytes, aligned by 64 in the parameters of a kernel."""

    _fields_ = (("bytes", c.c_char * 128),)


def _fields(layout: str) -> list[tuple[str, Any]]:
    """Return the fields of a struct of kernels, such as `pointer x y; int m`."""
    kinds = {"pointer": Pointer, "pointers": Pointer * 3, "int": c.c_int, "float": c.c_float}
    parts = (part.split() for part in layout.split(";"))
    return [(name, kinds[kind]) for kind, *names in parts for name in names]


class GemmArguments(c.Structure):
    _fields_ = _fields("pointer scale bias factor residual out; int m n k; float center")


class RotaryArguments(GemmArguments):
    _fields_ = _fields("pointer positions table; int turned head pitch")


class AttentionArguments(c.Structure):
    _fields_ = _fields(
        "pointer q k v start end factor bias out; int most heads; float scale unit; "
        "int tokens hidden pitch span sight"
    )


class NormArguments(c.Structure):
    _fields_ = _fields(
        "pointer gamma beta half; pointers codes multiplier; float epsilon; int tokens hidden channels; "
        "float spare"
    )


class DenseArguments(c.Structure):
    _fields_ = _fields("pointer x weight bias bounds single half; int shift activation tokens rows n k")


class SplitArguments(c.Structure):
    _fields_ = _fields("pointer done sums; int parts")


class TableArguments(c.Structure):
    _fields_ = _fields("pointer ids positions types word position type")


class _Attribute(c.Structure):
    _fields_ = (("id", c.c_int), ("pad", c.c_int), ("value", c.c_uint * 16))


class _Launch(c.Structure):
    _fields_ = (
        ("grid", c.c_uint * 3),
        ("block", c.c_uint * 3),
        ("shared", c.c_uint),
        ("stream", Pointer),
        ("attributes", c.POINTER(_Attribute)),
        ("count", c.c_uint),
    )


class Kernels:
    """The kernels of cubins or PTX by name, on torch's current device.

    They may be launched before the previous kernel ends (`early`) if they wait for it themselves.
    """

    def __init__(self, codes: Sequence[bytes], early: bool) -> None:
        import torch

        torch.cuda.current_stream().synchronize()  # makes the context that modules are loaded into
        self._codes, self._early = codes, early
        self._modules: dict[str, Pointer] = {}  # by kernel
        for code in codes:
            module = Pointer()
            _check(_driver().cuModuleLoadData(c.byref(module), code))
            self._modules |= dict.fromkeys(find_symbols(code), module)
        self._found: dict[str, tuple[Pointer, int]] = {}

    def launch(
        self, name: str, grid: tuple[int, int], block: int, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        """Launch on the current stream."""
        import torch

        attribute = _Attribute(id=_SERIALIZATION)
        attribute.value[0] = 1
        launch = _Launch((*grid, 1), (block, 1, 1), shared, torch.cuda.current_stream().cuda_stream)
        launch.attributes, launch.count = c.pointer(attribute), int(self._early)
        pointers = (Pointer * len(arguments))(*[c.addressof(each) for each in arguments])
        _check(_driver().cuLaunchKernelEx(c.byref(launch), self._function(name, shared), pointers, None))

    def _function(self, name: str, shared: int) -> Pointer:
        function, allowed = self._found.get(name) or (self._find(name), _STATIC_BYTES)
        if shared > allowed:
            _check(_driver().cuFuncSetAttribute(function, _SHARED_BYTES, shared))
        self._found[name] = function, max(shared, allowed)
        return function

    def _find(self, name: str) -> Pointer:
        if name not in self._modules:
            raise QdqError(f"the engine has no kernel {name}; build it again")
        function = Pointer()
        _check(_driver().cuModuleGetFunction(c.byref(function), self._modules[name], name.encode()))
        return function


def map_tiles(matrix: Any, rows: int) -> TensorMap:
    """Return the map of an INT8 [R, K] matrix by tiles of `rows` rows and 128 columns, swizzled by 128 bytes.

    Rows and columns beyond the matrix read as 0.
    """
    raw = c.create_string_buffer(192)
    aligned = c.addressof(raw) + 63 & ~63
    size = (c.c_uint64 * 2)(matrix.shape[1], matrix.shape[0])
    pitch, box, step = (c.c_uint64 * 1)(matrix.stride(0)), (c.c_uint32 * 2)(128, rows), (c.c_uint32 * 2)(1, 1)
    where = Pointer(aligned), _UINT8, 2, Pointer(matrix.data_ptr())
    kind = 0, _SWIZZLE_128, _PROMOTE_256, 0
    _check(_driver().cuTensorMapEncodeTiled(*where, size, pitch, box, step, *kind))
    return TensorMap.from_buffer_copy((c.c_char * 128).from_address(aligned))


@cache
def _driver() -> Any:
    return c.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        text = c.c_char_p()
        _driver().cuGetErrorString(status, c.byref(text))
        raise QdqError(f"the CUDA driver says: {(text.value or b'unknown error').decode()} ({status})")
