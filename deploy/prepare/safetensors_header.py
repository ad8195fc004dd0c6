"""Reads the header of a safetensors file and nothing else of it.

| 8 bytes: length of the header | header: JSON | tensor bytes |
"""

import json
import math
import os
from typing import Any, Final

from proto.errors import ModelError
from proto.prepared_model import TensorEntry

_MAX_HEADER_BYTES: Final = 100_000_000
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
    """The tensors of a file, which is number `file` of its index.

    Raises ModelError when the file is cut short or contradicts itself.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path} is not a safetensors file, or cut short")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a damaged header: no object")
    start = 8 + length
    return [
        _entry(name, fields, path, file, start, size)
        for name, fields in header.items()
        if name != "__metadata__"
    ]


def _entry(name: str, fields: Any, path: str, file: int, start: int, size: int) -> TensorEntry:
    try:
        kind, shape = str(fields["dtype"]), tuple(int(length) for length in fields["shape"])
        begin, end = (int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path} has a damaged header: {name}") from None
    if kind not in _BITS:
        raise ModelError(f"{path}: {name} has the type {kind}, which is not supported")
    if begin < 0 or start + end > size:
        raise ModelError(f"{path} is cut short: {name} ends beyond the file")
    if min(shape, default=0) < 0 or (end - begin) * 8 != math.prod(shape) * _BITS[kind]:
        raise ModelError(f"{path} has a damaged header: {name} is not as long as its shape")
    return TensorEntry(name, kind, shape, file, start + begin, end - begin)
