"""Reads the header of a safetensors file, without the tensors.

| 8 bytes: length of the header | header: JSON | tensor bytes |
"""

import json
import math
import os
from typing import Any, Final

from proto.errors import ModelError, shown
from proto.messages.prepared_model import TensorEntry, open_model_file

_MAX_HEADER_BYTES: Final = 32 << 20
"""Largest header, of about 200,000 tensors; parsed JSON can need twenty times as much memory."""
_MAX_DIMENSIONS: Final = 8
_MAX_NUMBER: Final = 1 << 60
_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 8),
}


def read(path: str, file: int) -> list[TensorEntry]:
    """Return the tensors of a file. file: its index in TensorIndex.files.

    Raises ModelError if the file is truncated or its header is invalid.
    """
    with open_model_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
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
