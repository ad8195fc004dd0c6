"""Builds a Decoder from the files of a prepared model.

Start at load_model. Reader threads take the weights out of the files layer by layer while the
calling thread builds modules of them; at most a few layers exist in both states. How weights are
held in memory is decided by a WeightFormat (formats.py); norms are always dense. Ranks that share a
model each read their own shards.
"""

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NoReturn

import torch

from proto.messages.prepared_model import PreparedModel
from proto.runtime.host_resources import ALLOWED_CPUS
from worker.layers.activation import Activation, is_gated
from worker.layers.adapters import AdapterTargets
from worker.layers.embedding import Embedding, EmbeddingTable, EncoderInput, vocab_parallel_table
from worker.layers.experts import (
    AdaptedExperts,
    DenseExperts,
    ExpertRanks,
    Experts,
    LinearExperts,
)
from worker.layers.linear import Linear, PartOutput, ResidualLinear, VocabParallelHead
from worker.layers.norm import Norm
from worker.loader.files import read_index
from worker.loader.formats import (
    DENSE_NAMES,
    EMBEDDING,
    PACKED,
    DenseFormat,
    ExpertProducts,
    Product,
    WeightFormat,
    head_name,
    read_table,
    table_bytes,
)
from worker.loader.kernel_choices import KernelChoice
from worker.loader.source import WeightSource, block_columns
from worker.models.decoder import Decoder
from worker.models.layer_device import LayerDevice
from worker.models.layer_stack import DecoderLayer
from worker.models.parts import PartReader
from worker.models.rope import Rope
from worker.models.rotary import RotaryEmbedding
from worker.models.sharding import ModelShard, shard_model
from worker.models.spec import ModelSpec
from worker.parallel.group import RankGroup

_READER_THREADS: Final = min(max(2, len(ALLOWED_CPUS)), 8)
"""Threads that read weights: rearranging them for the kernels takes a core per thread."""
_LAYERS_AHEAD: Final = _READER_THREADS + 2
"""Layers read ahead of the one that is built; bounds the memory beside the finished ones."""
_ALONE: Final = RankGroup()


def load_model(
    prepared: PreparedModel,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: LayerDevice,
    progress: Callable[[float], None],
    weight_format: WeightFormat | None = None,
    group: RankGroup = _ALONE,
    adapters: AdapterTargets | None = None,
) -> Decoder:
    """Load a model with activations of `dtype` onto `device`.

    weight_format: of the linear layers and the embedding; None for dense weights.
    group: the ranks that share the model; they need not have met yet. The decoder's spec is that
    of this rank, with the vocabulary of all.
    adapters: gets the products of the model, which ask it in each step; None: there are none.

    `progress` is called from this thread with the finished part, 0 to 1. Every
    tensor of the files is used once; raises ModelError naming the first that is
    missing, unknown, of another shape or of a type that cannot be read.
    """
    builder = create_builder(
        prepared, spec, dtype, device, weight_format or DenseFormat(dtype), group, adapters
    )
    steps = spec.num_layers + 1
    layers: list[DecoderLayer] = []
    with _readers() as pool:
        ends = pool.submit(builder.read_ends)
        for build_layer in _read_in_order(pool, builder.read_layer, spec.num_layers):
            layers.append(build_layer())
            progress(len(layers) / steps)
        build_decoder = ends.result()
    decoder = build_decoder(layers)
    builder.source.release()
    progress(1.0)
    return decoder


def create_builder(
    prepared: PreparedModel,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: LayerDevice,
    weight_format: WeightFormat,
    group: RankGroup = _ALONE,
    adapters: AdapterTargets | None = None,
) -> "DecoderBuilder":
    """Return the builder of a rank's decoder; so far only the headers of the files were read."""
    index = read_index(prepared)
    shards = shard_model(spec, group.size, block_columns(spec, index))
    source = WeightSource(index, spec, dtype, device, shards[group.rank].weights)
    return DecoderBuilder(
        source=source,
        shards=shards,
        weight_format=weight_format,
        group=group,
        folder=prepared.folder,
        adapters=adapters,
    )


class DecoderBuilder:
    """Reads and builds the layers and the ends of one rank's decoder.

    Each `read_…` method runs in any thread and returns a function that builds; the builds run in
    the thread that computes. folder: where times of products are kept. adapters: as in load_model.
    """

    def __init__(
        self,
        source: WeightSource,
        shards: Sequence[ModelShard],
        weight_format: WeightFormat,
        group: RankGroup = _ALONE,
        folder: str = "",
        adapters: AdapterTargets | None = None,
    ) -> None:
        self.source = source
        self.spec = shards[group.rank].spec
        self.weight_format = weight_format
        self.device = source.device
        self.group = group
        self._folder = folder
        self._vocab = [shard.vocab for shard in shards]
        self._rotaries: dict[Rope, RotaryEmbedding] = {}
        self.adapters = adapters
        if adapters is not None:
            for layer in range(self.spec.num_layers):
                adapters.add_products(
                    product.weights
                    for product in self.products(layer)
                    if not (product.is_in_part and adapters.step.changes_layers_only)
                )

    def read_layer(self, layer: int) -> Callable[[], DecoderLayer]:
        """Read one layer: the norms before its parts, and the parts."""
        spec, norms = self.spec.layers[layer], self.spec.norms_of(layer)
        mixer = LayerReader(self, layer, "attention_post_norm" if norms.attention_post else "")
        mlp = LayerReader(self, layer, "mlp_post_norm" if norms.mlp_post else "")
        mixer_norm = mixer.norm("attention_norm") if norms.attention else None
        mlp_norm = mlp.norm("mlp_norm") if norms.mlp else None
        mixer_sum_norm = mixer.norm("attention_sum_norm") if norms.attention_sum else None
        mlp_sum_norm = mlp.norm("mlp_sum_norm") if norms.mlp_sum else None
        build_mixer, build_mlp = spec.mixer.read(mixer), spec.mlp.read(mlp)
        return lambda: DecoderLayer(
            mixer_norm=mixer_norm and mixer_norm(),
            mixer=build_mixer(),
            mlp_norm=mlp_norm and mlp_norm(),
            mlp=build_mlp(),
            is_parallel=self.spec.parallel_blocks,
            mixer_sum_norm=mixer_sum_norm and mixer_sum_norm(),
            mlp_sum_norm=mlp_sum_norm and mlp_sum_norm(),
        )

    def read_ends(self) -> Callable[[Sequence[DecoderLayer]], Decoder]:
        """Read embedding, last norm and head; the returned function puts layers between them."""
        self.source.check_tied_head()
        norm = self.source.read_norm("norm") if self.spec.has_last_norm else None
        build_inputs = self._read_inputs()
        build_ends = self._read_table_and_head()

        def build(layers: Sequence[DecoderLayer]) -> Decoder:
            table, head = build_ends()
            if self.group.size > 1:
                own, num_tokens = self._vocab[self.group.rank], self._vocab[-1].stop
                table = vocab_parallel_table(
                    table, self.group, own, num_tokens, checks_ids=self.device.has_results
                )
                head = head and VocabParallelHead(head, self.group, self._vocab)
            self.choose_products()
            embedding, size = Embedding(table, self.spec.embedding_scale), self.spec.hidden_size
            return Decoder(
                self.spec,
                embedding if build_inputs is None else build_inputs(embedding),
                self.device.layer_stacks(layers, size),
                None if norm is None else self.device.norm(norm),
                head,
                None if self.adapters is None else self.adapters.step,
            )

        return build

    def _read_inputs(self) -> Callable[[Embedding], EncoderInput] | None:
        """Read what an encoder adds to its embedding; None for a decoder."""
        inputs = self.spec.inputs
        if inputs is None:
            return None
        positions, token_types = (
            self.source.read(f"{name}.weight", dtype=torch.float32) if rows else None
            for name, rows in (("positions", inputs.positions), ("token_types", inputs.token_types))
        )
        norm = self.source.read_norm("input_norm")
        return lambda words: EncoderInput(
            words, positions, inputs.first_position, token_types, self.device.norm(norm)
        )

    def choose_products(self) -> list[KernelChoice]:
        """Let the fastest kernels multiply with the weights that were built so far."""
        return self.weight_format.choose_kernels(self.source.dtype, self._folder)

    def _read_table_and_head(self) -> Callable[[], tuple[EmbeddingTable, Linear | None]]:
        """Read embedding and head; of a model without a head only the embedding."""
        if self.spec.has_head:
            return self.weight_format.read_ends(self.source, tied=self.spec.tied_embeddings)
        table = read_table(self.source, self.weight_format.memory)
        return lambda: (table, None)

    def products(self, layer: int) -> list[Product]:
        """Return the products of a layer without reading their weights."""
        listed, spec = ProductList(self, layer), self.spec.layers[layer]
        spec.mixer.read(listed)
        spec.mlp.read(listed)
        return listed.products

    def weight_sizes(self) -> "WeightSizes":
        """Return what the weights will take in memory, without reading them.

        Norms and biases do not count: they are less than a thousandth of the products.
        """
        source, weight_format, is_tied = self.source, self.weight_format, self.spec.tied_embeddings
        by_format = Counter(
            weight_format.ends_bytes(source, tied=is_tied)
            if self.spec.has_head
            else table_bytes(source)
        )
        own_table = table_bytes(source)
        if self.spec.has_head and is_tied:
            own_table.clear()
        table = source.joined_shape(EMBEDDING)
        head = head_name(tied=is_tied)
        rearranged = self.spec.has_head and source.is_joined(head)
        ends = conversion_bytes(by_format, table, source.dtype, rearranged)
        layers = 0
        for layer in range(self.spec.num_layers):
            for product in self.products(layer):
                size = weight_format.product_bytes(source, product)
                by_format += size
                shape = source.joined_shape(*product.weights)
                rearranged = any(map(source.is_joined, product.weights))
                taken = conversion_bytes(size, shape, source.dtype, rearranged)
                layers = max(layers, taken)
        products = by_format - own_table
        shared = sum(products[form] for form in weight_format.shared_forms)
        return WeightSizes(by_format, ends + layers, shared)

    def rotary(self, rope: Rope, head_dim: int, rotary_dim: int) -> RotaryEmbedding:
        """Return the rotary embedding, one for all layers with the same rope."""
        scaled = self.source.scaled_rope(rope)
        if scaled not in self._rotaries:
            self._rotaries[scaled] = RotaryEmbedding(
                scaled, head_dim, self.spec.max_position, self.device.torch_device, rotary_dim
            )
        return self._rotaries[scaled]


class LayerReader(PartReader):
    """Reads the weights of one part of a layer from the files.

    post_norm: the norm of what the part adds to the residual; "" if there is none.
    """

    def __init__(self, builder: DecoderBuilder, layer: int, post_norm: str) -> None:
        self.layer = layer
        self.cache_layer = builder.spec.cache_layer(layer)
        self.state_layer = builder.spec.state_layer(layer)
        self.device = builder.device
        self._builder = builder
        self._post_norm = post_norm
        part = builder.spec.layers[layer]
        weights = (*part.mixer.weights, *part.mlp.weights)
        self._names = {weight.name for weight in weights}

    def linear(self, *names: str) -> Callable[[], Linear]:
        return self._read_product(names, with_bias=True)

    def head_linear(self, name: str) -> Callable[[], Linear]:
        product = replace(self._product((name,), with_bias=True), is_one_head=True)
        return self._read(product)

    def summed_linear(self, name: str) -> Callable[[], Linear]:
        return self._read_product((name,), with_bias=self._builder.group.rank == 0)

    def experts(
        self,
        numbers: range,
        activation: Activation,
        *,
        total: int,
        row_fraction: float,
        are_whole: bool,
    ) -> Callable[[], Experts]:
        adds_bias = are_whole or self._builder.group.rank == 0

        def products(*names: str, with_bias: bool) -> tuple[Product, ...]:
            of_experts = ([f"experts.{number}.{name}" for name in names] for number in numbers)
            each = (self._product(own, with_bias, row_fraction) for own in of_experts)
            return tuple(replace(product, is_expert=True) for product in each)

        inputs = ("gate", "up") if is_gated(activation) else ("up",)
        gate_up = products(*inputs, with_bias=True)
        down = products("down", with_bias=adds_bias)
        group = self._builder.group
        ranks = ExpertRanks(total, numbers.start, group.rank, group.size, are_whole)
        return self._read_experts(ExpertProducts(gate_up, down, activation, ranks))

    def output_linear(self, name: str) -> Callable[[], ResidualLinear]:
        build, build_output = self.summed_linear(name), self.output()
        return lambda: ResidualLinear(build(), build_output())

    def output(self) -> Callable[[], PartOutput]:
        norm = self.norm(self._post_norm) if self._post_norm else None
        group = self._builder.group
        return lambda: PartOutput(group, norm and norm())

    def norm(self, name: str) -> Callable[[], Norm]:
        weight = self._builder.source.read_norm(self._full_name(name))
        return lambda: self.device.norm(weight)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._builder.source.read(self._full_name(name), dtype=dtype)

    def rotary(self, rope: Rope, head_dim: int, rotary_dim: int) -> RotaryEmbedding:
        return self._builder.rotary(rope, head_dim, rotary_dim)

    def _read_product(self, names: Sequence[str], with_bias: bool) -> Callable[[], Linear]:
        return self._read(self._product(names, with_bias))

    def _read(self, product: Product) -> Callable[[], Linear]:
        build = self._builder.weight_format.read_product(self._builder.source, product)
        adapters = self._builder.adapters
        if adapters is None or not adapters.has_product(product.weights):
            return build
        return lambda: adapters.adapted(build(), product.weights)

    def _read_experts(self, experts: ExpertProducts) -> Callable[[], Experts]:
        build = self._builder.weight_format.read_experts(self._builder.source, experts)
        adapters = self._builder.adapters
        if adapters is None or adapters.step.changes_layers_only:
            return build
        numbers = [
            (adapters.number(gate_up.weights), adapters.number(down.weights))
            for gate_up, down in zip(experts.gate_up, experts.down, strict=True)
        ]

        def build_adapted() -> Experts:
            base = build()
            assert isinstance(base, DenseExperts | LinearExperts), "adapters are refused elsewhere"
            return AdaptedExperts(base, adapters.step, numbers)

        return build_adapted

    def _product(self, names: Sequence[str], with_bias: bool, row_fraction: float = 1.0) -> Product:
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self._names]
        return Product(
            tuple(self._full_name(f"{name}.weight") for name in names),
            tuple(map(self._full_name, biases)) if with_bias else (),
            row_fraction,
        )

    def _full_name(self, name: str) -> str:
        return f"layers.{self.layer}.{name}"


class ProductList(LayerReader):
    """Lists the products that a part of a layer would read; the results must not be called."""

    def __init__(self, builder: DecoderBuilder, layer: int) -> None:
        super().__init__(builder, layer, "")
        self.products: list[Product] = []

    def norm(self, name: str) -> Callable[[], Norm]:
        return _build_nothing

    def _read(self, product: Product) -> Callable[[], Linear]:
        self.products.append(product)
        return _build_nothing

    def _read_experts(self, experts: ExpertProducts) -> Callable[[], Experts]:
        self.products += (*experts.gate_up, *experts.down)
        return _build_nothing

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(0)


def _build_nothing() -> NoReturn:
    raise AssertionError("this part of a layer was not read")


@dataclass(frozen=True)
class WeightSizes:
    """Memory of a rank's weights in bytes.

    conversion: beside the weights while they are read: one reader converts the embedding, the other
    a product of a layer. shared: those of by_format that several workers can have in one memory.
    """

    by_format: Counter[str]
    conversion: int
    shared: int


def conversion_bytes(
    size: Counter[str], shape: tuple[int, int], dtype: torch.dtype, rearranged: bool = False
) -> int:
    """Return the memory that loading a product takes besides the product, in bytes.

    Loading reads the numbers of a product and then builds it: in `dtype` for a dense one, in
    float32 for one that is quantised here. Blocks of a file are used as they are and take none,
    unless they are `rearranged` from several tensors.

    size: bytes of the product, by format.
    """
    if size.keys() <= {PACKED}:
        return size.total() if rearranged else 0
    is_dense = size.keys() <= set(DENSE_NAMES.values())
    return math.prod(shape) * (dtype if is_dense else torch.float32).itemsize


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
