"""The types of quantisation blocks: of GGUF files, and what other checkpoints are made into."""

from typing import Final

from proto.messages.prepared_model import FP8

BLOCK_TYPES: Final = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "INT4_32": (32, 20),
    "INT4_128": (128, 68),
    "INT8_32": (32, 36),
    "INT8_128": (128, 132),
    "NF4": (32, 18),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "NVFP4": (64, 36),
}
"""Numbers and bytes of a block of each type that kernels multiply with as it is: of GGUF files, and
what worker.loader.quantised makes of the weights of other checkpoints.

The order is that of the list in csrc/products/packed/packed.h.
"""
BLOCK_COLUMNS: Final = {name: columns for name, (columns, _) in BLOCK_TYPES.items()} | {FP8: 32}
"""Columns that kernels read together, of each type that they multiply with as it is stored."""
