"""How ranks divide a model among themselves: pure arithmetic on a ModelSpec.

Each part of a layer divides its own weights (PartSpec.shard). Rows of embedding and head are
divided here, as evenly as possible. Norms, and biases of products that are summed over ranks, are
on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from proto.errors import ConfigError
from worker.models.parts import Shard, divide_evenly
from worker.models.spec import LayerSpec, ModelSpec

_NO_BLOCKS: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ModelShard:
    """What one rank computes.

    spec: the model with this rank's part of each layer and the vocabulary of the whole.
    vocab: token ids whose rows of embedding and head the rank holds.
    weights: the shard of each divided weight by its full name; others are held whole.
    """

    spec: ModelSpec
    vocab: range
    weights: Mapping[str, Shard]


def shard_model(
    spec: ModelSpec, size: int, block_columns: Mapping[str, int] = _NO_BLOCKS
) -> tuple[ModelShard, ...]:
    """Return the shard of each of `size` ranks.

    block_columns: columns of a quantisation block of a layer's weights in the file, by the
        weight's name in the layer. Raises ConfigError if there are more ranks than something can
        be divided into.
    """
    parts = (part for layer in spec.layers for part in (layer.mixer, layer.mlp))
    most = min([spec.vocab_size, *(part.max_ranks for part in parts)])
    if size > most:
        raise ConfigError(
            f"--tensor-parallel-size {size}: {spec.architecture} of this size can be shared by "
            f"at most {most} workers"
        )
    vocab = divide_evenly(spec.vocab_size, size)
    return tuple(_shard(spec, rank, size, vocab[rank], block_columns) for rank in range(size))


def _shard(
    spec: ModelSpec, rank: int, size: int, vocab: range, block_columns: Mapping[str, int]
) -> ModelShard:
    rows = Shard(rows=slice(vocab.start, vocab.stop))
    weights = {"embedding.weight": rows, "head.weight": rows}
    layers = []
    for number, layer in enumerate(spec.layers):
        mixer, mixer_shards = layer.mixer.shard(rank, size, block_columns)
        mlp, mlp_shards = layer.mlp.shard(rank, size, block_columns)
        layers.append(LayerSpec(mixer=mixer, mlp=mlp))
        for name, shard in (*mixer_shards.items(), *mlp_shards.items()):
            weights[f"layers.{number}.{name}"] = shard
    return ModelShard(replace(spec, layers=tuple(layers)), vocab, weights)
