"""Numbers as GGUF files store them: plain, or in blocks with a scale each.

The blocks are taken apart by the `gguf` package's own routines; its reader, which
parses whole headers, is not used.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.errors import ModelError
from proto.prepared_model import TensorEntry
from worker.loader.plain import as_tensor, check_size

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED: Final = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
_ROW_NUMBERS: Final = 8192
"""The gguf package takes 16 rows at a time apart, whatever their length: short rows
cost more for the interpreter than for the numbers, so blocks are shown to it as
rows of this many numbers."""


class GgufFormat:
    """Plain and block-quantised tensors."""

    def __init__(self) -> None:
        import gguf

        self._gguf = gguf

    def decode(self, entry: TensorEntry, data: npt.NDArray[np.uint8]) -> torch.Tensor:
        """A view for plain types, new float32 numbers for blocks.

        Raises ModelError for a type that is not supported and for rows that do not
        consist of whole blocks.
        """
        plain = _PLAIN.get(entry.type)
        if plain is not None:
            return as_tensor(entry, data, plain)
        if entry.type not in _QUANTISED:
            supported = ", ".join((*_PLAIN, *_QUANTISED))
            raise ModelError(
                f"tensor {entry.name} has GGUF type {entry.type}: supported: {supported}"
            )
        kind = self._gguf.GGMLQuantizationType[entry.type]
        block_size, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        if not entry.shape or entry.shape[-1] % block_size:
            raise ModelError(
                f"tensor {entry.name} of shape {list(entry.shape)}: rows of type {entry.type} "
                f"consist of blocks of {block_size}"
            )
        check_size(entry, math.prod(entry.shape) // block_size * block_bytes)
        num_blocks = len(data) // block_bytes
        blocks_together = math.gcd(num_blocks, _ROW_NUMBERS // block_size)
        rows = data.reshape(-1, blocks_together * block_bytes)
        numbers: npt.NDArray[np.float32] = self._gguf.quants.dequantize(rows, kind)
        return torch.from_numpy(numbers).view(entry.shape)
