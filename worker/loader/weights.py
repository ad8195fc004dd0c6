"""Puts the weights of a prepared model into a Decoder.

Threads take tensors out of the files layer by layer, while the calling thread makes
products of them; at most a few layers exist in both states. What form the weights of
products have is forms.py's business; norms are always dense. Where ranks share the model, each
reads its own pieces, and layers that need the others are put around its products.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from proto.host_resources import ALLOWED_CPUS
from proto.prepared_model import PreparedModel
from worker.layers.embedding import Embedding, Table
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.residual import NormedAddition, ResidualLinear
from worker.layers.rotary import RotaryEmbedding
from worker.layers.shared_linear import GatheredHead, SharedTable, SummedLinear
from worker.loader.forms import DenseForm, Ends, FinishEnds, FinishProduct, Product, WeightForm
from worker.loader.index import read_index
from worker.loader.pieces import pieces, shares_of
from worker.loader.source import WeightSource
from worker.models.decoder import Decoder
from worker.models.kernel_stack import make_stacks
from worker.models.layer_stack import LayerWeights
from worker.models.spec import ModelSpec, layer_parameter_shapes
from worker.parallel.group import RankGroup
from worker.parallel.shares import Share

_READER_THREADS: Final = 2
_LAYERS_AHEAD: Final = 4
"""Layers read before their turn; bounds the memory beside the finished ones."""
_PRODUCTS: Final = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""The weights of a layer that are multiplied as one."""
_SUMMED: Final = ("o", "down")
"""Products whose columns are divided among ranks."""
_SINGLE_RANK: Final = RankGroup()


@dataclass(frozen=True)
class LayerParts:
    """A layer out of the files: norms as they are used, products that are still to be made."""

    norms: dict[str, torch.Tensor]
    products: dict[str, FinishProduct]


def load_model(
    prepared: PreparedModel,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
    form: WeightForm | None = None,
    group: RankGroup = _SINGLE_RANK,
) -> Decoder:
    """The model with activations in `dtype` on `device`, its weights in `form` (else dense).

    group: the ranks that share it, who need not have met yet. The decoder's spec is that of
    this rank, with the vocabulary of all.

    `progress` is called from this thread with the finished part, 0 to 1. Every
    tensor of the files is used once; raises ModelError naming the first that is
    missing, unknown, of another shape or of a type that cannot be read.
    """
    index = read_index(prepared)
    shares = shares_of(spec, index, group.size)
    own = shares[group.rank]
    source = WeightSource(index, spec, dtype, device, pieces(spec, own))
    chosen = form or DenseForm(dtype)
    rotaries = {
        rope: RotaryEmbedding(rope, spec.head_dim, spec.max_position, device)
        for rope in dict.fromkeys(source.ropes)
    }
    steps = spec.num_layers + 1
    layers: list[LayerWeights] = []
    with _readers() as pool:
        ends = pool.submit(_read_ends, source, spec, chosen)
        for parts in _layers_in_order(pool, source, spec, chosen, group.rank):
            layers.append(_layer(parts, spec, rotaries[source.ropes[len(layers)]], group))
            progress(len(layers) / steps)
        norm, finish_ends = ends.result()
    table, head = _of_all(*finish_ends(), group, shares)
    decoder = Decoder(
        own.spec(spec),
        Embedding(table, spec.embedding_scale),
        make_stacks(own.spec(spec), layers),
        RMSNorm(norm, spec.norm_eps),
        head,
    )
    progress(1.0)
    return decoder


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


def _of_all(
    table: Table, head: Linear, group: RankGroup, shares: Sequence[Share]
) -> tuple[Table, Linear]:
    """Embedding and head of all tokens, from those that this rank has."""
    if group.size == 1:
        return table, head
    vocab = [share.vocab for share in shares]
    num_tokens = vocab[-1].stop
    return (
        SharedTable(table, group, vocab[group.rank], num_tokens),
        GatheredHead(head, group, vocab),
    )


def _layers_in_order(
    pool: ThreadPoolExecutor, source: WeightSource, spec: ModelSpec, form: WeightForm, rank: int
) -> Iterator[LayerParts]:
    """The parts of layer 0, 1, …, read a few layers ahead."""
    ahead: deque[Future[LayerParts]] = deque()
    for layer in range(spec.num_layers):
        ahead.append(pool.submit(_read_layer, source, spec, form, layer, rank))
        if len(ahead) > _LAYERS_AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _read_ends(
    source: WeightSource, spec: ModelSpec, form: WeightForm
) -> tuple[torch.Tensor, FinishEnds]:
    """What the last norm multiplies by; embedding and head, still to be made."""
    embedding = "embedding.weight"
    ends = Ends(embedding, embedding if spec.tied_embeddings else "head.weight")
    return source.read_norm("norm.weight"), form.read_ends(source, ends)


def _read_layer(
    source: WeightSource, spec: ModelSpec, form: WeightForm, layer: int, rank: int
) -> LayerParts:
    """One layer; weights that one product serves are joined."""
    names = {name: f"layers.{layer}.{name}" for name in layer_parameter_shapes(spec)}

    def product(parts: tuple[str, ...]) -> Product:
        weights, biases = (
            tuple(names[f"{part}.{kind}"] for part in parts if f"{part}.{kind}" in names)
            for kind in ("weight", "bias")
        )
        # of several summands one has the bias
        is_summand = parts[0] in _SUMMED
        return Product(weights, () if is_summand and rank > 0 else biases)

    return LayerParts(
        {
            name.removesuffix(".weight"): source.read_norm(full)
            for name, full in names.items()
            if name.endswith("norm.weight")
        },
        {name: form.read_product(source, product(parts)) for name, parts in _PRODUCTS.items()},
    )


def _layer(
    parts: LayerParts, spec: ModelSpec, rotary: RotaryEmbedding, group: RankGroup
) -> LayerWeights:
    def linear(part: str) -> Linear:
        return parts.products[part]()

    def norm(part: str) -> RMSNorm:
        return RMSNorm(parts.norms[part], spec.norm_eps)

    def end(part: str, block: str) -> ResidualLinear:
        product = linear(part)
        if group.size > 1:
            product = SummedLinear(product, group)
        return NormedAddition(product, norm(f"{block}_post_norm")) if spec.post_norms else product

    return LayerWeights(
        attention_norm=norm("attention_norm"),
        qkv=linear("qkv"),
        head_norms=(norm("q_norm"), norm("k_norm")) if spec.qk_norm else (),
        rotary=rotary,
        output=end("o", "attention"),
        mlp_norm=norm("mlp_norm"),
        gate_up=linear("gate_up"),
        down=end("down", "mlp"),
    )
