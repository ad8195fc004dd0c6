"""Reads what a file of `torch.save` says of its tensors, without torch and without running code.

Such a file is a zip archive, uncompressed: a pickle of names, shapes and storages, and the bytes of
each storage as a member of its own, to which the entries refer. The pickle may name a dictionary,
the function that makes a tensor of a storage, and kinds of storages; for any other name it is
refused, so nothing of the file is ever called.
"""

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from proto.errors import ModelError, shown
from proto.prepared_model import TensorEntry

_STORAGES: Final = {
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}
"""Type and bytes of a number, as safetensors files name them."""
_MAX_PICKLE_BYTES: Final = 32 << 20
_LOCAL_HEADER: Final = 30
"""Bytes before the name in the header of a member; the lengths of name and extra field end it."""


def read(path: str, file: int) -> list[TensorEntry]:
    """Return the tensors of a file. file: its index in TensorIndex.files.

    Raises ModelError for a file that `torch.save` did not write, and for a tensor whose numbers are
    not side by side.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as stream:
            members = {info.filename: info for info in archive.infolist()}
            (pickled,) = (name for name in members if name.endswith("/data.pkl"))
            root = pickled.removesuffix("data.pkl")
            if members[pickled].file_size > _MAX_PICKLE_BYTES:
                raise ModelError(f"{path}: {pickled} is larger than {_MAX_PICKLE_BYTES} bytes")
            with archive.open(pickled) as names:
                tensors = _TensorUnpickler(names).load()
            if not isinstance(tensors, dict):
                raise ModelError(f"{path} has no dictionary of tensors")
            return [
                _entry(str(name), tensor, path, file, stream, members, root)
                for name, tensor in tensors.items()
                if isinstance(tensor, _Tensor)
            ]
    except ModelError:
        raise
    except Exception as error:  # damaged archives and pickles raise all kinds
        raise ModelError(f"{path} is not a file of torch.save: {error}") from None


@dataclass(frozen=True)
class _Storage:
    kind: str
    key: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _make_tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


class _TensorUnpickler(pickle.Unpickler):
    """Knows the few names that a dictionary of tensors needs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _make_tensor
        if module == "torch" and name in _STORAGES:
            return name
        raise ModelError(f"the file names {shown(f'{module}.{name}')}, which is not run")

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, *_ = pid
        return _Storage(kind, str(key))


def _entry(
    name: str,
    tensor: _Tensor,
    path: str,
    file: int,
    stream: BinaryIO,
    members: dict[str, zipfile.ZipInfo],
    root: str,
) -> TensorEntry:
    kind, width = _STORAGES[tensor.storage.kind]
    member = members[f"{root}data/{tensor.storage.key}"]
    side_by_side = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    if list(tensor.strides) != side_by_side or member.compress_type != zipfile.ZIP_STORED:
        raise ModelError(f"{path}: the numbers of {name} are not side by side")
    num_bytes = math.prod(tensor.shape) * width
    if tensor.offset * width + num_bytes > member.file_size:
        raise ModelError(f"{path} is truncated: {name} ends beyond its storage")
    stream.seek(member.header_offset)
    lengths = struct.unpack_from("<HH", stream.read(_LOCAL_HEADER), _LOCAL_HEADER - 4)
    start = member.header_offset + _LOCAL_HEADER + sum(lengths)
    return TensorEntry(name, kind, tensor.shape, file, start + tensor.offset * width, num_bytes)
