"""Prepared model folders made from model files, without `deploy`."""

import json
import struct
from pathlib import Path
from typing import Any

import msgspec

from proto.codec import encode
from proto.prepared_model import PreparedModel, TensorEntry, TensorIndex


def prepare(
    folder: Path, config: dict[str, Any], index: TensorIndex, **fields: Any
) -> PreparedModel:
    """Write config.json and tensors.msgpack and describe them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tensors.msgpack").write_bytes(encode(index))
    values: dict[str, Any] = {
        "folder": str(folder),
        "name": folder.name,
        "source": str(folder),
        "architecture": config["architectures"][0],
        "vocab_size": config["vocab_size"],
        "max_position": config["max_position_embeddings"],
        "weights_sha256": "0" * 64,
    }
    return PreparedModel(**(values | fields))


def prepare_checkpoint(checkpoint: Path, folder: Path) -> PreparedModel:
    """A prepared model from a transformers checkpoint of one or more safetensors files."""
    config = json.loads((checkpoint / "config.json").read_text())
    return prepare(folder, config, safetensors_index(*sorted(checkpoint.glob("*.safetensors"))))


def safetensors_index(*paths: Path) -> TensorIndex:
    """The tensors of safetensors files, from their headers."""
    entries = []
    for number, path in enumerate(paths):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = msgspec.json.decode(file.read(length))
        for name, each in header.items():
            if name != "__metadata__":
                begin, end = each["data_offsets"]
                shape = tuple(each["shape"])
                start = 8 + length + begin
                entries.append(TensorEntry(name, each["dtype"], shape, number, start, end - begin))
    return TensorIndex("safetensors", tuple(map(str, paths)), tuple(entries))


def gguf_index(path: Path) -> TensorIndex:
    """The tensors of a GGUF file, through the gguf package's reader."""
    from gguf import GGUFReader

    entries = [
        TensorEntry(
            tensor.name,
            tensor.tensor_type.name,
            tuple(int(each) for each in reversed(tensor.shape)),
            0,
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in GGUFReader(path).tensors
    ]
    return TensorIndex("gguf", (str(path),), tuple(entries))
