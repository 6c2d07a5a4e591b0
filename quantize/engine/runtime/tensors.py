"""Arrays on the host and buffers on the GPU, by the datatypes of an engine."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.engine.profiles import Profile, fit_batch
from qdqbench.quantize.models.inputs import pad_columns
from qdqbench.quantize.utils.arrays import Array, Int64
from qdqbench.quantize.utils.errors import UserError

if TYPE_CHECKING:
    import torch

DEVICE = "cuda"
Arrays = dict[str, Array]
_DTYPES = {  # trt.DataType member: torch dtype
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8_e4m3fn",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "BOOL": "bool",
}


def torch_dtype(name: str) -> "torch.dtype":
    """Return the datatype of torch for a member of trt.DataType.

    Raises:
        UserError: torch has no such buffers (4-bit types).
    """
    import torch

    if name not in _DTYPES:
        raise UserError(f"the engine has an input or output of type {name}, which is not supported")
    dtype: torch.dtype = getattr(torch, _DTYPES[name])
    return dtype


def to_torch(
    feeds: Mapping[str, Array], dtypes: "Mapping[str, torch.dtype]", what: str
) -> "dict[str, torch.Tensor]":
    """Return the host tensors for every input, in the engine's datatypes.

    Raises:
        UserError: names are missing or unknown, or an array holds another kind of number; lists all.
    """
    import torch

    wrong = [f"{name} is missing" for name in dtypes if name not in feeds]
    wrong += [f"{name} is unknown" for name in feeds if name not in dtypes]
    tensors = {}
    for name, dtype in dtypes.items():
        if name not in feeds:
            continue
        array = np.ascontiguousarray(feeds[name])
        floats = array.dtype.kind == "f"
        if array.dtype.kind not in "fiub" or floats != dtype.is_floating_point:
            wrong.append(f"{name} is {array.dtype} and the engine takes {str(dtype).removeprefix('torch.')}")
        else:
            # numpy's read-only arrays draw a warning from torch
            tensors[name] = torch.from_numpy(array if array.flags.writeable else array.copy()).to(dtype)
    if wrong:
        raise UserError(f"inputs of {what} do not fit: {'; '.join(wrong)}")
    return tensors


def load(tensors: "Mapping[str, torch.Tensor]", buffers: "Mapping[str, torch.Tensor]") -> None:
    """Copy host tensors into buffers of the same shape, on the current stream.

    Raises:
        UserError: a shape differs; copying would broadcast it.
    """
    wrong = [n for n, tensor in tensors.items() if tensor.shape != buffers[n].shape]
    if wrong:
        listed = ", ".join(f"{n} is {list(tensors[n].shape)}, not {list(buffers[n].shape)}" for n in wrong)
        raise UserError(f"inputs have other shapes than those that are bound: {listed}")
    for name, tensor in tensors.items():
        buffers[name].copy_(tensor)


def make_poisoned(shape: tuple[int, ...], dtype: "torch.dtype", device: str) -> "torch.Tensor":
    """Return a buffer full of NaN, or of the smallest value of an integer type."""
    import torch

    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=torch.float32, device=device).to(dtype)
    if dtype == torch.bool:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype, device=device)


def to_numpy(tensor: "torch.Tensor") -> Array:
    """Return an array on the host; types that numpy lacks become float32."""
    import torch

    wide = (torch.float16, torch.float32, torch.float64)
    if tensor.dtype.is_floating_point and tensor.dtype not in wide:
        tensor = tensor.float()
    return np.asarray(tensor.cpu().numpy())


def pad_to_profile(
    batch: Mapping[str, Int64], profiles: Sequence[Profile], inputs: Iterable[str], pad_id: int, step: int
) -> Arrays:
    """Return the inputs by name, padded with masked positions, and with copies of the last row.

    Args:
        batch: int64 [B, L] arrays.
        step: lengths are rounded up to multiples of this, where the profile allows.

    Raises:
        CheckFailed: it is larger than every profile.
    """
    rows, length = next(iter(batch.values())).shape
    _, to_rows, to_length = fit_batch(profiles, rows, length, step)
    wide, missing = pad_columns(batch, to_length - length, pad_id), ((0, to_rows - rows), (0, 0))
    return {name: np.pad(wide[name], missing, mode="edge") for name in inputs}
