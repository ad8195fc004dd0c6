"""Reads the header of a safetensors file, without the tensors.

| 8 bytes: length of the header | header: JSON | tensor bytes |
"""

import json
import math
import os
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from proto.errors import ModelError, shown
from proto.prepared_model import FP8, FP8_BLOCK, MXFP4_BYTES, TensorEntry

_MAX_HEADER_BYTES: Final = 32 << 20
"""About 200,000 tensors; parsed JSON can need twenty times as much memory."""
_MAX_DIMENSIONS: Final = 8
_MAX_NUMBER: Final = 1 << 60
_BITS: Final = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
}


def read(path: str, file: int) -> list[TensorEntry]:
    """Return the tensors of a file. file: its index in TensorIndex.files.

    Raises ModelError if the file is truncated or its header is invalid.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path} is not a safetensors file, or truncated")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a damaged header: not a JSON object")
    start = 8 + length
    return [
        _entry(name, fields, path, file, start, size)
        for name, fields in header.items()
        if name != "__metadata__"
    ]


def join_scales(entries: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Return the tensors, those of quantised numbers and of their scales as one.

    Raises ModelError for a pair whose types or shapes do not fit, naming both tensors.
    """
    named = {entry.name: entry for entry in entries}
    _join_mxfp4(named)
    _join_fp8(named)
    return tuple(named.values())


def _join_fp8(named: dict[str, TensorEntry]) -> None:
    """Give each NAME of type F8_E4M3 its scales, the tensor NAME_scale_inv.

    numbers   F8_E4M3 [rows, columns]
    scales    F32 [rows / 128, columns / 128], rounded up: a factor of each block
    """
    for name, entry in list(named.items()):
        scales = named.get(f"{name}_scale_inv")
        if scales is None:
            continue
        if (entry.type, scales.type, len(entry.shape)) != (FP8, "F32", 2) or scales.shape != tuple(
            -(-size // FP8_BLOCK) for size in entry.shape
        ):
            raise ModelError(
                f"tensor {name} of type {entry.type} and shape {list(entry.shape)} does not fit "
                f"tensor {scales.name} of type {scales.type} and shape {list(scales.shape)}: FP8 "
                f"with an F32 scale of each block of {FP8_BLOCK} x {FP8_BLOCK} is supported"
            )
        del named[scales.name]
        named[name] = msgspec.structs.replace(entry, scales=(scales.file, scales.offset, 0))


def _join_mxfp4(named: dict[str, TensorEntry]) -> None:
    """Make each pair NAME_blocks, NAME_scales one tensor, NAME of type MXFP4.

        blocks   uint8 [..., rows, columns / 32, 16], numbers 2i and 2i + 1 in byte i
        scales   uint8 [..., rows, columns / 32]
        joined   MXFP4 [..., rows, columns]

    Raises ModelError for blocks without scales of their shape, naming both tensors.
    """
    for blocks in list(named.values()):
        if blocks.type != "U8" or not blocks.name.endswith("_blocks"):
            continue
        del named[blocks.name]
        name = blocks.name.removesuffix("_blocks")
        scales = named.pop(f"{name}_scales", None)
        if scales is None:
            raise ModelError(f"tensor {blocks.name} has no {name}_scales beside it")
        *shape, numbers = blocks.shape
        if (scales.type, scales.shape, numbers) != ("U8", tuple(shape), MXFP4_BYTES):
            raise ModelError(
                f"tensor {blocks.name} of shape {list(blocks.shape)} and tensor {scales.name} of "
                f"type {scales.type} and shape {list(scales.shape)} are not MXFP4"
            )
        named[name] = TensorEntry(
            name,
            "MXFP4",
            (*shape[:-1], shape[-1] * 2 * MXFP4_BYTES),
            blocks.file,
            blocks.offset,
            blocks.num_bytes,
            (scales.file, scales.offset),
        )


def _entry(name: str, fields: Any, path: str, file: int, start: int, size: int) -> TensorEntry:
    try:
        name.encode()  # raises for an unpaired surrogate, which JSON can contain
        kind, shape = fields["dtype"], tuple(_numbers(fields["shape"]))
        begin, end = _numbers(fields["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path} has a damaged header: {shown(name)!a}") from None
    if not isinstance(kind, str) or kind not in _BITS:
        raise ModelError(f"{path}: {name} has the type {shown(kind)}, which is not supported")
    if start + end > size:
        raise ModelError(f"{path} is truncated: {name} ends beyond the file")
    if (end - begin) * 8 != math.prod(shape) * _BITS[kind]:
        raise ModelError(f"{path} has a damaged header: {name} is not as long as its shape")
    return TensorEntry(name, kind, shape, file, start + begin, end - begin)


def _numbers(values: Any) -> list[int]:
    """Return a list of non-negative numbers; raises ValueError if it is invalid or too long."""
    if not isinstance(values, list) or len(values) > _MAX_DIMENSIONS:
        raise ValueError("not a list, or too long")
    if not all(type(value) is int and 0 <= value < _MAX_NUMBER for value in values):
        raise ValueError("not numbers")
    return values
