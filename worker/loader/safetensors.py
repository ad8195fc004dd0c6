"""Numbers as safetensors files store them."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.errors import ModelError
from proto.prepared_model import TensorEntry
from worker.loader.plain import as_tensor

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class SafetensorsFormat:
    """Unquantised floating point tensors."""

    def decode(self, entry: TensorEntry, data: npt.NDArray[np.uint8]) -> torch.Tensor:
        """A view of the mapped file; raises ModelError for any other type."""
        dtype = _DTYPES.get(entry.type)
        if dtype is None:
            raise ModelError(
                f"tensor {entry.name} has type {entry.type}: supported: {', '.join(_DTYPES)}"
            )
        return as_tensor(entry, data, dtype)
