"""Builds a Decoder from the files of a prepared model.

Start at load_model. Reader threads take the weights out of the files layer by layer while the
calling thread builds modules of them; at most a few layers exist in both states. How weights are
held in memory is decided by a WeightFormat (formats.py); norms are always dense. Ranks that share a
model each read their own shards.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from proto.host_resources import ALLOWED_CPUS
from proto.prepared_model import PreparedModel
from worker.layers.embedding import Embedding, VocabParallelTable
from worker.layers.linear import Linear, PartOutput, ResidualLinear, VocabParallelHead
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryEmbedding
from worker.loader.files import read_index
from worker.loader.formats import DenseFormat, Ends, Product, WeightFormat
from worker.loader.source import WeightSource, block_columns
from worker.models.decoder import Decoder
from worker.models.kernel_stack import make_stacks
from worker.models.layer_stack import DecoderLayer
from worker.models.rope import Rope
from worker.models.spec import ModelSpec
from worker.parallel.group import RankGroup
from worker.parallel.sharding import ModelShard, shard_model

_READER_THREADS: Final = 2
_LAYERS_AHEAD: Final = 4
"""Layers read ahead of the one that is built; bounds the memory beside the finished ones."""
_ALONE: Final = RankGroup()


def load_model(
    prepared: PreparedModel,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
    weight_format: WeightFormat | None = None,
    group: RankGroup = _ALONE,
) -> Decoder:
    """Load a model with activations of `dtype` onto `device`.

    weight_format: of the linear layers and the embedding; None for dense weights.
    group: the ranks that share the model; they need not have met yet. The decoder's spec is that
    of this rank, with the vocabulary of all.

    `progress` is called from this thread with the finished part, 0 to 1. Every
    tensor of the files is used once; raises ModelError naming the first that is
    missing, unknown, of another shape or of a type that cannot be read.
    """
    index = read_index(prepared)
    shards = shard_model(spec, group.size, block_columns(spec, index))
    source = WeightSource(index, spec, dtype, device, shards[group.rank].weights)
    builder = DecoderBuilder(source, shards, weight_format or DenseFormat(dtype), device, group)
    steps = spec.num_layers + 1
    layers: list[DecoderLayer] = []
    with _readers() as pool:
        ends = pool.submit(builder.read_ends)
        for build_layer in _read_in_order(pool, builder.read_layer, spec.num_layers):
            layers.append(build_layer())
            progress(len(layers) / steps)
        build_decoder = ends.result()
    decoder = build_decoder(layers)
    progress(1.0)
    return decoder


class DecoderBuilder:
    """Reads and builds the layers and the ends of one rank's decoder.

    Each `read_…` method runs in any thread and returns a function that builds; the builds run in
    the thread that computes.
    """

    def __init__(
        self,
        source: WeightSource,
        shards: Sequence[ModelShard],
        weight_format: WeightFormat,
        device: torch.device,
        group: RankGroup = _ALONE,
    ) -> None:
        self.source = source
        self.spec = shards[group.rank].spec
        self.weight_format = weight_format
        self.device = device
        self.group = group
        self._vocab = [shard.vocab for shard in shards]
        self._rotaries: dict[Rope, RotaryEmbedding] = {}

    def read_layer(self, layer: int) -> Callable[[], DecoderLayer]:
        """Read one layer: a norm before each part, and the parts."""
        spec, mixer, mlp = (
            self.spec.layers[layer],
            LayerReader(self, layer, "attention_post_norm"),
            LayerReader(self, layer, "mlp_post_norm"),
        )
        mixer_norm, mlp_norm = mixer.norm("attention_norm"), mlp.norm("mlp_norm")
        build_mixer, build_mlp = spec.mixer.read(mixer), spec.mlp.read(mlp)
        return lambda: DecoderLayer(mixer_norm(), build_mixer(), mlp_norm(), build_mlp())

    def read_ends(self) -> Callable[[Sequence[DecoderLayer]], Decoder]:
        """Read embedding, last norm and head; the returned function puts layers between them."""
        embedding = "embedding.weight"
        names = Ends(embedding, embedding if self.spec.tied_embeddings else "head.weight")
        norm = self.source.read_norm("norm.weight")
        build_ends = self.weight_format.read_ends(self.source, names)

        def build(layers: Sequence[DecoderLayer]) -> Decoder:
            table, head = build_ends()
            if self.group.size > 1:
                own, num_tokens = self._vocab[self.group.rank], self._vocab[-1].stop
                table = VocabParallelTable(table, self.group, own, num_tokens)
                head = VocabParallelHead(head, self.group, self._vocab)
            return Decoder(
                self.spec,
                Embedding(table, self.spec.embedding_scale),
                make_stacks(layers, self.spec.hidden_size),
                RMSNorm(norm, self.spec.norm_eps),
                head,
            )

        return build

    def rotary(self, rope: Rope, head_dim: int) -> RotaryEmbedding:
        """Return the rotary embedding, one for all layers with the same rope."""
        scaled = self.source.scaled_rope(rope)
        if scaled not in self._rotaries:
            self._rotaries[scaled] = RotaryEmbedding(
                scaled, head_dim, self.spec.max_position, self.device
            )
        return self._rotaries[scaled]


class LayerReader:
    """Reads the weights of one part of a layer, by their names in the layer.

    The methods that read run in a reader thread; the functions that they return build modules in
    the thread that computes.
    """

    def __init__(self, builder: DecoderBuilder, layer: int, post_norm: str) -> None:
        self.layer = layer
        self.device = builder.device
        self._builder = builder
        self._post_norm = post_norm
        part = builder.spec.layers[layer]
        weights = (*part.mixer.weights, *part.mlp.weights)
        self._names = {weight.name for weight in weights}

    def linear(self, *names: str) -> Callable[[], Linear]:
        """Read `NAME.weight`, one below the other, as one product, with their biases if any."""
        return self._read_product(names, with_bias=True)

    def output_linear(self, name: str) -> Callable[[], ResidualLinear]:
        """Read the product that ends the part; of several ranks only the first adds the bias."""
        build = self._read_product((name,), with_bias=self._builder.group.rank == 0)
        build_output = self.output()
        return lambda: ResidualLinear(build(), build_output())

    def output(self) -> Callable[[], PartOutput]:
        """Read what follows a part that does not end with a single product."""
        norm = self.norm(self._post_norm) if self._builder.spec.post_norms else None
        group = self._builder.group
        return lambda: PartOutput(group, norm and norm())

    def norm(self, name: str) -> Callable[[], RMSNorm]:
        """Read the weight of a norm."""
        weight = self._builder.source.read_norm(self._full_name(f"{name}.weight"))
        eps = self._builder.spec.norm_eps
        return lambda: RMSNorm(weight, eps)

    def tensor(self, name: str) -> torch.Tensor:
        """Read this rank's shard of a weight as a dense tensor, for example a router's."""
        return self._builder.source.read(self._full_name(name))

    def rotary(self, rope: Rope, head_dim: int) -> RotaryEmbedding:
        """Return the rotary embedding; call it while building, not while reading."""
        return self._builder.rotary(rope, head_dim)

    def _read_product(self, names: Sequence[str], with_bias: bool) -> Callable[[], Linear]:
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self._names]
        product = Product(
            tuple(self._full_name(f"{name}.weight") for name in names),
            tuple(map(self._full_name, biases)) if with_bias else (),
        )
        return self._builder.weight_format.read_product(self._builder.source, product)

    def _full_name(self, name: str) -> str:
        return f"layers.{self.layer}.{name}"


@contextmanager
def _readers() -> Iterator[ThreadPoolExecutor]:
    """Threads that read, each of which runs torch on itself alone.

    Every thread would bring a team of OpenMP threads of its own, and these spin.
    The number is set per thread, but what new threads begin with is set for all.
    """
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(_READER_THREADS, "load", initializer=_be_reader) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)


def _be_reader() -> None:
    """One thread of torch, on any core: that of the thread it comes from is one of the team's."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, ALLOWED_CPUS)


def _read_in_order(
    pool: ThreadPoolExecutor,
    read_layer: Callable[[int], Callable[[], DecoderLayer]],
    num_layers: int,
) -> Iterator[Callable[[], DecoderLayer]]:
    """Yield what builds layer 0, 1, …, read a few layers ahead."""
    ahead: deque[Future[Callable[[], DecoderLayer]]] = deque()
    for layer in range(num_layers):
        ahead.append(pool.submit(partial(read_layer, layer)))
        if len(ahead) > _LAYERS_AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()
