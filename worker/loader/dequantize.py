"""The numbers of quantisation blocks, in torch. Those of a GGUF file have the layouts of ggml.

    Q4_0, Q5_0, Q8_0   scale * (code - zero)        a scale for each 32 numbers
    Q4_1, Q5_1         scale * code + minimum       a scale and a minimum for each 32
    Q4_K, Q5_K         scale * code - minimum       6-bit scales and minima for each 32, themselves
                                                    scaled by two numbers for 256
    Q6_K               scale * (code - 32)          8-bit scales for each 16, scaled for 256
    Q2_K               scale * code - minimum       4-bit scales and minima for each 16, themselves
                                                    scaled by two numbers for 256
    Q3_K               scale * (code - 4)           6-bit scales for each 16, scaled for 256
    IQ4_NL             scale * table[code]          a scale for each 32
    IQ4_XS             scale * table[code]          6-bit scales for each 32, scaled for 256
    MXFP4              scale * E2M1[code]           a power of two for each 32
    IQ1_…, IQ2_…, IQ3_…, TQ1_0, TQ2_0, NVFP4        in codebooks.py

Kernels multiply with blocks directly; this is for weights that are held in another format.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from worker.loader import codebooks
from worker.loader.block_types import BLOCK_TYPES

_MAGNITUDES: Final = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float32)
E2M1: Final = torch.cat((_MAGNITUDES, -_MAGNITUDES))
"""The numbers of 4 bits (OCP Microscaling Formats, section 5.3.3)."""
_IQ4: Final = torch.tensor(
    (
        *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
        *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
    )
)
"""The numbers of IQ4_NL and IQ4_XS (ggml: kvalues_iq4nl)."""
_CHUNK_NUMBERS: Final = 1 << 18
"""Numbers that are converted together: what a step of it writes stays in the cache."""


def dequantize(block_type: str, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return float32 [blocks, block_size] of uint8 [blocks, bytes of a block]."""
    numbers = torch.empty(len(blocks), block_size, dtype=torch.float32)
    convert, chunk = _CONVERSIONS[block_type], max(1, _CHUNK_NUMBERS // block_size)
    for first in range(0, len(blocks), chunk):
        part = blocks[first : first + chunk]
        numbers[first : first + chunk] = convert(part).view(len(part), block_size)
    return numbers


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    return scales * _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32).float() - minima


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    # bit i of these 32 bytes belongs to the i-th 32 numbers
    high = _shifted(blocks[:, None, 16:48], range(8)) & 1
    codes = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | high << 4
    return scales * codes.float() - minima


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64))
    high = _shifted(blocks[:, 128:192].view(-1, 2, 1, 32), range(0, 8, 2)) & 3
    codes = low.view(-1, 16, 16) | high.view(-1, 16, 16) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return scales[:, :, None] * (codes.float() - 32)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    # the exponent of a float; 0 stands for 2^-127, which a float has as a subnormal number
    bits = (blocks[:, :1].int() << 23).clamp_min(0x00400000)
    return bits.view(torch.float32) * E2M1[_nibbles(blocks[:, 1:]).long()]


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    # two bits i of 32 bytes belong to the i-th 32 numbers of 128
    codes = _shifted(blocks[:, 16:80].view(-1, 2, 1, 32), range(0, 8, 2)) & 3
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).float()
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    return scales[:, :, None] * codes.view(-1, 16, 16).float() - minima[:, :, None]


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _shifted(blocks[:, 32:96].reshape(-1, 2, 1, 32), range(0, 8, 2)) & 3
    high = _shifted(blocks[:, None, :32], range(8)) & 1
    codes = low.view(-1, 16, 16) | high.reshape(-1, 16, 16) << 2
    # of 16 scales the low halves in 8 bytes, the two highest bits in 4 bytes
    high = _shifted(blocks[:, None, 104:108], range(0, 8, 2)).flatten(1) & 3
    scales = (_nibbles(blocks[:, 96:104]) | high << 4).float() - 32
    return (_half(blocks, 108) * scales)[:, :, None] * (codes.float() - 4)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _IQ4[_nibbles(blocks[:, 2:]).long()]


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    high = _shifted(blocks[:, 2:4, None].transpose(1, 2), range(0, 8, 2)).transpose(1, 2) & 3
    scales = (low | high.reshape(-1, 8) << 4).float() - 32
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).long()
    return (_half(blocks, 0) * scales)[:, :, None] * _IQ4[codes]


_CONVERSIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ1_S": codebooks.iq1_s,
    "IQ1_M": codebooks.iq1_m,
    "IQ2_XXS": codebooks.iq2_xxs,
    "IQ2_XS": codebooks.iq2_xs,
    "IQ2_S": codebooks.iq2_s,
    "IQ3_XXS": codebooks.iq3_xxs,
    "IQ3_S": codebooks.iq3_s,
    "TQ1_0": codebooks.tq1_0,
    "TQ2_0": codebooks.tq2_0,
    "NVFP4": codebooks.nvfp4,
}
BLOCKS_OF_FILES: Final = {name: BLOCK_TYPES[name] for name in _CONVERSIONS}
"""Numbers and bytes of a block of each type of a GGUF file that can be read."""


HALF_SCALES: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Bytes of a block at which float16 scales and minima begin. That of IQ1_M lies in four parts;
those of NVFP4 are always numbers."""
_IQ1_M_EXPONENT: Final = ((52, 0xC000), (54, 0x7000))
"""The exponent of the scale of IQ1_M: bytes at which words begin, and its bits in them."""
_HALF_EXPONENT: Final = 0x7C00
_NAN_EXPONENT: Final = 0xFF
"""The exponent, a byte of E8M0, at which a scale of MXFP4 is NaN."""


def has_wrong_scale(block_type: str, blocks: npt.NDArray[np.uint8]) -> bool:
    """Return whether a scale or minimum of these blocks is NaN or infinite.

    blocks: the bytes of whole blocks, flat.
    """
    size = BLOCK_TYPES[block_type][1]

    def all_set(at: int, bits: int) -> npt.NDArray[np.bool_]:
        words = np.ndarray(len(blocks) // size, "<u2", blocks, at, (size,))
        found: npt.NDArray[np.bool_] = (words & bits) == bits
        return found

    if block_type == "MXFP4":
        return bool((blocks[::size] == _NAN_EXPONENT).any())
    if block_type == "IQ1_M":
        low, high = (all_set(*part) for part in _IQ1_M_EXPONENT)
        return bool((low & high).any())
    return any(all_set(at, _HALF_EXPONENT).any() for at in HALF_SCALES.get(block_type, ()))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at this byte of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return the low halves of these bytes, then the high ones, along the last dimension."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _shifted(codes: torch.Tensor, shifts: range) -> torch.Tensor:
    """Return the bytes shifted right by each of `shifts`, along the last but one dimension."""
    return codes >> torch.tensor(list(shifts), dtype=torch.uint8)[:, None]


def _bits(fields: torch.Tensor) -> torch.Tensor:
    """Return the 32 bits of 4 bytes, lowest first: [blocks, 32] of 0 and 1."""
    return (fields[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [blocks, 8, 1] each.

    Bytes 4 … 15 hold 8 scales and 8 minima of 6 bits: the first four of each in the low bits of
    bytes 4 … 7 and 8 … 11; of the other four the low halves in bytes 12 … 15, and the two highest
    bits in what is free of the first eight bytes.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, low & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, low >> 4 | second >> 6 << 4), dim=1)
    return (
        (_half(blocks, 0) * scales.float())[:, :, None],
        (_half(blocks, 2) * minima.float())[:, :, None],
    )
