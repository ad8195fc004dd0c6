"""Puts the weights of a prepared model into a Decoder.

Threads take tensors apart layer by layer, while the calling thread reorders the
finished layers into the form that the device multiplies; at most a few layers
exist in both forms.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import torch

from proto.prepared_model import PreparedModel
from worker.layers.embedding import Embedding
from worker.layers.linear import Linear, make_linear
from worker.layers.norm import RMSNorm
from worker.layers.residual import Addition, NormedAddition
from worker.layers.rotary import RotaryEmbedding
from worker.loader.index import read_index
from worker.loader.source import WeightSource
from worker.models.decoder import Decoder, LayerWeights
from worker.models.spec import ModelSpec, layer_parameter_shapes

_READER_THREADS: Final = 2
_LAYERS_AHEAD: Final = 4
"""Layers read before their turn; bounds the memory beside the finished ones."""
_FUSED: Final = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}

Tensors = dict[str, torch.Tensor]


def load_model(
    prepared: PreparedModel,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> Decoder:
    """The model with weights and activations in `dtype` on `device`.

    `progress` is called from this thread with the finished part, 0 to 1. Every
    tensor of the files is used once; raises ModelError naming the first that is
    missing, unknown, of another shape or of a type that cannot be read.
    """
    source = WeightSource(read_index(prepared), spec, dtype, device)
    rotaries = {
        rope: RotaryEmbedding(rope, spec.head_dim, spec.max_position, device)
        for rope in dict.fromkeys(source.ropes)
    }
    steps = spec.num_layers + 1
    layers: list[LayerWeights] = []
    with _readers() as pool:
        ends = pool.submit(_read_ends, source, spec)
        for tensors in _layers_in_order(pool, source, spec):
            layers.append(_layer(tensors, spec, rotaries[source.ropes[len(layers)]]))
            progress(len(layers) / steps)
        top = ends.result()
    embedding = top["embedding.weight"]
    decoder = Decoder(
        spec,
        Embedding(embedding, spec.embedding_scale),
        layers,
        RMSNorm(top["norm.weight"], spec.norm_eps),
        make_linear(top.get("head.weight", embedding)),
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
        with ThreadPoolExecutor(
            _READER_THREADS, "load", initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)


def _layers_in_order(
    pool: ThreadPoolExecutor, source: WeightSource, spec: ModelSpec
) -> Iterator[Tensors]:
    """The tensors of layer 0, 1, …, read a few layers ahead."""
    ahead: deque[Future[Tensors]] = deque()
    for layer in range(spec.num_layers):
        ahead.append(pool.submit(_read_layer, source, spec, layer))
        if len(ahead) > _LAYERS_AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _read_ends(source: WeightSource, spec: ModelSpec) -> Tensors:
    names = ["embedding.weight"] if spec.tied_embeddings else ["embedding.weight", "head.weight"]
    ends = {name: source.read(name) for name in names}
    return ends | {"norm.weight": source.read_norm("norm.weight")}


def _read_layer(source: WeightSource, spec: ModelSpec, layer: int) -> Tensors:
    """The tensors of one layer; those that one product serves are joined."""
    groups: dict[str, list[str]] = {}
    for name in layer_parameter_shapes(spec):
        part, kind = name.split(".")
        groups.setdefault(f"{_FUSED.get(part, part)}.{kind}", []).append(f"layers.{layer}.{name}")
    return {
        group: source.read_norm(*names) if group.endswith("norm.weight") else source.read(*names)
        for group, names in groups.items()
    }


def _layer(tensors: Tensors, spec: ModelSpec, rotary: RotaryEmbedding) -> LayerWeights:
    def linear(part: str) -> Linear:
        return make_linear(tensors[f"{part}.weight"], tensors.get(f"{part}.bias"))

    def norm(part: str) -> RMSNorm:
        return RMSNorm(tensors[f"{part}.weight"], spec.norm_eps)

    def end(part: str, block: str) -> Addition:
        product = linear(part)
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
