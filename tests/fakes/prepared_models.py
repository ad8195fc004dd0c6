"""Models for tests: folders prepared without `deploy`, decoders made of tensors in memory."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from deploy.models import gguf_file
from deploy.models.quantised_folder import CONFIG_KEYS, join_parts, read_scheme
from proto.codec import encode
from proto.messages.prepared_model import PreparedModel, TensorEntry, TensorIndex, TensorPart
from worker.device import Device
from worker.layers.adapters import AdapterTargets
from worker.layers.norm import NormWeight
from worker.loader.formats import DenseFormat
from worker.loader.source import WeightSource
from worker.loader.weights import DecoderBuilder
from worker.models.decoder import Decoder
from worker.models.registry import read_config, spec_from_config
from worker.models.rope import Rope
from worker.models.sharding import shard_model
from worker.models.spec import ModelSpec


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
        "weights_sample": "0" * 64,
    }
    return PreparedModel(**(values | fields))


def prepare_checkpoint(checkpoint: Path, folder: Path) -> PreparedModel:
    """A prepared model from a transformers checkpoint of one or more safetensors files."""
    config = json.loads((checkpoint / "config.json").read_text())
    index = safetensors_index(*sorted(checkpoint.glob("*.safetensors")), config=config)
    for key in CONFIG_KEYS:
        config.pop(key, None)
    return prepare(folder, config, index)


def prepared_file(path: Path) -> PreparedModel:
    """Return a prepared model from a GGUF file, whose metadata tells its configuration."""
    contents = gguf_file.read(str(path), lambda what: None)
    return prepare(path.parent / "prepared", dict(contents.config), contents.tensors)


def safetensors_index(
    *paths: Path, config: Mapping[str, Any] = MappingProxyType({})
) -> TensorIndex:
    """The tensors of safetensors files, from their headers. config: says how they are quantised."""
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

    def read_bytes(part: TensorPart) -> bytes:
        return paths[part.file].read_bytes()[part.offset :][: part.num_bytes]

    joined = join_parts(read_scheme(config), entries, read_bytes)
    return TensorIndex("safetensors", tuple(map(str, paths)), joined)


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


class TensorSource(WeightSource):
    """Weights from `make`, by tokend's names, created when the loader reads them."""

    def __init__(
        self,
        spec: ModelSpec,
        make: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.torch_device = device.torch_device
        self._model = spec
        self._make = make

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensors = [self._make(name) for name in names]
        result = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return result if dtype is None else result.to(dtype)

    def read_norm(self, name: str) -> NormWeight:
        spec, weight = self._model, self._make(f"{name}.weight")
        bias = self._make(f"{name}.bias") if spec.norm_bias else None
        weight = weight.float() + 1 if spec.norms_add_one else weight
        return NormWeight(weight, spec.norm_eps, spec.norm_type == "layer", bias)

    def read_rows(self, name: str, dtype: torch.dtype | None = None) -> Any:
        return self.read(name), None

    def prefetch(self, name: str) -> None:
        """There is no file."""

    def type_of(self, name: str) -> str:
        return "made in memory"

    def has_factors(self, name: str) -> bool:
        return False

    def check_tied_head(self) -> None:
        """There is no file with a second head."""

    def scaled_rope(self, rope: Rope) -> Rope:
        return rope


def build_decoder(
    spec: ModelSpec,
    make: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    device: Device,
    adapters: AdapterTargets | None = None,
) -> Decoder:
    """Build a decoder with dense weights as the loader does. make: returns the weight of a name."""
    source = TensorSource(spec, make, dtype, device)
    builder = DecoderBuilder(source, shard_model(spec, 1), DenseFormat(dtype), adapters=adapters)
    layers = [builder.read_layer(layer)() for layer in range(spec.num_layers)]
    return builder.read_ends()(layers)


def shapes_of(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every weight by name."""
    return {name: weight.shape for name, weight in spec.weights().items()}


def spec_of(prepared: PreparedModel) -> ModelSpec:
    return spec_from_config(read_config(prepared))
