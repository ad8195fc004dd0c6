"""The tensors of an adapter: a folder of PEFT, or a GGUF file of llama.cpp.

read_adapter_file is the only function that opens files; their disk may not answer. Everything that
a file says about sizes and places is checked before memory is allocated for it.
"""

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, Final, TypeVar

import torch

from proto.errors import ModelError, shown
from worker.loader.adapters.peft_config import PeftConfig, read_peft_config
from worker.loader.block_types import BLOCK_TYPES
from worker.loader.dequantize import dequantize

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
PICKLED_NAMES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_MAX_HEADER: Final = 64 << 20
_MAX_CONFIG: Final = 4 << 20
_READ_BYTES: Final = 1 << 20
"""Bytes that are read, or hashed, in one piece of work."""
_CHECKED_NUMBERS: Final = 1 << 19
_SAFETENSORS_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_GGUF_MAGIC: Final = b"GGUF"
_GGUF_TYPES: Final = {0: "F32", 1: "F16", 8: "Q8_0", 28: "F64", 30: "BF16"}
_GGUF_SCALARS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_ALIGNMENT: Final = 32
_MAX_ITEMS: Final = 1 << 20
_MAX_DIMENSIONS: Final = 4

Result = TypeVar("Result")
READS: Final = "reads"
Slices = Generator[Any, None, Result]
"""Work that yields after each small piece, and returns its result.

It yields READS before a piece that may wait for a disk, and computes little in it; None before
others. The first piece of `read_adapter_file` is one that reads.
"""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in a file, in bytes. type: one of safetensors' or GGUF's."""

    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What the files of an adapter say.

    format: "safetensors" or "gguf", which is also how names and orders of rows are. tensors: by
    their names in the file, in the types of the file or in float32. digest: SHA-256 of the config
    and all tensors. config: of a PEFT folder. alpha: of a GGUF file; 0: the scale is 1.
    """

    path: str
    format: str
    tensors: Mapping[str, torch.Tensor]
    digest: bytes
    config: PeftConfig | None = None
    alpha: float = 0.0


def read_adapter_file(path: str) -> Slices[AdapterFile]:
    """Read an adapter; raises ModelError naming what is wrong with it."""
    try:
        if os.path.isdir(path):
            return (yield from _read_folder(path))
        with _open_file(path) as file:
            return (yield from _read_gguf(path, file))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None


@contextmanager
def _open_file(path: str) -> Iterator[BufferedReader]:
    """Open a regular file; raises ModelError for a FIFO or a device, which might never end."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ModelError(f"{path} is no regular file")
        yield file


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a FIFO does not wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_folder(folder: str) -> Slices[AdapterFile]:
    config_path = os.path.join(folder, CONFIG_NAME)
    weights_path = os.path.join(folder, WEIGHTS_NAME)
    if not os.path.exists(config_path):
        files = sorted(name for name in os.listdir(folder) if name.endswith(".gguf"))
        if len(files) == 1:
            path = os.path.join(folder, files[0])
            with _open_file(path) as file:
                return (yield from _read_gguf(path, file))
        raise ModelError(f"{folder} has no {CONFIG_NAME}, and no single GGUF file")
    with _open_file(config_path) as file:
        config = read_peft_config(config_path, file.read(_MAX_CONFIG))
    if not os.path.exists(weights_path):
        pickled = [name for name in PICKLED_NAMES if os.path.exists(os.path.join(folder, name))]
        if pickled:
            raise ModelError(
                f"{os.path.join(folder, pickled[0])} is pickled, which can run any code: save the "
                f"adapter as {WEIGHTS_NAME}"
            )
        raise ModelError(f"{folder} has no {WEIGHTS_NAME}")
    with _open_file(weights_path) as file:
        places = _safetensors_places(weights_path, file)
        tensors, digest = yield from _read_tensors(weights_path, file, places, config.facts)
    return AdapterFile(folder, "safetensors", tensors, digest, config)


def _safetensors_places(path: str, file: BufferedReader) -> dict[str, TensorPlace]:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(_MAX_HEADER, size - 8):
        raise ModelError(f"{path} is no safetensors file, or it is cut off")
    try:
        header = json.loads(file.read(length))
        entries = {name: each for name, each in header.items() if name != "__metadata__"}
        places = {}
        for name, each in entries.items():
            begin, end = (int(offset) for offset in each["data_offsets"])
            shape = tuple(int(length) for length in each["shape"])
            places[name] = TensorPlace(str(each["dtype"]), shape, 8 + length + begin, end - begin)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(f"{path} has a header that is no safetensors header") from None
    for name, place in places.items():
        dtype = _SAFETENSORS_TYPES.get(place.type)
        if dtype is None:
            raise ModelError(
                f"tensor {shown(name)} is stored as {shown(place.type)}, not as floats"
            )
        _check_place(path, name, place, math.prod(place.shape) * dtype.itemsize, size)
    return places


def _check_place(path: str, name: str, place: TensorPlace, wanted: int, size: int) -> None:
    if min(place.shape, default=1) < 0 or place.num_bytes != wanted:
        raise ModelError(
            f"tensor {shown(name)} of shape {list(place.shape)} has {place.num_bytes} bytes"
        )
    if place.offset < 0 or place.offset + place.num_bytes > size:
        raise ModelError(f"tensor {shown(name)} lies outside of {path}, which may be cut off")


def _read_tensors(
    path: str, file: BufferedReader, places: Mapping[str, TensorPlace], facts: Mapping[str, Any]
) -> Slices[tuple[dict[str, torch.Tensor], bytes]]:
    """Return the tensors, and the digest of facts and tensors; each must be finite.

    All is read first, because work on what was read may have to wait for a step after each read.
    """
    contents: dict[str, bytearray] = {}
    for name in sorted(places):
        contents[name] = bytearray(places[name].num_bytes)
        view = memoryview(contents[name])
        file.seek(places[name].offset)
        for begin in range(0, len(view), _READ_BYTES):
            part = view[begin : begin + _READ_BYTES]
            yield READS
            if file.readinto(part) != len(part):
                raise ModelError(f"{path} ended within tensor {shown(name)}")
    yield
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    tensors = {}
    for name, data in contents.items():
        place = places[name]
        digest.update(json.dumps([name, place.type, place.shape]).encode())
        view = memoryview(data)
        for begin in range(0, len(view), _READ_BYTES):
            digest.update(view[begin : begin + _READ_BYTES])
            yield
        tensors[name] = tensor = _decoded(place, data)
        for numbers in torch.split(tensor.view(-1), _CHECKED_NUMBERS):
            if not all_finite(numbers):
                raise ModelError(f"tensor {shown(name)} has numbers that are not finite")
            yield
    return tensors, digest.digest()


def all_finite(numbers: torch.Tensor) -> bool:
    """Return whether no number is NaN or infinite; ten times as fast as `isfinite` of each."""
    return not numbers.numel() or all(math.isfinite(each.item()) for each in torch.aminmax(numbers))


def _decoded(place: TensorPlace, data: bytearray) -> torch.Tensor:
    if not data:
        return torch.empty(place.shape)
    if place.type in _SAFETENSORS_TYPES:
        return torch.frombuffer(data, dtype=_SAFETENSORS_TYPES[place.type]).view(place.shape)
    columns, block_bytes = BLOCK_TYPES[place.type]
    blocks = torch.frombuffer(data, dtype=torch.uint8).view(-1, block_bytes)
    return dequantize(place.type, blocks, columns).view(place.shape)


# ---- GGUF ----


class _GgufReader:
    """Reads the header of a GGUF file (github.com/ggml-org/ggml, docs/gguf.md)."""

    def __init__(self, path: str, file: BufferedReader) -> None:
        self._path = path
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def number(self, kind: str) -> Any:
        size = struct.calcsize(kind)
        data = self._file.read(size)
        if len(data) < size:
            raise self.wrong("it is cut off")
        return struct.unpack(f"<{kind}", data)[0]

    def count(self, what: str, most: int = _MAX_ITEMS) -> int:
        found = self.number("Q")
        if found > most:
            raise self.wrong(f"it has {found} {what}")
        return int(found)

    def string(self) -> str:
        length = self.count("bytes of a string", min(_MAX_HEADER, self.size))
        data = self._file.read(length)
        if len(data) < length:
            raise self.wrong("it is cut off")
        return data.decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _GGUF_STRING:
            return self.string()
        if kind == _GGUF_ARRAY:
            of = self.number("I")
            if of == _GGUF_ARRAY:
                raise self.wrong("it has an array of arrays")
            return [self.value(of) for _ in range(self.count("values of an array"))]
        if kind not in _GGUF_SCALARS:
            raise self.wrong(f"it has a value of type {kind}")
        return self.number(_GGUF_SCALARS[kind])

    def wrong(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is no GGUF file of an adapter: {what}")


def _read_gguf(path: str, file: BufferedReader) -> Slices[AdapterFile]:
    reader = _GgufReader(path, file)
    if file.read(4) != _GGUF_MAGIC:
        pickled = path.endswith((".bin", ".pt", ".pth"))
        raise reader.wrong("pickled weights are not read" if pickled else "it has another magic")
    if (version := reader.number("I")) not in (2, 3):
        raise reader.wrong(f"its version is {version}")
    num_tensors, num_keys = reader.count("tensors"), reader.count("keys")
    keys = {reader.string(): reader.value(reader.number("I")) for _ in range(num_keys)}
    if keys.get("general.type") != "adapter" or keys.get("adapter.type") != "lora":
        raise reader.wrong("general.type is not adapter, or adapter.type is not lora")
    if keys.get("adapter.alora.invocation_tokens"):
        raise ModelError(
            f"{path}: adapter.alora.invocation_tokens: activated LoRA is not supported"
        )
    alpha = keys.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise reader.wrong(f"adapter.lora.alpha is {shown(alpha)}")
    infos = []
    for _ in range(num_tensors):
        name, dimensions = reader.string(), reader.number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise reader.wrong(f"tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
        infos.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = keys.get("general.alignment", _GGUF_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise reader.wrong(f"general.alignment is {shown(alignment)}")
    first = -(-file.tell() // alignment) * alignment
    places = {}
    for name, shape, kind, offset in infos:
        kind_name = _GGUF_TYPES.get(kind)
        if kind_name is None:
            raise ModelError(f"tensor {shown(name)} has GGML's type {kind}, not floats or Q8_0")
        num_bytes = _gguf_bytes(name, kind_name, shape)
        places[name] = TensorPlace(kind_name, shape, first + offset, num_bytes)
        _check_place(path, name, places[name], num_bytes, reader.size)
    facts = {"adapter.lora.alpha": alpha}
    tensors, digest = yield from _read_tensors(path, file, places, facts)
    return AdapterFile(path, "gguf", tensors, digest, alpha=alpha)


def _gguf_bytes(name: str, kind: str, shape: tuple[int, ...]) -> int:
    numbers = math.prod(shape)
    if kind in _SAFETENSORS_TYPES:
        return numbers * _SAFETENSORS_TYPES[kind].itemsize
    columns, block_bytes = BLOCK_TYPES[kind]
    if not shape or shape[-1] % columns:
        raise ModelError(f"tensor {shown(name)} of shape {list(shape)} has no whole blocks")
    return numbers // columns * block_bytes
