"""Reads the header of a GGUF file: metadata, and where each tensor lies.

    | GGUF | version | tensors n | keys m | m × (key, type, value) | n × tensor | padding | bytes |

    string   u64 length, bytes                  array    u32 type, u64 length, items
    tensor   name, u32 dimensions, u64 each from the fastest, u32 type, u64 offset

Every length and count is compared with the rest of the file, or with a limit, before it is used, so
that an invalid header costs neither memory nor time.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from proto.errors import ModelError, shown
from proto.messages.prepared_model import TENSOR_TYPES, TensorEntry, open_model_file

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_KEYS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 17
_MAX_DIMENSIONS: Final = 4
_MAX_NAME_BYTES: Final = 1 << 12
_MAX_ITEMS: Final = 1 << 22
"""Limit of the items of all arrays together: a vocabulary of 256k needs 1.5 million."""
_MAX_NESTED_ARRAYS: Final = 4
_MAX_TEXT_BYTES: Final = 64 << 20
"""Limit of the bytes of all names and strings together."""
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20
_STRING, _ARRAY = 8, 9
_SCALARS: Final[Mapping[int, str]] = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""Number of a metadata type → its format for `struct`."""


@dataclass(frozen=True)
class GgufHeader:
    """Header of a GGUF file.

    values: metadata by key, arrays as lists. tensors: all tensors. num_bytes: length of the header.
    """

    values: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    num_bytes: int = 0


def read(path: str) -> GgufHeader:
    """Read the header; raises ModelError naming file and field if it is invalid or truncated."""
    try:
        with open_model_file(path) as stream:
            magic = stream.read(len(MAGIC))
            if magic != MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).parse()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


class _Parser:
    """Parses one header in a single pass. field: what is parsed now, for error messages."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = len(MAGIC)
        self._field = "version and counts"
        self._num_items = 0
        self._num_text_bytes = 0

    def parse(self) -> GgufHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            raise self._damage(f"version {version} is not one of {_VERSIONS}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self._damage(f"it announces {num_keys} keys and {num_tensors} tensors")
        values = self._values(num_keys)
        infos = [self._tensor_info(index) for index in range(num_tensors)]
        self._field = "general.alignment"
        alignment = self._alignment(values)
        start = -(-self._at // alignment) * alignment
        entries = {info[0]: self._entry(*info, alignment, start) for info in infos}
        if len(entries) < len(infos):
            raise self._damage("two tensors have the same name")
        return GgufHeader(values, tuple(entries.values()), start)

    def _values(self, number: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(number):
            self._field = f"key {index}"
            key = self._name()
            self._field = f"key {shown(key)}"
            if key in values:
                raise self._damage("it is there twice")
            values[key] = self._value(self._number("I"))
        return values

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind == _ARRAY:
            return self._array(depth)
        return self._numbers(kind, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        if depth == _MAX_NESTED_ARRAYS:
            raise self._damage(f"arrays are nested more than {_MAX_NESTED_ARRAYS} deep")
        kind, length = self._number("I"), self._number("Q")
        self._num_items += length
        if self._num_items > _MAX_ITEMS:
            raise self._damage(f"with this array all arrays announce over {_MAX_ITEMS} items")
        if kind == _STRING:
            return self._strings(length)
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(length)]
        return list(self._numbers(kind, length))

    def _numbers(self, kind: int, count: int) -> tuple[Any, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._damage(f"there is no type {kind}")
        packed = f"<{count}{code}"
        start = self._advance(struct.calcsize(packed))
        return struct.unpack_from(packed, self._data, start)

    def _strings(self, count: int) -> list[str]:
        """Return the next strings; a loop without calls, because vocabularies are long."""
        data, at, end = self._data, self._at, self._size
        strings = []
        read_length = struct.Struct("<Q").unpack_from
        text_left = _MAX_TEXT_BYTES - self._num_text_bytes
        try:
            for _ in range(count):
                if end - at < 8:
                    raise self._truncation()
                (length,) = read_length(data, at)
                at += 8
                if length > end - at:
                    raise self._truncation()
                text_left -= length
                if text_left < 0:
                    raise self._damage(f"all strings have more than {_MAX_TEXT_BYTES} bytes")
                strings.append(data[at : at + length].decode())
                at += length
        except UnicodeDecodeError:
            raise self._damage(f"string {len(strings)} is not UTF-8") from None
        self._at, self._num_text_bytes = at, _MAX_TEXT_BYTES - text_left
        return strings

    def _tensor_info(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, dimensions (fastest first), type and offset."""
        self._field = f"tensor {index}"
        name = self._name()
        self._field = f"tensor {shown(name)}"
        rank = self._number("I")
        if rank > _MAX_DIMENSIONS:
            raise self._damage(f"it has {rank} dimensions")
        dimensions = tuple(self._number("Q") for _ in range(rank))
        return name, dimensions, self._number("I"), self._number("Q")

    def _entry(
        self,
        name: str,
        dimensions: tuple[int, ...],
        kind: int,
        offset: int,
        alignment: int,
        start: int,
    ) -> TensorEntry:
        self._field = f"tensor {shown(name)}"
        if kind not in TENSOR_TYPES:
            raise self._damage(f"there is no tensor type {kind}")
        type_name, block_size, block_bytes = TENSOR_TYPES[kind]
        row, count = dimensions[0] if dimensions else 1, 1
        for dimension in dimensions:
            count *= dimension
        if row % block_size:
            raise self._damage(f"rows of {row} are not whole blocks of {block_size}")
        if offset % alignment:
            raise self._damage(f"its offset {offset} is not a multiple of {alignment}")
        num_bytes = count // block_size * block_bytes
        if start + offset + num_bytes > self._size:
            raise ModelError(
                f"{self._path} is truncated: tensor {shown(name)} ends beyond its "
                f"{self._size} bytes"
            )
        # GGUF lists the fastest dimension first, torch the slowest
        return TensorEntry(name, type_name, dimensions[::-1], 0, start + offset, num_bytes)

    def _alignment(self, values: Mapping[str, Any]) -> int:
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            type(alignment) is not int
            or not 0 < alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._damage(f"{shown(alignment)} is not a power of 2 up to {_MAX_ALIGNMENT}")
        return alignment

    def _name(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._advance(8))
        if length > _MAX_NAME_BYTES:
            raise self._damage(f"a name of {length} bytes")
        self._at -= 8
        return self._strings(1)[0]

    def _number(self, code: str) -> Any:
        packed = "<" + code
        (value,) = struct.unpack_from(packed, self._data, self._advance(struct.calcsize(packed)))
        return value

    def _advance(self, length: int) -> int:
        """Return the position of the next `length` bytes, and move beyond them."""
        start = self._at
        if length > self._size - start:
            raise self._truncation()
        self._at += length
        return start

    def _truncation(self) -> ModelError:
        return ModelError(
            f"{self._path} is damaged or truncated: {self._field}: the file ends before it"
        )

    def _damage(self, what: str) -> ModelError:
        return ModelError(f"{self._path} has a damaged header: {self._field}: {what}")
