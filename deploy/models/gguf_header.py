"""Reads the header of a GGUF file, without the tensors.

    | GGUF | version | tensors n | keys m | m × (key, type, value) | n × tensor | padding | bytes |

    string   u64 length, bytes                  array    u32 type, u64 length, items
    tensor   name, u32 dimensions, u64 each from the fastest, u32 type, u64 offset

Every length and count is compared with the rest of the file, or with a limit, before it is used, so
that an invalid header costs neither memory nor time. The checks also protect `transformers`, which
parses the file later.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from proto.errors import ModelError, shown
from proto.prepared_model import TensorEntry

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_KEYS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 17
_MAX_DIMENSIONS: Final = 4
_MAX_NAME_BYTES: Final = 1 << 12
_MAX_ITEMS: Final = 1 << 22
"""Of all arrays together: a vocabulary of 256k needs 1.5 million."""
_MAX_KEPT_ITEMS: Final = 1 << 10
_MAX_TEXT_BYTES: Final = 64 << 20
"""Of all names and strings together."""
_MAX_ALIGNMENT: Final = 1 << 20
_STRING, _ARRAY = 8, 9
_SCALARS: Final[Mapping[int, str]] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Type of a value → format for `struct`."""


@dataclass(frozen=True)
class GgufHeader:
    """Header of a GGUF file. values: metadata by key, without long arrays. tensors: all tensors."""

    values: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]


def read(path: str) -> GgufHeader:
    """Read the header; raises ModelError if the file is invalid or truncated."""
    try:
        with open(path, "rb") as stream:
            magic = stream.read(len(MAGIC))
            if magic != MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).parse()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


class _Parser:
    """Parses one header in a single pass."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = len(MAGIC)
        self._num_items = 0
        self._num_text_bytes = 0

    def parse(self) -> GgufHeader:
        version = self._number("<I")
        if version not in _VERSIONS:
            raise self._damage(f"version {version} is not one of {_VERSIONS}")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self._damage(f"it announces {num_keys} keys and {num_tensors} tensors")
        values = self._values(num_keys)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        start = self._start_of_data(values)
        sizes = _type_sizes()
        entries = {info[0]: self._entry(*info, sizes, start) for info in infos}
        if len(entries) < len(infos):
            raise self._damage("it names a tensor twice")
        return GgufHeader(values, tuple(entries.values()))

    def _values(self, number: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        seen: set[str] = set()
        for _ in range(number):
            key = self._name()
            if key in seen:
                raise self._damage(f"it has {shown(key)} twice")
            seen.add(key)
            kind = self._number("<I")
            if kind != _ARRAY:
                values[key] = self._value(kind)
                continue
            items = self._array()
            if items is not None:
                values[key] = items
        return values

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text(self._number("<Q"))
        packed = _SCALARS.get(kind)
        if packed is None:
            raise self._damage(f"there is no type {kind}")
        return self._number(packed)

    def _array(self) -> list[Any] | None:
        """Return the items of an array; None for a long one, which is skipped."""
        kind, length = self._number("<I"), self._number("<Q")
        self._num_items += length
        if self._num_items > _MAX_ITEMS:
            raise self._damage(f"its arrays announce more than {_MAX_ITEMS} items")
        if length <= _MAX_KEPT_ITEMS:
            return [self._value(kind) for _ in range(length)]
        if kind == _STRING:
            for _ in range(length):
                self._advance(self._number("<Q"))
        elif kind in _SCALARS:
            self._advance(length * struct.calcsize(_SCALARS[kind]))
        else:
            raise self._damage(f"there is no array of type {kind}")
        return None

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, dimensions (fastest first), type and offset."""
        name, rank = self._name(), self._number("<I")
        if rank > _MAX_DIMENSIONS:
            raise self._damage(f"{shown(name)} has {rank} dimensions")
        dimensions = tuple(self._number("<Q") for _ in range(rank))
        return name, dimensions, self._number("<I"), self._number("<Q")

    def _entry(
        self,
        name: str,
        dimensions: tuple[int, ...],
        kind: int,
        offset: int,
        sizes: Mapping[int, tuple[str, int, int]],
        start: int,
    ) -> TensorEntry:
        if kind not in sizes:
            raise self._damage(f"{shown(name)} has the unknown type {kind}")
        type_name, block_size, block_bytes = sizes[kind]
        row, count = dimensions[0] if dimensions else 1, 1
        for dimension in dimensions:
            count *= dimension
        if row % block_size:
            raise self._damage(f"the rows of {shown(name)} are not whole blocks of {block_size}")
        num_bytes = count // block_size * block_bytes
        if start + offset + num_bytes > self._size:
            raise ModelError(f"{self._path} is truncated: {shown(name)} ends beyond the file")
        # GGUF lists the fastest dimension first, torch the slowest
        return TensorEntry(name, type_name, dimensions[::-1], 0, start + offset, num_bytes)

    def _start_of_data(self, values: Mapping[str, Any]) -> int:
        alignment = values.get("general.alignment", 32)
        if (
            type(alignment) is not int
            or not 0 < alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._damage(f"general.alignment is {shown(alignment)}")
        return -(-self._at // alignment) * alignment

    def _name(self) -> str:
        length = self._number("<Q")
        if length > _MAX_NAME_BYTES:
            raise self._damage(f"a name of {length} bytes")
        return self._text(length)

    def _text(self, length: int) -> str:
        start = self._advance(length)
        self._num_text_bytes += length
        if self._num_text_bytes > _MAX_TEXT_BYTES:
            raise self._damage(f"more than {_MAX_TEXT_BYTES} bytes of text")
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self._damage("a string is not UTF-8") from None

    def _number(self, packed: str) -> Any:
        start = self._advance(struct.calcsize(packed))
        (value,) = struct.unpack_from(packed, self._data, start)
        return value

    def _advance(self, length: int) -> int:
        """Return the position of the next `length` bytes, and move beyond them."""
        start = self._at
        if length > self._size - start:
            raise ModelError(f"{self._path} is damaged or truncated: its header is incomplete")
        self._at += length
        return start

    def _damage(self, what: str) -> ModelError:
        return ModelError(f"{self._path} has a damaged header: {what}")


def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """Return tensor types by number: (name, elements per block, bytes per block)."""
    from gguf import GGML_QUANT_SIZES

    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
