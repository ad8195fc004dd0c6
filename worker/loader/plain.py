"""Bytes that are numbers already."""

import math

import numpy as np
import numpy.typing as npt
import torch

from proto.errors import ModelError
from proto.prepared_model import TensorEntry


def as_tensor(entry: TensorEntry, data: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """`data` seen as entry.shape of `dtype`, without a copy where its address allows it.

    Raises ModelError where the number of bytes does not fit the shape.
    """
    check_size(entry, math.prod(entry.shape) * dtype.itemsize)
    if data.ctypes.data % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(dtype).view(entry.shape)


def check_size(entry: TensorEntry, expected: int) -> None:
    """Raise ModelError unless the entry has this many bytes."""
    if entry.num_bytes != expected:
        raise ModelError(
            f"tensor {entry.name} of type {entry.type} and shape {list(entry.shape)} "
            f"needs {expected} bytes, the file has {entry.num_bytes}"
        )
