"""The numbers of GGUF types with codebooks or digits of 3, and of NVFP4, in torch.

    IQ1_S, IQ1_M    scale * (point ± 1/8)     points of 8 numbers of -1, 0 and 1
    IQ2_…           scale * ± point           points of 8 magnitudes of three
    IQ3_…           scale * ± point           points of 4 magnitudes of eight
    TQ1_0, TQ2_0    scale * (digit - 1)       five digits of 3 in a byte, or four of 2 bits
    NVFP4           scale * E2M1[code]        an unsigned E4M3 for each 16

The codebooks are those of the kernels (csrc/products/packed/codebooks.h), where the layouts of the
blocks are drawn, too (file_blocks.h; those of TQ2_0 and NVFP4 in packed_load.cpp).
"""

import functools
import re
from pathlib import Path
from typing import Final

import numpy as np
import torch

_HEADER: Final = Path(__file__).parents[1] / "csrc" / "products" / "packed" / "codebooks.h"
_IQ1: Final = (-1.0, 0.0, 1.0)
_IQ2: Final = (8.0, 25.0, 43.0)
_IQ3_XXS: Final = (4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0)
_IQ3_S: Final = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)
_DELTA: Final = 0.125
_E2M1_TWICE: Final = torch.tensor(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32
)


@functools.cache
def _bitmaps() -> dict[str, np.ndarray]:
    """Return uint8 0 or 1 by the number of a point, of each codebook."""
    found = re.findall(r'(\w+)_POINTS\[\] =((?:\s*"[0-9a-f]+")+)', _HEADER.read_text())
    return {
        name: np.unpackbits(
            np.frombuffer(bytes.fromhex(re.sub(r'[\s"]', "", text)), np.uint8), bitorder="little"
        )
        for name, text in found
    }


@functools.cache
def _points(name: str, levels: tuple[float, ...]) -> torch.Tensor:
    """Return float32 [points, components] of a codebook."""
    length = 8 if len(levels) == 3 else 4
    numbers = np.flatnonzero(_bitmaps()[name])
    digits = numbers[:, None] // len(levels) ** np.arange(length) % len(levels)
    return torch.tensor(levels)[torch.from_numpy(digits)]


def iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _words(blocks[:, 34:50])
    index = blocks[:, 2:34].view(-1, 8, 4).int() | _fields(high, 3, 4, 7) << 8
    scales = _half(blocks[:, :2]) * (2 * (high >> 12 & 7) + 1).float()
    delta = torch.where(high & 0x8000 == 0, _DELTA, -_DELTA)
    points = _points("IQ1_S", _IQ1)[index.long()]
    return scales[:, :, None, None] * (points + delta[:, :, None, None])


def iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    small, high = _words(blocks[:, 48:56]), _fields(blocks[:, 32:48], 4, 2, 15).flatten(1)
    # the float16 scale lies in the four highest bits of each word
    halves = (small >> 12 << torch.arange(0, 16, 4, dtype=torch.int32)).sum(1, dtype=torch.int32)
    whole = halves.short().view(torch.float16).float()
    scales = whole[:, None] * (2 * _fields(small, 3, 4, 7).flatten(1) + 1).float()
    index = blocks[:, :32].int() | (high & 7) << 8
    delta = torch.where(high & 8 == 0, _DELTA, -_DELTA)
    numbers = _points("IQ1_S", _IQ1)[index.long()] + delta[:, :, None]
    return scales[:, :, None] * numbers.view(len(blocks), 16, 16)


def iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    pairs = blocks[:, 2:].contiguous().view(torch.int32).view(-1, 8, 2)
    index = pairs[:, :, :1].contiguous().view(torch.uint8)
    points = _points("IQ2_XXS", _IQ2)[index.long()] * _signs(_seven_bits(pairs[:, :, 1]))
    scales = _half(blocks[:, :2]) * (0.5 + (pairs[:, :, 1] >> 28 & 15).float()) * 0.25
    return scales[:, :, None, None] * points


def iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    both = _words(blocks[:, 2:66])
    points = _points("IQ2_XS", _IQ2)[(both & 511).long()] * _signs(_with_parity(both >> 9))
    scales = _half(blocks[:, :2]) * (0.5 + _fields(blocks[:, 66:], 4, 2, 15).flatten(1)) * 0.25
    return scales[:, :, None] * points.view(-1, 16, 16)


def iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    index = blocks[:, 2:34].int() | _fields(blocks[:, 66:74], 2, 4, 3).flatten(1) << 8
    points = _points("IQ2_S", _IQ2)[index.long()] * _signs(blocks[:, 34:66].int())
    scales = _half(blocks[:, :2]) * (0.5 + _fields(blocks[:, 74:], 4, 2, 15).flatten(1)) * 0.25
    return scales[:, :, None] * points.view(-1, 16, 16)


def iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    words = blocks[:, 66:].contiguous().view(torch.int32)
    points = _points("IQ3_XXS", _IQ3_XXS)[blocks[:, 2:66].long()].view(-1, 8, 4, 8)
    scales = _half(blocks[:, :2]) * (0.5 + (words >> 28 & 15).float()) * 0.5
    return scales[:, :, None, None] * (points * _signs(_seven_bits(words)))


def iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    index = blocks[:, 2:66].int() | _fields(blocks[:, 66:74], 1, 8, 1).flatten(1) << 8
    points = _points("IQ3_S", _IQ3_S)[index.long()].view(-1, 32, 8)
    numbers = points * _signs(blocks[:, 74:106].int())
    scales = _half(blocks[:, :2]) * (1 + 2 * _fields(blocks[:, 106:], 4, 2, 15).flatten(1))
    return scales[:, :, None] * numbers.view(-1, 8, 32)


def tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32)[:, None]
    parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    digits = [
        ((part.int()[:, None] * powers[:count] & 255) * 3 >> 8).flatten(1) for part, count in parts
    ]
    return _half(blocks[:, 52:]) * (torch.cat(digits, dim=1) - 1).float()


def tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    digits = _fields(blocks[:, :64].reshape(-1, 2, 32), 2, 4, 3).transpose(2, 3)
    return _half(blocks[:, 64:]) * (digits.flatten(1) - 1).float()


def nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    doubled, halves = nvfp4_groups(blocks)
    return halves[:, :, None] * doubled


def nvfp4_groups(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return twice the numbers of E2M1, and half the scale of each 16 of them.

    Both float32: [blocks, 4, 16] and [blocks, 4].
    """
    codes = _fields(blocks[:, 4:].reshape(-1, 4, 8), 4, 2, 15).transpose(2, 3)
    stored = blocks[:, :4].clone()
    stored[stored == 0x7F] = 0
    scales = (stored & 0x7F).view(torch.float8_e4m3fn).float()
    scales[stored == 0xFF] = 480.0  # as gguf reads it; the sign has no meaning
    return _E2M1_TWICE[codes.flatten(2).long()], scales * 0.5


def _half(stored: torch.Tensor) -> torch.Tensor:
    """Return the float16 numbers of uint8 [blocks, 2] as float32 [blocks, 1]."""
    return stored.contiguous().view(torch.float16).float()


def _words(stored: torch.Tensor) -> torch.Tensor:
    """Return the unsigned words of 16 bits of uint8 [blocks, bytes], as int32."""
    return stored.contiguous().view(torch.int16).int() & 0xFFFF


def _fields(stored: torch.Tensor, bits: int, count: int, mask: int) -> torch.Tensor:
    """Return `count` fields of `bits` each, lowest first, as int32 along a new last dimension."""
    return stored.int()[..., None] >> torch.arange(0, bits * count, bits) & mask


def _with_parity(seven: torch.Tensor) -> torch.Tensor:
    """Add an eighth bit, with which the number of bits is even."""
    folded = seven ^ seven >> 4
    folded ^= folded >> 2
    return seven | ((folded ^ folded >> 1) & 1) << 7


def _seven_bits(words: torch.Tensor) -> torch.Tensor:
    return _with_parity(_fields(words, 7, 4, 127))


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """Return -1.0 for each bit that is set and 1.0 for others, along a new last dimension of 8."""
    return 1.0 - 2.0 * _fields(bits, 1, 8, 1).float()
