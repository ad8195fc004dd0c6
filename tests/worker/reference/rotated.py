"""Reference of products with rotated weights, in torch.

The kernels are tested against it. Defines the rotation and the rounding; independent of the memory
layout of rotated weights.
"""

import math
from typing import Final

import torch

LARGEST_CODE: Final = 127
SMALLEST: Final = 2.0**-100
"""A row whose largest magnitude is below counts as zeros."""


def block_of(in_features: int) -> int:
    """The number of columns that are rotated together."""
    return 32 if in_features % 64 else 64


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rows [N, in] with every block times Sylvester's Hadamard matrix of its size, whose rows have
    the length sqrt(block): sums and differences in float32, in the kernels' order.
    """
    block = block_of(x.shape[1])
    result = x.float().reshape(-1, block)
    # Distances between vectors come before those within one, but the order of the stages
    # changes no more than roundings.
    distance = 1
    while distance < block:
        pairs = result.view(-1, block // (2 * distance), 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        result = torch.stack((first + second, first - second), dim=2).reshape(-1, block)
        distance *= 2
    return result.view(x.shape)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, in] to int8 codes [N, in] and float32 scales [N]: rotated x is about code * scale.

    scale = largest magnitude / 127, code = x * (127 / largest) to the nearest, ties to
    even, all in float32. A row that holds a NaN or an infinity has codes 0 and the scale NaN.
    """
    turned = rotated(x)
    largest = turned.abs().amax(dim=1)
    nonfinite = ~torch.isfinite(largest)
    empty = nonfinite | (largest < SMALLEST)
    divisor = torch.where(empty, torch.ones_like(largest), largest)
    codes = (turned * (LARGEST_CODE / divisor)[:, None]).round()
    codes = torch.where(empty[:, None], torch.zeros_like(codes), codes)
    scales = torch.where(empty, torch.zeros_like(largest), largest / LARGEST_CODE)
    scales = torch.where(nonfinite, torch.full_like(scales, math.nan), scales)
    return codes.to(torch.int8), scales


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """float64 [N, out]: rows [N, in] times weight [out, in], both rotated and rounded.

    The sums are exact; scales are multiplied in float64.
    """
    row_codes, row_scales = round_rows(x)
    codes, scales = round_rows(weight)
    sums = row_codes.double() @ codes.double().t()
    return sums * row_scales.double()[:, None] * (scales.double() / block_of(x.shape[1]))[None, :]
