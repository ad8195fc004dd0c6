"""Reference of products with packed weights, in torch.

The kernels are tested against it. Defines the quantised row; independent of the memory layout of
packed weights.
"""

import functools
import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

BLOCK: Final = 32
"""Numbers of a row that share a scale."""
LARGEST_CODE: Final = 127
SMALLEST: Final = 2.0**-100
"""A block whose largest magnitude is below counts as zeros."""


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, in] to int8 codes [N, in] and float32 scales [N, in / 32]: x is about code * scale.

    scale = largest magnitude / 127, code = x * (127 / largest) to the nearest, ties to
    even, all in float32 (the rule of ggml's Q8_0, with a scale of 32 bits). A block that
    holds a NaN or an infinity has codes 0 and the scale NaN.
    """
    blocks = x.float().view(x.shape[0], -1, BLOCK)
    largest = blocks.abs().amax(dim=2)
    nonfinite = ~torch.isfinite(largest)
    empty = nonfinite | (largest < SMALLEST)
    divisor = torch.where(empty, torch.ones_like(largest), largest)
    codes = (blocks * (LARGEST_CODE / divisor)[:, :, None]).round()
    codes = torch.where(empty[:, :, None], torch.zeros_like(codes), codes)
    scales = torch.where(empty, torch.zeros_like(largest), largest / LARGEST_CODE)
    scales = torch.where(nonfinite, torch.full_like(scales, math.nan), scales)
    return codes.to(torch.int8).view(x.shape), scales


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """float64 [N, in]: the rows after quantisation."""
    codes, scales = quantise_rows(x)
    return codes.double() * scales.double().repeat_interleave(BLOCK, dim=1)


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """float64 [N, out]: the quantised rows of x [N, in] times weight [out, in]."""
    return rounded_rows(x) @ weight.double().t()


def dequantise(block_type: str, shape: tuple[int, int], raw: npt.NDArray[np.uint8]) -> torch.Tensor:
    """float32 [out, in]: the numbers of the blocks; of a GGUF type by the `gguf` package."""
    if block_type in _OWN:
        return _OWN[block_type](raw).view(shape)
    import gguf

    kind = gguf.GGMLQuantizationType[block_type]
    rows = np.asarray(raw, dtype=np.uint8).reshape(shape[0], -1)
    numbers: npt.NDArray[np.float32] = gguf.quants.dequantize(rows, kind)
    return torch.from_numpy(numbers).view(shape)


def _nf4(raw: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Blocks of a float16 scale and 32 codes, the first 16 in the low halves of bytes."""
    blocks = raw.reshape(-1, 18)
    scales = torch.from_numpy(blocks[:, :2].copy().view(np.float16)).float()
    codes = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), axis=1)
    return scales * NF4[torch.from_numpy(codes).long()]


def _integers(bits: int, columns: int, raw: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Blocks of a float16 scale, a zero of 8 bits, a free byte and the codes of their columns."""
    blocks = raw.reshape(-1, 4 + columns * bits // 8)
    scales = torch.from_numpy(blocks[:, :2].copy().view(np.float16)).float()
    codes = torch.from_numpy(blocks[:, 4:].astype(np.int32))
    if bits == 4:
        halves = codes.view(len(blocks), -1, 16)
        codes = torch.cat((halves & 15, halves >> 4), dim=2).view(len(blocks), -1)
    zeros = torch.from_numpy(blocks[:, 2:3].astype(np.int32))
    return scales * (codes - zeros).float()


NF4: Final = torch.tensor(
    [-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112], dtype=torch.float32
)
"""The numbers of NF4 times 112.03, rounded."""
_OWN: Final = {"NF4": _nf4} | {
    f"INT{bits}_{columns}": functools.partial(_integers, bits, columns)
    for bits in (4, 8)
    for columns in (32, 128)
}


def quantise_dense(weight: torch.Tensor) -> torch.Tensor:
    """float32 [out, in]: a dense weight [out, in] as 8-bit codes and a float16 scale per 32.

    scale = largest magnitude / 127 rounded to float16, code = weight / scale to the
    nearest, ties to even, at most 127 in magnitude.
    """
    blocks = weight.float().view(weight.shape[0], -1, BLOCK)
    scales = (blocks.abs().amax(dim=2, keepdim=True) / LARGEST_CODE).half().float()
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (blocks / safe).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    return (codes * scales).view(weight.shape)
