"""Reads what a file of `torch.save` says of its tensors, without torch and without running code.

Such a file is a zip archive, uncompressed: a pickle of names, shapes and storages, and the bytes of
each storage as a member of its own, to which the entries refer. The pickle is a program for a
stack machine that can call any function; `_read_tensors` carries out the steps that make
dictionaries, and has no step that calls one.
"""

import math
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from proto.errors import ModelError, shown
from proto.messages.prepared_model import TensorEntry, open_model_file

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
"""Storage class of torch → its dtype as safetensors names it, and bytes of a number."""
_MAX_PICKLE_BYTES: Final = 32 << 20
_LOCAL_HEADER: Final = 30
"""Bytes before the name in the header of a member; the lengths of name and extra field end it."""


def read(path: str, file: int) -> list[TensorEntry]:
    """Return the tensors of a file. file: its index in TensorIndex.files.

    Raises ModelError for a file that `torch.save` did not write, and for a tensor whose numbers are
    not side by side.
    """
    try:
        with open_model_file(path) as stream, zipfile.ZipFile(stream) as archive:
            members = {info.filename: info for info in archive.infolist()}
            (pickled,) = (name for name in members if name.endswith("/data.pkl"))
            root = pickled.removesuffix("data.pkl")
            if members[pickled].file_size > _MAX_PICKLE_BYTES:
                raise ModelError(f"{path}: {pickled} is larger than {_MAX_PICKLE_BYTES} bytes")
            tensors = _read_tensors(archive.read(pickled))
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


@dataclass(frozen=True)
class _Name:
    """What the pickle names: a function or a class."""

    name: str


def _read_tensors(pickled: bytes) -> Any:
    """Return what a pickle makes, in which only dictionaries, lists and tensors are made."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        mark = marks.pop()
        items = stack[mark:]
        del stack[mark:]
        return items

    def pop(count: int) -> list[Any]:
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(pickled):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE" | "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[opcode.name]())
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(pop(int(opcode.name[-1]))))
            case "GLOBAL":
                stack.append(_Name(str(argument).replace(" ", ".")))
            case "STACK_GLOBAL":
                stack.append(_Name(".".join(pop(2))))
            case "BINPERSID":
                _, kind, key, *_ = stack.pop()
                stack.append(_Storage(kind.name.removeprefix("torch."), str(key)))
            case "REDUCE":
                stack.append(_made_by(*pop(2)))
            case "SETITEM":
                key, value = pop(2)
                stack[-1][key] = value
            case "SETITEMS":
                items = pop_to_mark()
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "APPEND":
                (item,) = pop(1)
                stack[-1].append(item)
            case "APPENDS":
                items = pop_to_mark()
                stack[-1].extend(items)
            case "BUILD":  # attributes of a dictionary
                stack.pop()
            case "STOP":
                return stack.pop()
            case _:
                raise ModelError(f"the file has the pickle operation {opcode.name}")
    raise ModelError("the pickle in the file does not end")


_CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}


def _made_by(function: _Name, arguments: tuple[Any, ...]) -> Any:
    """Return what a function would make of its arguments, if it is one of these."""
    match function.name:
        case "collections.OrderedDict":
            return dict(*arguments)
        case "torch._utils._rebuild_parameter":
            return arguments[0]
        case "torch._utils._rebuild_tensor_v2":
            storage, offset, shape, strides, *_ = arguments
            return _Tensor(storage, int(offset), tuple(shape), tuple(strides))
    raise ModelError(f"the file names {shown(function.name)}, which is not run")


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
    if (
        min((tensor.offset, *tensor.shape)) < 0
        or tensor.offset * width + num_bytes > member.file_size
    ):
        raise ModelError(f"{path} is truncated: {name} ends beyond its storage")
    stream.seek(member.header_offset)
    lengths = struct.unpack_from("<HH", stream.read(_LOCAL_HEADER), _LOCAL_HEADER - 4)
    start = member.header_offset + _LOCAL_HEADER + sum(lengths)
    return TensorEntry(name, kind, tensor.shape, file, start + tensor.offset * width, num_bytes)
