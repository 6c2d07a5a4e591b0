"""NumPy arrays by the type of their elements, and files of them."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqbench.quantize.utils.errors import UserError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.floating[Any]]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int8 = npt.NDArray[np.int8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Batch = dict[str, Int64]  # inputs of a model by name

MAX_ARRAY_BYTES = 1 << 30  # of all arrays in one file


def read_arrays(path: Path, again: str, most: int = MAX_ARRAY_BYTES) -> dict[str, Array]:
    """Read every array of a regular .npz file, of at most `most` bytes unpacked; else a `UserError`."""
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for its writer
            raise UserError(f"{path} is no regular file; {again}")
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            size = sum(info.file_size for info in archive.zip.infolist())
            if size > most:
                raise UserError(f"{path} holds {size} bytes, over the limit of {most}; {again}")
            return {name: archive[name] for name in archive.files}
    except UserError:
        raise
    except Exception as error:  # a damaged archive raises errors of zipfile, zlib, numpy and struct
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:100]
        raise UserError(f"cannot read {path} ({why}); {again}") from error
