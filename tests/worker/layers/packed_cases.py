"""Random weights in blocks."""

import numpy as np
import numpy.typing as npt
import torch

from tests.fakes.gguf_files import put_iq1_m_scales
from tests.worker.reference import packed as packed_reference
from worker.loader.block_types import BLOCK_TYPES

TYPES = list(BLOCK_TYPES)
HALVES = {  # where float16 numbers lie in a block
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "MXFP4": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "NF4", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S"), (0,)),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("IQ1_M", "NVFP4"), ()),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(("INT4_32", "INT4_128", "INT8_32", "INT8_128"), (0,)),
}


def random_blocks(
    block_type: str, shape: tuple[int, int], rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Blocks of random bits, with scales of both signs and a few orders of magnitude."""
    num_blocks = shape[0] * shape[1] // BLOCK_TYPES[block_type][0]
    raw = rng.integers(0, 256, (num_blocks, BLOCK_TYPES[block_type][1]), dtype=np.uint8)
    if block_type == "MXFP4":  # and the least exponents, which floats have as subnormal numbers
        raw[:, 0] = rng.integers(120, 130, num_blocks, dtype=np.uint8)
        raw[::7, 0] = rng.integers(0, 4, len(raw[::7]), dtype=np.uint8)
    if block_type == "IQ1_M":
        put_iq1_m_scales(raw, rng.normal(size=num_blocks).astype(np.float16))
    for at in HALVES[block_type]:
        scales = rng.normal(size=num_blocks) * 10.0 ** rng.uniform(-3, 0, num_blocks)
        raw[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if block_type.startswith("INT4"):  # a zero of 4 bits, or the one beside
        raw[:, 2] %= 17
    return raw.reshape(-1)


def numbers_of(block_type: str, shape: tuple[int, int], raw: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Dequantise without the kernels, float32 [out, in]."""
    return packed_reference.dequantise(block_type, shape, raw)


def error_of(output: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    """Largest error relative to the sum of the terms' magnitudes."""
    expected = packed_reference.product(weight, x)
    size = packed_reference.rounded_rows(x).abs() @ weight.double().abs().t()
    return float(((output.double() - expected).abs() / size.clamp(min=1e-30)).max())
