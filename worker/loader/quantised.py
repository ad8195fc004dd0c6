"""Weights of several tensors: what the bytes of each packing of a checkpoint mean.

deploy/models/quantised_folder.py found the parts of each weight and checked their shapes, for GGUF
files deploy/models/gguf_file.py. Here they become numbers, or the blocks that kernels read
(csrc/products/packed/packed.h):

    packing          parts                                          number
    gptq awq rows    codes of 4 or 8 bits in words, scales, zeros   scale * (code - zero)
    int8             codes, scales, zeros                           scale * (code - zero)
    nf4              codes of 4 bits, a table, scales               scale * table[code]
    mxfp4            codes of 4 bits, exponents                     scale * E2M1[code]
    …_nvfp4          codes of 4 bits, scales of groups and of all   scale * of all * E2M1[code]
    fp8              codes, scales                                  scale * E4M3[code]

Numbers are exact in float32, products of a code's few bits with a scale of 16 bits; with a scale of
float32 they are rounded once. Blocks have scales of float16: bfloat16 scales below 2^-17 and those
of float32 are rounded to it. The scale of all of NVFP4 stays a float32 beside the blocks, or
its reciprocal where it divides. The codes of NF4 become whole numbers of 8 bits in products
(packed_format.h), within 0.0038 of the largest number of a block.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.errors import ModelError
from proto.messages.prepared_model import TensorEntry
from worker.loader.block_types import BLOCK_TYPES
from worker.loader.codebooks import nvfp4_groups
from worker.loader.dequantize import E2M1, dequantize

RawBytes = npt.NDArray[np.uint8]
Parts = Mapping[str, torch.Tensor]
"""Role → the whole tensor as the file has it; floats in their dtype, all others as stored."""
_AWQ_POSITIONS: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Column of eight → the position of its 4 bits in their word, counted in fours."""
NF4_FACTOR: Final = 112.03
"""Factor from the numbers of NF4 to the whole numbers of packed_format.h."""
_MXFP4_BYTES: Final = 16
_NAN: Final = 0x7F
"""The code of NaN in E4M3, without its sign."""
_NVFP4_PACKINGS: Final = ("compressed_nvfp4", "gguf_nvfp4", "modelopt_nvfp4")
_CHUNK_NUMBERS: Final = 1 << 22
"""Numbers that are converted together, to bound the memory beside the weight."""
_BLOCKS_AT_ONCE: Final = 1 << 13
"""Blocks of MXFP4 that are converted together: what a step of it writes stays in the cache."""
_NIBBLE: Final = np.uint64(4)
_SPREADS: Final = tuple(
    (np.uint64(shift), np.uint64(mask))
    for shift, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F))
)
"""Shifts and masks that move the nibbles of the low half of a word a byte apart, in order."""


def read_numbers(entry: TensorEntry, parts: Parts) -> torch.Tensor:
    """Return new float32 numbers of entry.shape.

    Raises ModelError for a scale that is NaN or infinite.
    """
    if entry.packing == "mxfp4":
        blocks = torch.from_numpy(_mxfp4_blocks(entry, parts)).view(-1, 1 + _MXFP4_BYTES)
        return dequantize("MXFP4", blocks, 2 * _MXFP4_BYTES).view(entry.shape)
    numbers = torch.empty(entry.shape, dtype=torch.float32)
    order = column_order(entry, parts)
    for first, end in _chunks(entry):
        part = entry.with_rows(first, end)
        rows = numbers[first:end]
        match entry.packing:
            case "fp8":
                torch.mul(*_fp8(part, parts), out=rows)
            case "nf4":
                codes, scales = _four_bits(part, parts)
                torch.mul(parts["table"][codes.long()], scales, out=rows)
            case packing if packing in _NVFP4_PACKINGS:
                torch.mul(*_nvfp4(part, parts), out=rows)
            case _:
                each = _read_groups(part, parts, order)
                rows.copy_(each.numbers() if order is None else _put_back(each.numbers(), order))
    return numbers


def read_blocks(entry: TensorEntry, parts: Parts, row_step: int = 1) -> RawBytes:
    """Return the blocks of every `row_step`th row one after the other, as kernels pack them.

    Columns are in `column_order`. Raises ModelError as read_numbers does.
    """
    if entry.packing == "mxfp4":
        return _mxfp4_blocks(entry, parts, row_step)
    if entry.packing == "gguf_nvfp4":
        return _own_rows(entry, parts)[::row_step].contiguous().view(-1).numpy()
    block_numbers, block_bytes = BLOCK_TYPES[entry.type]
    rows, columns = -(-entry.shape[0] // row_step), entry.shape[1]
    blocks = torch.empty(rows, columns // block_numbers, block_bytes, dtype=torch.uint8)
    order = column_order(entry, parts)
    for first, end in _chunks(entry, row_step):
        part, into = entry.with_rows(first, end), blocks[first // row_step : -(-end // row_step)]
        if entry.packing == "nf4":
            codes, scales = _four_bits(part, parts)
            _put_nf4(codes[::row_step], scales[::row_step], into)
        elif entry.packing in _NVFP4_PACKINGS:
            _put_nvfp4(part, parts, row_step, into)
        else:
            _read_groups(part, parts, order).rows(row_step).put_blocks(into, entry)
    return blocks.view(-1).numpy()


def read_fp8(
    entry: TensorEntry, parts: Parts, columns: slice, row_step: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of these columns of every `row_step`th row.

    codes: float8_e4m3fn [rows, columns], a view. scales: float32 [rows, groups of
    `fp8_scale_columns`]. Raises ModelError as read_numbers does.
    """
    first, end, _ = columns.indices(entry.shape[1])
    rows = torch.arange(entry.first_row, entry.first_row + entry.shape[0], row_step)
    step = fp8_scale_columns(entry, columns)
    groups = torch.arange(first, end, step) // int(entry.options["columns"])
    scales = _finite(entry, _fp8_scales(entry, parts)[rows // int(entry.options["rows"])])
    codes = parts["codes"][entry.first_row : entry.first_row + entry.shape[0] : row_step]
    return codes[:, first:end], scales[:, groups]


def fp8_scale_columns(entry: TensorEntry, columns: slice) -> int:
    """Return how many of these columns of a row share a scale, from the first of them on."""
    first, end, _ = columns.indices(entry.shape[1])
    block = int(entry.options["columns"])
    return math.gcd(block, first) if block < entry.shape[1] else end - first


@dataclass(frozen=True)
class Codes:
    """Rows and columns of a weight as codes with a scale, and perhaps a zero, a group of columns.

    A number is scale * (code - zero), scale * table[code], or scale * code.

    codes: uint8 [rows, columns] of 8 bits, or [rows, columns / 2] of 4: in blocks of 32 columns the
        first half is in the low half of 16 bytes. Columns are in `column_order`.
    scales: [rows, groups], as the file has them. zeros: uint8 [rows, groups]; None where all are
        the middle of the codes, 8 or 128. table: float32 [16] or None.
    group: columns that share a scale, a multiple of 32 unless codes are floats.
    is_float: codes are numbers of E4M3.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    table: torch.Tensor | None
    group: int
    is_float: bool = False

    def with_rows(self, order: torch.Tensor) -> "Codes":
        """Return the same rows in another order, int64 [rows]."""
        zeros = None if self.zeros is None else self.zeros[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], zeros=zeros)


def read_codes(
    entry: TensorEntry, parts: Parts, columns: slice = slice(None), row_step: int = 1
) -> Codes:
    """Return these columns of every `row_step`th row. Raises ModelError as read_numbers does."""
    first, end, _ = columns.indices(entry.shape[1])
    if entry.packing == "fp8":
        floats, of_groups = read_fp8(entry, parts, columns, row_step)
        raw = floats.contiguous().view(torch.uint8)
        if ((raw & _NAN) == _NAN).any():
            raise ModelError(f"a number of {entry.name} is nan")
        return Codes(raw, of_groups, None, None, code_columns(entry, columns), is_float=True)
    if entry.packing == "mxfp4":
        return _mxfp4_codes(entry, parts, slice(first, end), row_step)
    group, whole = code_columns(entry, columns), int(_group_of(entry))
    groups = torch.arange(first, end, group) // whole
    order, is_nf4 = column_order(entry, parts), entry.packing == "nf4"
    bits = 4 if is_nf4 else int(entry.options["bits"])
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for begin, stop in _chunks(entry, row_step):
        part = entry.with_rows(begin, stop)
        if is_nf4:
            codes, wide = _four_bits(part, parts)
            each = _Groups(codes, wide[:, ::whole], torch.empty(0)).rows(row_step)
        else:
            each = _read_groups(part, parts, order).rows(row_step)
        own = each.codes[:, first:end]
        own = _in_halves(own).flatten(1) if bits == 4 else own.contiguous()
        zeros = each.zeros if is_nf4 else each.zeros[:, groups]
        found.append((own, each.scales[:, groups].to(_scale_dtype(parts)), zeros))
    codes, scales, zeros = (torch.cat(each) for each in zip(*found, strict=True))
    return Codes(
        codes,
        scales,
        zeros if "zeros" in parts else None,
        parts["table"] if is_nf4 else None,
        group,
    )


def code_columns(entry: TensorEntry, columns: slice = slice(None)) -> int:
    """Return how many of these columns share a scale of read_codes, from the first of them on."""
    if entry.packing == "fp8":
        return fp8_scale_columns(entry, columns)
    first, end, _ = columns.indices(entry.shape[1])
    group = int(_group_of(entry))
    return math.gcd(group, first, end - first) if group < entry.shape[1] else end - first


def scale_bytes(entry: TensorEntry) -> int:
    """Return the bytes of a scale of read_codes, with its zero."""
    if entry.packing in ("fp8", "mxfp4"):
        return 4 if entry.packing == "fp8" else 2
    part = entry.parts["scales"].type
    return (2 if part in ("F16", "BF16") else 4) + ("zeros" in entry.parts)


def _group_of(entry: TensorEntry) -> float:
    if entry.packing == "mxfp4":
        return 2 * _MXFP4_BYTES
    return entry.options["block" if entry.packing == "nf4" else "group"]


def _scale_dtype(parts: Parts) -> torch.dtype:
    """Return the dtype of scales that holds them exactly."""
    dtype = parts["scales"].dtype
    return dtype if dtype.is_floating_point else torch.float32


def column_order(entry: TensorEntry, parts: Parts) -> torch.Tensor | None:
    """Return int64 [columns], the columns in the order of their groups; None for that of the file.

    Raises ModelError unless every group has as many columns as the others.
    """
    if "order" not in parts:
        return None
    groups, group = parts["order"].long(), int(entry.options["group"])
    expected = torch.arange(len(groups)) // group
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], expected):
        raise ModelError(
            f"tensor {entry.name}: its g_idx does not have {group} columns of each group"
        )
    return None if torch.equal(groups, expected) else order


def _chunks(entry: TensorEntry, row_step: int = 1) -> list[tuple[int, int]]:
    """Ranges of rows that are converted together."""
    rows = entry.shape[0]
    step = max(1, _CHUNK_NUMBERS // (entry.shape[1] * row_step)) * row_step
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _put_back(numbers: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    in_file = torch.empty_like(numbers)
    in_file[:, order] = numbers
    return in_file


# ---- a scale and a zero for each group of columns ------------------------------------------------


@dataclass(frozen=True)
class _Groups:
    """Some rows of a weight. codes: uint8 [rows, columns]. scales: float32, zeros: uint8, both
    [rows, groups] of consecutive columns."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def rows(self, step: int) -> "_Groups":
        return _Groups(self.codes[::step], self.scales[::step], self.zeros[::step])

    def numbers(self) -> torch.Tensor:
        rows, columns = self.codes.shape
        codes = self.codes.view(rows, self.scales.shape[1], -1)
        numbers = (codes.short() - self.zeros[:, :, None]).float() * self.scales[:, :, None]
        return numbers.view(rows, columns)

    def put_blocks(self, blocks: torch.Tensor, entry: TensorEntry) -> None:
        """Write blocks [rows, blocks, bytes]: scale, zero, 0, codes."""
        rows, num_blocks, _ = blocks.shape
        repeats = num_blocks // self.scales.shape[1]
        scales = self.scales.half()
        if not scales.isfinite().all():
            raise ModelError(
                f"the scales of {entry.name} are up to {self.scales.abs().max():g}, which float16 "
                "cannot hold"
            )
        blocks[:, :, :2] = (
            scales.repeat_interleave(repeats, dim=1).view(torch.uint8).view(rows, num_blocks, 2)
        )
        blocks[:, :, 2] = self.zeros.repeat_interleave(repeats, dim=1)
        blocks[:, :, 3] = 0
        if entry.options["bits"] == 8:
            blocks[:, :, 4:] = self.codes.view(rows, num_blocks, -1)
        else:
            blocks[:, :, 4:] = _in_halves(self.codes).view(rows, num_blocks, -1)


def _read_groups(entry: TensorEntry, parts: Parts, order: torch.Tensor | None) -> _Groups:
    bits = int(entry.options["bits"])
    rows = slice(entry.first_row, entry.first_row + entry.shape[0])
    codes, scales, zeros = _UNPACK[entry.packing](parts, rows, bits, entry.options)
    scales = _finite(entry, scales)
    shape = (entry.shape[0], entry.shape[1] // int(entry.options["group"]))
    return _Groups(
        codes if order is None else codes[:, order],
        scales.expand(shape),
        zeros.expand(shape).contiguous(),
    )


Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _unpack_gptq(parts: Parts, rows: slice, bits: int, options: Mapping[str, float]) -> Unpacked:
    """Words of consecutive columns in codes [columns, rows], of consecutive rows in zeros."""
    codes = _split_words(parts["codes"][:, rows].t(), bits)
    zeros = _split_words(parts["zeros"], bits)[:, rows].t()
    zeros = zeros + int(options["zero_offset"]) & (1 << bits) - 1
    return codes, parts["scales"][:, rows].t(), zeros


def _unpack_awq(parts: Parts, rows: slice, bits: int, options: Mapping[str, float]) -> Unpacked:
    """Words of eight rows, in an order of their own, in codes [columns, rows] and in zeros."""
    words = slice(rows.start // 8, -(-rows.stop // 8))
    skipped = rows.start - 8 * words.start
    here = slice(skipped, skipped + rows.stop - rows.start)

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        split = _split_words(packed[:, words], bits).view(len(packed), -1, 8)
        return split[:, :, list(_AWQ_POSITIONS)].flatten(1)[:, here].t().contiguous()

    return unpack(parts["codes"]), parts["scales"][:, rows].t(), unpack(parts["zeros"])


def _unpack_rows(parts: Parts, rows: slice, bits: int, options: Mapping[str, float]) -> Unpacked:
    """Words of consecutive columns in codes [rows, columns], of consecutive rows in zeros."""
    codes = _split_words(parts["codes"][rows], bits)
    zeros = torch.tensor([[1 << bits - 1]], dtype=torch.uint8)
    if "zeros" in parts:
        zeros = _split_words(parts["zeros"].t(), bits)[:, rows].t()
    return codes, _scale_rows(parts["scales"], rows), zeros


def _unpack_int8(parts: Parts, rows: slice, bits: int, options: Mapping[str, float]) -> Unpacked:
    codes = parts["codes"][rows].view(torch.uint8) ^ 0x80
    zeros = torch.tensor([[0x80]], dtype=torch.uint8)
    if "zeros" in parts:
        zeros = _scale_rows(parts["zeros"], rows).contiguous().view(torch.uint8) ^ 0x80
    return codes, _scale_rows(parts["scales"], rows), zeros


_UNPACK: Final[Mapping[str, Callable[[Parts, slice, int, Mapping[str, float]], Unpacked]]] = {
    "awq": _unpack_awq,
    "gptq": _unpack_gptq,
    "int8": _unpack_int8,
    "rows": _unpack_rows,
}


def _scale_rows(scales: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the scales of rows, [rows, groups], of one scale or of those of each row."""
    return scales.view(1, 1) if scales.numel() == 1 else scales.view(len(scales), -1)[rows]


def _split_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of words of 32 bits, lowest first, along the last dimension: uint8."""
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else _split_bytes(codes, low_first=True)


def _split_bytes(packed: torch.Tensor, *, low_first: bool) -> torch.Tensor:
    low, high = packed & 15, packed >> 4
    return torch.stack((low, high) if low_first else (high, low), dim=-1).flatten(-2)


def _in_halves(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes of 4 bits in blocks of 32: those of the first half in the low half of a byte."""
    blocks = codes.reshape(len(codes), -1, 2, 16)
    return blocks[:, :, 0] | blocks[:, :, 1] << 4


# ---- others --------------------------------------------------------------------------------------


def _four_bits(entry: TensorEntry, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and float32 scales, both [rows, columns] or wide enough to be that.

    Numbers lie one after the other over all rows, two in a byte, and so do blocks with a scale.
    """
    rows, columns = entry.shape
    block = int(entry.options["block"])
    first, end = entry.first_row * columns, (entry.first_row + rows) * columns
    packed = parts["codes"].view(-1)[first // 2 : -(-end // 2)]
    codes = _split_bytes(packed, low_first=False)[first % 2 :][: end - first]
    scales = parts["scales"][first // block : -(-end // block)]
    if "nested_block" in entry.options:
        nested = int(entry.options["nested_block"])
        indices = torch.arange(first // block, first // block + len(scales)) // nested
        of_scales = parts["nested_scales"][indices]
        scales = parts["nested_table"][scales.long()] * of_scales + entry.options["nested_offset"]
    scales = _finite(entry, scales).repeat_interleave(block)[first % block :][: end - first]
    return codes.view(rows, columns), scales.view(rows, columns)


def _put_nf4(codes: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor) -> None:
    """Write blocks [rows, blocks, bytes]: scale, codes."""
    halves = (scales[:, ::32] / NF4_FACTOR).half().contiguous()
    blocks[:, :, :2] = halves.view(torch.uint8).view(*blocks.shape[:2], 2)
    blocks[:, :, 2:] = _in_halves(codes)


def _own_rows(entry: TensorEntry, parts: Parts, role: str = "codes") -> torch.Tensor:
    """Return the entry's rows of a part that has as many as the weight."""
    return parts[role][entry.first_row : entry.first_row + entry.shape[0]]


def _nvfp4(entry: TensorEntry, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 numbers and scales, both [rows, columns].

    The scale of all is a factor of the others, or divides them; GGUF files have one for the rows of
    each expert.
    """
    own = _own_rows(entry, parts)
    if entry.packing == "gguf_nvfp4":
        doubled, halves = nvfp4_groups(own.reshape(-1, BLOCK_TYPES["NVFP4"][1]))
        scales = halves.view(len(own), -1) * torch.from_numpy(factors(entry, parts))[:, None]
        return doubled.view(entry.shape), scales.repeat_interleave(16, 1)
    scales = _own_rows(entry, parts, "scales").float()
    scales = scales * parts["factor"] if "factor" in parts else scales / parts["divisor"]
    scales = _finite(entry, scales).repeat_interleave(int(entry.options["group"]), 1)
    return E2M1[_split_bytes(own, low_first=True).long()], scales


def factors(entry: TensorEntry, parts: Parts, row_step: int = 1) -> npt.NDArray[np.float32] | None:
    """Return what multiplies the numbers in the blocks of every `row_step`th row, float32 [rows].

    None for a weight whose blocks have all of its scales. Raises ModelError for one that is NaN or
    infinite.
    """
    if entry.packing not in _NVFP4_PACKINGS:
        return None
    of_all = parts[
        "factors" if "factors" in parts else "factor" if "factor" in parts else "divisor"
    ]
    each = _finite(entry, of_all.view(-1) if "divisor" not in parts else 1 / of_all.view(-1))
    rows = torch.arange(entry.first_row, entry.first_row + entry.shape[0], row_step)
    indices = rows // int(entry.options["rows"]) if len(each) > 1 else torch.zeros_like(rows)
    return each[indices].numpy()


def _put_nvfp4(entry: TensorEntry, parts: Parts, row_step: int, blocks: torch.Tensor) -> None:
    """Write blocks [rows, blocks, bytes] of GGUF's NVFP4: four scales, and 16 codes for each.

    A negative scale becomes the sign of its codes.
    """
    scales = _own_rows(entry, parts, "scales")[::row_step].contiguous().view(torch.uint8)
    codes = _split_bytes(_own_rows(entry, parts)[::row_step], low_first=True)
    codes = codes.view(*scales.shape, 2, 8) ^ (scales >> 7 << 3)[:, :, None, None]
    blocks[:, :, :4] = (scales & 0x7F).view(*blocks.shape[:2], 4)
    packed = codes[:, :, 0] | codes[:, :, 1] << 4
    blocks[:, :, 4:] = packed.reshape(*blocks.shape[:2], -1)


def _fp8(entry: TensorEntry, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 numbers [rows, columns] and scales that fit."""
    rows, columns = entry.shape
    first, end = entry.first_row, entry.first_row + rows
    block_rows, block_columns = int(entry.options["rows"]), int(entry.options["columns"])
    scales = _fp8_scales(entry, parts)
    indices = torch.arange(first, end) // block_rows
    scales = _finite(entry, scales[indices])
    codes = parts["codes"][first:end].float()
    if codes.isnan().any():
        raise ModelError(f"a number of {entry.name} is nan")
    return codes, scales.repeat_interleave(block_columns, 1)[:, :columns]


def _fp8_scales(entry: TensorEntry, parts: Parts) -> torch.Tensor:
    """Return the scales of all blocks of the tensor, [blocks of rows, blocks of columns]."""
    return parts["scales"].view(-1, -(-entry.shape[1] // int(entry.options["columns"])))


def _mxfp4_blocks(entry: TensorEntry, parts: Parts, row_step: int = 1) -> RawBytes:
    """Return blocks of MXFP4 as GGUF files have them, of numbers and scales that lie apart.

    numbers   16 bytes a block   0 1 | 2 3 | … | 30 31
    block     scale, 16 bytes    0 16 | 1 17 | … | 15 31
    """
    columns = entry.shape[-1] // (2 * _MXFP4_BYTES)
    count = math.prod(entry.shape[:-1])
    rows = slice(entry.first_row, entry.first_row + count, row_step)
    numbers = parts["codes"].view(-1, columns * _MXFP4_BYTES)[rows].contiguous().numpy()
    scales = parts["scales"].view(-1, columns)[rows]
    words = numbers.reshape(-1).view("<u4").reshape(-1, 4)  # of eight numbers each
    blocks = np.empty((len(words), 1 + _MXFP4_BYTES), dtype=np.uint8)
    blocks[:, 0] = scales.reshape(-1).numpy()
    for first in range(0, len(words), _BLOCKS_AT_ONCE):
        part = slice(first, first + _BLOCKS_AT_ONCE)
        spread = words[part].astype(np.uint64)  # becomes a byte for each number
        for shift, mask in _SPREADS:
            spread |= spread << shift
            spread &= mask
        blocks[part, 1:] = (spread[:, :2] | spread[:, 2:] << _NIBBLE).view(np.uint8)
    return blocks.reshape(-1)


def _mxfp4_codes(entry: TensorEntry, parts: Parts, columns: slice, row_step: int) -> Codes:
    """Return codes with scales as bfloat16, which has these powers of two exactly."""
    row_bytes, group = entry.shape[-1] // 2, 2 * _MXFP4_BYTES
    count = math.prod(entry.shape[:-1])
    rows = slice(entry.first_row, entry.first_row + count, row_step)
    codes = _split_bytes(parts["codes"].view(-1, row_bytes)[rows], low_first=True)[:, columns]
    exponents = parts["scales"].view(-1, row_bytes // _MXFP4_BYTES)[rows]
    exponents = exponents[:, columns.start // group : columns.stop // group]
    # 0 stands for 2^-127, which a bfloat16 has as a subnormal number
    scales = (exponents.short() << 7).clamp_min(0x0040).view(torch.bfloat16)
    return Codes(_in_halves(codes).flatten(1), scales, None, E2M1, group)


def _finite(entry: TensorEntry, scales: torch.Tensor) -> torch.Tensor:
    """Return scales as float32; raises ModelError naming the weight if one is no number."""
    scales = scales.float()
    if not scales.isfinite().all():
        wrong = scales[~scales.isfinite()][0].item()
        raise ModelError(f"a scale of {entry.name} is {wrong:g}")
    return scales
