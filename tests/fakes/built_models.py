"""Decoders built from tensors in memory, the way the loader builds them from files."""

from collections.abc import Callable, Mapping

import torch

from worker.loader.formats import DenseFormat
from worker.loader.source import WeightSource
from worker.loader.weights import DecoderBuilder
from worker.models.decoder import Decoder
from worker.models.rope import Rope
from worker.models.spec import ModelSpec
from worker.parallel.sharding import shard_model


class TensorSource(WeightSource):
    """Weights by this program's names, made when they are read."""

    def __init__(self, spec: ModelSpec, make: Callable[[str], torch.Tensor]) -> None:
        self._adds_one = spec.norms_add_one
        self._make = make

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensors = [self._make(name) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def read_norm(self, name: str) -> torch.Tensor:
        weight = self._make(name)
        return weight.float() + 1 if self._adds_one else weight

    def scaled_rope(self, rope: Rope) -> Rope:
        return rope


def build_decoder(
    spec: ModelSpec, make: Callable[[str], torch.Tensor], dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Build a decoder with dense weights; make: the tensor of a name, on the device."""
    source = TensorSource(spec, make)
    builder = DecoderBuilder(source, shard_model(spec, 1), DenseFormat(dtype), device)
    layers = [builder.read_layer(layer)() for layer in range(spec.num_layers)]
    return builder.read_ends()(layers)


def shapes_of(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """The shape of every weight by name."""
    return {name: weight.shape for name, weight in spec.weights().items()}
