"""Tensors in the memory-mapped files of a prepared model: GGUF or safetensors.

`read_index` returns the position of each tensor of the language model in these files,
`read_vision_index` those of its vision part; `TensorFiles` reads tensors.
`StoredBlocks` is a quantised weight in blocks, as kernels pack them, without dequantisation.
"""

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.codec import MessageDecoder
from proto.errors import ModelError, ProtocolError
from proto.messages.prepared_model import (
    FP8,
    VISION_PREFIX,
    PreparedModel,
    TensorEntry,
    TensorIndex,
    TensorPart,
)
from worker.loader import quantised
from worker.loader.block_types import BLOCK_TYPES
from worker.loader.dequantize import BLOCKS_OF_FILES, dequantize, has_wrong_scale

INDEX_FILE = "tensors.msgpack"
RawBytes = npt.NDArray[np.uint8]
_SAFETENSORS_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_PART_DTYPES: Final = _SAFETENSORS_DTYPES | {
    FP8: torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Torch dtypes of the parts of quantised weights, by their names in safetensors files."""
_GGUF_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_index(prepared: PreparedModel) -> TensorIndex:
    """Read the index of the language model in a prepared folder; raises as `read_whole_index`."""
    return _select(read_whole_index(prepared), is_vision=False)


def read_vision_index(prepared: PreparedModel) -> TensorIndex:
    """Read the index of the vision part in a prepared folder; raises as `read_whole_index`."""
    return _select(read_whole_index(prepared), is_vision=True)


def _select(index: TensorIndex, *, is_vision: bool) -> TensorIndex:
    """Return the index of one part of a model."""
    tensors = [each for each in index.tensors if each.name.startswith(VISION_PREFIX) is is_vision]
    return TensorIndex(index.format, index.files, tuple(tensors))


def read_whole_index(prepared: PreparedModel) -> TensorIndex:
    """Read the index in the prepared folder.

    Raises ModelError for an index that is missing or undecodable, and for a tensor outside its
    file, which is the sign of a truncated download.
    """
    path = os.path.join(prepared.folder, INDEX_FILE)
    decoder: MessageDecoder[TensorIndex] = MessageDecoder(TensorIndex)
    try:
        with open(path, "rb") as file:
            index = decoder.decode(file.read())
        sizes = [os.path.getsize(name) for name in index.files]
    except (OSError, ProtocolError) as error:
        raise ModelError(f"{path}: {error}") from None
    for entry in index.tensors:
        for number, offset, num_bytes in entry.byte_ranges:
            if not 0 <= number < len(sizes):
                raise ModelError(f"{path}: tensor {entry.name} is in file {number}, which is none")
            end = offset + num_bytes
            if offset < 0 or num_bytes < 0 or end > sizes[number]:
                raise ModelError(
                    f"{index.files[number]}: tensor {entry.name} ends at byte {end} of "
                    f"{sizes[number]}: the file is truncated or has changed since it was prepared"
                )
    return index


def entries_by_name(index: TensorIndex) -> Mapping[str, TensorEntry]:
    """Return every entry under its name in the file; raises ModelError for a name given twice."""
    entries: dict[str, TensorEntry] = {}
    for entry in index.tensors:
        if entry.name in entries:
            raise ModelError(f"tensor {entry.name} is twice in the model")
        entries[entry.name] = entry
    return entries


class TensorFiles:
    """Reads tensors by their entries; safe to use from several threads."""

    def __init__(self, index: TensorIndex) -> None:
        if index.format not in ("gguf", "safetensors"):
            raise ModelError(f"tensors in format {index.format!r}: supported: gguf, safetensors")
        self._is_gguf = index.format == "gguf"
        # Copy-on-write maps: torch wants writable memory, and nothing writes to it.
        self._maps: list[RawBytes] = [
            np.memmap(path, dtype=np.uint8, mode="c") for path in index.files
        ]

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor of entry.shape in the float dtype that needs the least work.

        A view of the mapped file for plain types, which keeps it mapped; new float32
        numbers for quantised weights. Raises ModelError naming the tensor for types, sizes and
        scales that cannot be read.
        """
        if entry.parts:
            return quantised.read_numbers(entry, self.parts_of(entry))
        decode = decode_gguf if self._is_gguf else decode_safetensors
        return decode(entry, self.bytes_at(entry.file, entry.offset, entry.num_bytes))

    def bytes_at(self, file: int, offset: int, num_bytes: int) -> RawBytes:
        """Return these bytes, uint8 [num_bytes], a view of the mapped file."""
        return self._maps[file][offset : offset + num_bytes]

    def blocks_of(self, entry: TensorEntry, row_step: int = 1) -> RawBytes:
        """Return the quantisation blocks of every `row_step`th row, as kernels pack them.

        A view of the mapped file if it has them one after the other.
        """
        if entry.parts:
            return quantised.read_blocks(entry, self.parts_of(entry), row_step)
        blocks = self.bytes_at(entry.file, entry.offset, entry.num_bytes)
        if row_step > 1:
            blocks = blocks.reshape(math.prod(entry.shape[:-1]), -1)[::row_step]
        return np.ascontiguousarray(blocks).reshape(-1)

    def factors_of(self, entry: TensorEntry, row_step: int = 1) -> npt.NDArray[np.float32] | None:
        """Return the factors of the rows of `blocks_of`; see quantised.factors."""
        return quantised.factors(entry, self.parts_of(entry), row_step) if entry.parts else None

    def parts_of(self, entry: TensorEntry) -> dict[str, torch.Tensor]:
        """Return the whole tensors of a quantised weight, views of the mapped file."""
        return {role: self._part(entry, part) for role, part in entry.parts.items()}

    def _part(self, entry: TensorEntry, part: TensorPart) -> torch.Tensor:
        dtype = _PART_DTYPES.get(part.type)
        if dtype is None:
            raise ModelError(f"a tensor of {entry.name} has type {part.type}: not supported")
        data = self.bytes_at(part.file, part.offset, part.num_bytes)
        if data.ctypes.data % dtype.itemsize:
            data = data.copy()
        return torch.from_numpy(data).view(dtype).view(part.shape)

    def release(self) -> None:
        """Give back the pages that reading has mapped into this process.

        They stay in the page cache, from which views that are left get them again.
        """
        for each in self._maps:
            memory: mmap.mmap = each.base  # type: ignore[assignment]
            memory.madvise(mmap.MADV_DONTNEED)

    def prefetch(self, entry: TensorEntry) -> None:
        """Let the system read the tensor's bytes into the page cache, without waiting for it."""
        for file, offset, num_bytes in entry.byte_ranges:
            memory: mmap.mmap = self._maps[file].base  # type: ignore[assignment]
            begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
            if num_bytes:
                memory.madvise(mmap.MADV_WILLNEED, begin, offset + num_bytes - begin)


def decode_safetensors(entry: TensorEntry, data: RawBytes) -> torch.Tensor:
    """Return a view of floating point numbers; raises ModelError for any other type."""
    dtype = _SAFETENSORS_DTYPES.get(entry.type)
    if dtype is None:
        raise ModelError(
            f"tensor {entry.name} has type {entry.type}: supported: "
            f"{', '.join(_SAFETENSORS_DTYPES)}"
        )
    return _view_as(entry, data, dtype)


def decode_gguf(entry: TensorEntry, data: RawBytes) -> torch.Tensor:
    """Return a view for plain types, new float32 numbers for quantisation blocks.

    Raises ModelError for a type that is not supported and for rows that do not consist of whole
    blocks.
    """
    plain = _GGUF_DTYPES.get(entry.type)
    if plain is not None:
        return _view_as(entry, data, plain)
    if entry.type not in BLOCKS_OF_FILES:
        supported = ", ".join((*_GGUF_DTYPES, *BLOCKS_OF_FILES))
        raise ModelError(f"tensor {entry.name} has GGUF type {entry.type}: supported: {supported}")
    block_size, block_bytes = check_blocks(entry)
    check_scales(entry.name, entry.type, data)
    blocks = torch.from_numpy(data).view(-1, block_bytes)
    return dequantize(entry.type, blocks, block_size).view(entry.shape)


def _view_as(entry: TensorEntry, data: RawBytes, dtype: torch.dtype) -> torch.Tensor:
    """Return `data` as entry.shape of `dtype`, without a copy if its address allows it."""
    _check_size(entry, math.prod(entry.shape) * dtype.itemsize)
    if data.ctypes.data % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(dtype).view(entry.shape)


def _check_size(entry: TensorEntry, expected: int) -> None:
    if entry.num_bytes != expected:
        raise ModelError(
            f"tensor {entry.name} of type {entry.type} and shape {list(entry.shape)} "
            f"needs {expected} bytes, the file has {entry.num_bytes}"
        )


def check_blocks(entry: TensorEntry) -> tuple[int, int]:
    """Return numbers and bytes of a quantisation block of this tensor.

    Raises ModelError unless its rows consist of whole blocks and all bytes are there.
    """
    block_size, block_bytes = BLOCKS_OF_FILES[entry.type]
    if not entry.shape or entry.shape[-1] % block_size:
        raise ModelError(
            f"tensor {entry.name} of shape {list(entry.shape)}: rows of type {entry.type} "
            f"consist of blocks of {block_size}"
        )
    _check_size(entry, math.prod(entry.shape) // block_size * block_bytes)
    return block_size, block_bytes


def check_scales(name: str, block_type: str, blocks: RawBytes) -> None:
    """Raise ModelError naming the tensor if a scale of these blocks is NaN or infinite."""
    if has_wrong_scale(block_type, blocks):
        raise ModelError(f"tensor {name} of type {block_type} has a scale that is NaN or infinite")


@dataclass(frozen=True)
class StoredBlocks:
    """A weight [rows, columns] in quantisation blocks, as GGUF files have them.

    data: uint8 [rows × bytes of a row], in the file's order; may be the mapped file itself.
    row_order: int64 [rows], row i of the weight is row row_order[i] of `data`; None for the same.
    column_order: the same for columns, of whole weights only.
    factors: float32 [rows], what multiplies the numbers of each row of `data`; None for nothing.
    """

    type: str
    rows: int
    columns: int
    data: RawBytes
    row_order: npt.NDArray[np.int64] | None
    column_order: torch.Tensor | None = None
    factors: npt.NDArray[np.float32] | None = None

    def with_columns(self, slices: Sequence[slice]) -> "StoredBlocks":
        """Return these columns of the weight, as a copy; each slice must be of whole blocks."""
        if slices == [slice(0, self.columns)]:
            return self
        assert self.column_order is None
        size, num_bytes = BLOCK_TYPES[self.type]
        blocks = self.data.reshape(self.rows, -1, num_bytes)
        own = [blocks[:, each.start // size : each.stop // size] for each in slices]
        data = np.concatenate(own, axis=1)
        return replace(self, columns=data.shape[1] * size, data=data.reshape(-1))
