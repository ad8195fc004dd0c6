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
from worker.loader.blocks import BLOCKS, check_blocks
from worker.loader.plain import as_tensor

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROW_NUMBERS: Final = 8192
"""The gguf package takes 16 rows at a time apart, whatever their length: short rows
cost more for the interpreter than for the numbers, so blocks are shown to it as
rows of this many numbers."""


class GgufFormat:
    """Plain and block-quantised tensors."""

    def decode(self, entry: TensorEntry, data: npt.NDArray[np.uint8]) -> torch.Tensor:
        """A view for plain types, new float32 numbers for blocks.

        Raises ModelError for a type that is not supported and for rows that do not
        consist of whole blocks.
        """
        plain = _PLAIN.get(entry.type)
        if plain is not None:
            return as_tensor(entry, data, plain)
        if entry.type not in BLOCKS:
            supported = ", ".join((*_PLAIN, *BLOCKS))
            raise ModelError(
                f"tensor {entry.name} has GGUF type {entry.type}: supported: {supported}"
            )
        import gguf  # whoever keeps all blocks as they are never needs it

        block_size, block_bytes = check_blocks(entry)
        num_blocks = len(data) // block_bytes
        blocks_together = math.gcd(num_blocks, _ROW_NUMBERS // block_size)
        rows = data.reshape(-1, blocks_together * block_bytes)
        numbers: npt.NDArray[np.float32] = gguf.quants.dequantize(
            rows, gguf.GGMLQuantizationType[entry.type]
        )
        return torch.from_numpy(numbers).view(entry.shape)
