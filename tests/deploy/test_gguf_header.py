"""The GGUF header reader agrees with the gguf package; invalid headers fail fast."""

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deploy.models import gguf_header, safetensors_header
from proto.errors import ModelError
from proto.messages.prepared_model import TENSOR_TYPES
from tests.fakes.gguf_headers import (
    ARRAY,
    STRING,
    U8,
    U32,
    array,
    file,
    setting,
    small_file,
    tensor,
    text,
)
from tests.fakes.tiny_model_files import write_gguf

HUGE = (1 << 31, 1 << 60, (1 << 63) - 1, (1 << 64) - 1)
NESTED = struct.pack("<IQ", ARRAY, 1) * 10_000


SCALARS = {
    "uint8": 200,
    "int8": -3,
    "uint16": 60_000,
    "int16": -300,
    "uint32": 1 << 31,
    "int32": -70_000,
    "float32": 0.1,
    "bool": True,
    "string": "ä",
    "uint64": 1 << 63,
    "int64": -(1 << 62),
    "float64": 0.1,
}
ARRAYS = {
    "numbers": [1, -2],
    "floats": [0.5, 1.5, 0.1],
    "flags": [True, False],
    "words": ["", "a", "中"] * 400,
    "nested numbers": [[1, 2], [3]],
    "nested words": [[["a"], ["b", ""]], [["c"]]],
}


def write_every_type(path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for kind, value in SCALARS.items():
        getattr(writer, f"add_{kind}")(f"scalar.{kind}", value)
    for name, values in ARRAYS.items():
        writer.add_array(name, values)
    writer.add_tensor("w", np.ones((3, 5), np.float32))
    writer.add_tensor("v", np.ones(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def flat(values: object) -> list[object]:
    """Return nested lists as one; the package's reader gives no other form."""
    return (
        [item for value in values for item in flat(value)] if isinstance(values, list) else [values]
    )


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("write", [write_gguf, write_every_type])
def test_headers_equal_those_of_the_gguf_package(
    tmp_path: Path, write: Callable[[Path], object], version: int
) -> None:
    from gguf import GGUFReader

    path = tmp_path / "tiny.gguf"
    write(path)
    with path.open("r+b") as stream:
        stream.seek(4)
        stream.write(struct.pack("<I", version))
    header, reader = gguf_header.read(str(path)), GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if name[:5] != "GGUF."}
    assert header.values.keys() == fields.keys()
    for name, field in fields.items():
        value, theirs = header.values[name], field.contents()
        assert flat(value) == flat(theirs), name
        assert isinstance(value, list) == isinstance(theirs, list)
    assert [
        (each.name, each.type, each.shape, each.offset, each.num_bytes) for each in header.tensors
    ] == [
        (
            each.name,
            each.tensor_type.name,
            tuple(int(length) for length in reversed(each.shape)),
            int(each.data_offset),
            int(each.n_bytes),
        )
        for each in reader.tensors
    ]


def test_nested_arrays_keep_their_form(tmp_path: Path) -> None:
    write_every_type(tmp_path / "every.gguf")
    values = gguf_header.read(str(tmp_path / "every.gguf")).values
    assert values["nested numbers"] == ARRAYS["nested numbers"]
    assert values["nested words"] == ARRAYS["nested words"]


def test_tensor_types_equal_those_of_the_gguf_package() -> None:
    from gguf import GGML_QUANT_SIZES

    for kind, sizes in GGML_QUANT_SIZES.items():
        assert TENSOR_TYPES[int(kind)] == (kind.name, *sizes)


def test_every_type_of_value(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(small_file())
    header = gguf_header.read(str(tmp_path / "small.gguf"))
    assert header.values["tokenizer.ggml.tokens"] == ["a", "b"]
    assert header.values["nested"] == [[1, 2], []]
    assert [header.values[f"k{kind}"] for kind in range(8)] == [1, 1, 1, 1, 1, 1, 1.0, True]
    assert [header.values[f"k{kind}"] for kind in (10, 11, 12)] == [1, -1, 0.5]
    assert [each.shape for each in header.tensors] == [(2, 4), (8,)]
    assert header.tensors[1].offset - header.tensors[0].offset == 32


LIES = {
    "keys": lambda number: file([], [], keys=number),
    "tensors": lambda number: file([], [], infos=number),
    "a key": lambda number: file([struct.pack("<Q", number) + b"key"], []),
    "a text": lambda number: file([setting("k", STRING, struct.pack("<Q", number))], []),
    "bytes": lambda number: file([setting("k", ARRAY, array(U8, [], number))], []),
    "texts": lambda number: file([setting("k", ARRAY, array(STRING, [text("a")], number))], []),
    "arrays": lambda number: file([setting("k", ARRAY, array(ARRAY, [], number))], []),
    "nothing": lambda number: file([setting("k", ARRAY, array(77, [], number))], []),
    "a dimension": lambda number: file([], [tensor("w", (number, 1))]),
    "dimensions": lambda number: file([], [tensor("w", (number,) * 4)]),
    "an offset": lambda number: file([], [tensor("w", (1,), 0, number)]),
    "a name": lambda number: file([], [struct.pack("<Q", number)]),
    "an alignment": lambda number: file(
        [setting("general.alignment", U32, struct.pack("<I", number & 0xFFFFFFFF))],
        [tensor("w", (1,))],
    ),
}


def refused(path: Path, read: object) -> None:
    """Return the error of reading a header; assert that it takes little time and memory."""
    assert callable(read)
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            read()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("what", LIES)
def test_a_wrong_length_is_refused(tmp_path: Path, what: str, number: int) -> None:
    path = tmp_path / "lie.gguf"
    path.write_bytes(LIES[what](number))
    refused(path, lambda: gguf_header.read(str(path)))


@pytest.mark.parametrize(
    "content",
    [
        file([setting("k", ARRAY, NESTED)], []),
        file([setting("k", U8, b"\1"), setting("k", U8, b"\1")], []),
        file([], [tensor("w", (1,)), tensor("w", (1,))]),
        file([], [tensor("w", (1,) * 5)]),
        file([], [tensor("w", (31,), 2)]),
        file([], [tensor("w", (32,), 999)]),
        file([], [tensor("w", (1,), 0, 8)]),
        file([setting("general.alignment", U32, struct.pack("<I", 48))], []),
        file([setting("general.alignment", STRING, text("x"))], []),
        file([setting("k", STRING, struct.pack("<Q", 1) + b"\xff")], []),
        b"GGUF",
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_an_invalid_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    refused(path, lambda: gguf_header.read(str(path)))


@pytest.mark.parametrize("number", HUGE)
def test_a_wrong_safetensors_length_is_refused(tmp_path: Path, number: int) -> None:
    path = tmp_path / "lie.safetensors"
    for content in (
        struct.pack("<Q", number & ((1 << 64) - 1)) + b"{}",
        _safetensors({"dtype": "F32", "shape": [number], "data_offsets": [0, 4]}),
        _safetensors({"dtype": "F32", "shape": [1], "data_offsets": [number, number + 4]}),
        _safetensors({"dtype": "F32", "shape": [number] * 200_000, "data_offsets": [0, 4]}),
        _safetensors({"dtype": "F32", "shape": [1], "data_offsets": [float("inf"), 4]}),
        _safetensors({"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}),
        _safetensors({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}),
        _safetensors([1]),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError):
            safetensors_header.read(str(path), 0)


def _safetensors(fields: object) -> bytes:
    header = json.dumps({"w": fields}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)
