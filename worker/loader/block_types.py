"""The types of quantisation blocks: of GGUF files, and what other checkpoints are made into."""

from typing import Final

from proto.messages.prepared_model import FP8, TENSOR_TYPES

_OWN: Final = {
    "INT4_32": (32, 20),
    "INT4_128": (128, 68),
    "INT8_32": (32, 36),
    "INT8_128": (128, 132),
    "NF4": (32, 18),
}
_IN_ORDER: Final = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q2_K", "Q3_K"),
    *("IQ4_NL", "IQ4_XS", *_OWN, "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"),
    *("IQ3_S", "TQ1_0", "TQ2_0", "NVFP4"),
)
"""The list in csrc/products/packed/packed.h."""
_OF_GGUF: Final = {name: (numbers, size) for name, numbers, size in TENSOR_TYPES.values()}
BLOCK_TYPES: Final = {name: (_OF_GGUF | _OWN)[name] for name in _IN_ORDER}
"""Numbers and bytes of a block of each type that kernels multiply with as it is: of GGUF files, and
what worker.loader.quantised makes of the weights of other checkpoints."""
BLOCK_COLUMNS: Final = {name: columns for name, (columns, _) in BLOCK_TYPES.items()} | {FP8: 32}
"""Columns that kernels read together, of each type that they multiply with as it is stored."""
