"""GGUF headers built from bytes, including invalid ones that no library writes."""

import struct
from collections.abc import Sequence

U8, U32, F32, STRING, ARRAY = 0, 4, 6, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def setting(key: str, kind: int, packed: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + packed


def array(kind: int, items: Sequence[bytes], length: int | None = None) -> bytes:
    """length: the announced length, by default the actual one."""
    number = len(items) if length is None else length
    return struct.pack("<IQ", kind, number) + b"".join(items)


def tensor(name: str, dimensions: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    head = text(name) + struct.pack("<I", len(dimensions))
    return head + sizes + struct.pack("<IQ", kind, offset)


def file(
    settings: Sequence[bytes], tensors: Sequence[bytes], *, keys: int = -1, infos: int = -1
) -> bytes:
    """keys, infos: the announced counts, by default the actual ones."""
    num_keys = len(settings) if keys < 0 else keys
    num_tensors = len(tensors) if infos < 0 else infos
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys)
    head += b"".join(settings) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(range(64))


def small_file(tensors: int = 2) -> bytes:
    """Return a file with every type of value and some tensors."""
    settings = [
        setting("general.architecture", STRING, text("llama")),
        setting("general.alignment", U32, struct.pack("<I", 32)),
        setting("tokenizer.ggml.model", STRING, text("gpt2")),
        setting("tokenizer.ggml.tokens", ARRAY, array(STRING, [text("a"), text("b")])),
        setting("tokenizer.ggml.scores", ARRAY, array(F32, [struct.pack("<f", 1.5)] * 2)),
        setting("nested", ARRAY, array(ARRAY, [array(U8, [b"\1", b"\2"]), array(STRING, [])])),
        *(
            setting(f"k{kind}", kind, struct.pack(f"<{packed}", 1))
            for kind, packed in enumerate("BbHhIif?")
        ),
        setting("k10", 10, struct.pack("<Q", 1)),
        setting("k11", 11, struct.pack("<q", -1)),
        setting("k12", 12, struct.pack("<d", 0.5)),
    ]
    return file(settings, [tensor("a.weight", (4, 2)), tensor("b.weight", (8,), 0, 32)][:tensors])
