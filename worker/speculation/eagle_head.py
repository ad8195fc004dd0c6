"""The heads of EAGLE: one decoder layer that continues the hidden states of the target.

Position i of a head sees the target's hidden state there and the embedding e of token i + 1, and
gives the logits of token i + 2. Its own hidden state is the input of the next position, so that it
can go on without the target:

    EAGLE (Li et al., 2024)        f = the target's state behind its last norm, or the head's own
                                   x = fc(e | f)
                                   own state  y = mlp(attention(x)), logits by the target's head

    EAGLE-3 (Li et al., 2025)      f = fc(three residuals of the target), or the head's own state
                                   x = norm(e) | norm(f)
                                   own state  y = mlp(f + attention(x)), logits by a head of its own

EAGLE-3's own vocabulary may be a part of the target's; d2t says which token each of its ids is.
Embeddings are the target's, without a scale that the target multiplies them by. Start at
`read_head`, which refuses what does not fit the target before a weight is read, and `load_head`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from proto.errors import ModelError
from proto.messages.lifecycle import KVCacheGeometry
from proto.messages.prepared_model import PreparedModel, TensorEntry, TensorIndex
from worker.attention.backend import AttentionBackend
from worker.attention.kv_cache import KVCache, KVLayout, kv_cache_geometry, kv_layout
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.layers.scratch import ByteBuffer
from worker.loader.files import TensorFiles, read_index
from worker.loader.formats import Product, WeightFormat
from worker.loader.source import WeightSource
from worker.loader.weights import DecoderBuilder
from worker.models.attention import Attention, AttentionSpec
from worker.models.common import attention_decoder, llama_attention
from worker.models.config_reader import ConfigReader
from worker.models.decoder import Decoder
from worker.models.layer_device import LayerDevice
from worker.models.layer_stack import DecoderLayer
from worker.models.layout import LayerNorms
from worker.models.parts import ForwardContext, WeightSpec, norm_weights, projection
from worker.models.registry import read_config
from worker.models.rotary import rotate
from worker.models.sharding import shard_model
from worker.models.spec import ModelSpec

D2T: Final = "d2t"
_LAYER: Final = "model.layers.0."
_NUM_RESIDUALS: Final = 3
_MLP_NORM: Final = LayerNorms(mlp=("post_attention_layernorm", ""))
_UNUSED: Final = frozenset({"model.embed_tokens.weight", "t2d"})
"""Copies of the target's embedding, and whether each of its tokens is one of the head's."""


@dataclass(frozen=True, kw_only=True)
class JoinedAttentionSpec(AttentionSpec):
    """Attention whose projections of the input read two vectors of hidden_size, side by side."""

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return tuple(
            replace(weight, shape=(weight.shape[0], 2 * self.hidden_size))
            if weight.name in ("q.weight", "k.weight", "v.weight")
            else weight
            for weight in super().weights
        )


@dataclass(frozen=True, kw_only=True)
class HeadSpec(ModelSpec):
    """A head, as a model of one layer without an embedding.

    residuals: layers of the target before which EAGLE-3 reads the residual; () for EAGLE.
    fc_bias: whether fc has a bias.
    draft_vocab_size: rows of a head of its own; 0 for EAGLE, which has the target's.
    norm_before_residual: EAGLE-3 adds the attention to the norm of f, not to f.
    longest: tokens of a sequence up to which the head was made to be used.
    """

    residuals: tuple[int, ...] = ()
    fc_bias: bool = False
    draft_vocab_size: int = 0
    norm_before_residual: bool = False
    longest: int = 0

    def weights(self) -> dict[str, WeightSpec]:
        """Return every weight by its full name."""
        found, size = super().weights(), self.hidden_size
        del found["embedding.weight"]
        inputs = (len(self.residuals) or 2) * size
        more = list(projection("fc", "fc", "", (size, inputs), self.fc_bias))
        if self.residuals:
            for name, in_file in _INPUT_NORMS.items():
                more += norm_weights(name, _LAYER + in_file, "", size)
            more += projection("head", "lm_head", "", (self.draft_vocab_size, size))
        return found | {weight.name: weight for weight in more}

    @property
    def products(self) -> list[Product]:
        """The products outside the layer."""
        fc = Product(("fc.weight",), ("fc.bias",) if self.fc_bias else ())
        return [fc, Product(("head.weight",))] if self.draft_vocab_size else [fc]

    def cache(self, dtype: torch.dtype) -> tuple[KVLayout, KVCacheGeometry]:
        """Return layout and shape of the head's KV, which has no other window than the target."""
        heads, layout = self.attention_shape, kv_layout((None,))
        return layout, kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, dtype)


_INPUT_NORMS: Final = {"embedding_norm": "input_layernorm", "feature_norm": "hidden_norm"}
"""EAGLE-3's norms of e and f."""


def read_head(
    method: str, prepared: PreparedModel, target: ModelSpec, device: LayerDevice
) -> HeadSpec:
    """Return the spec of a head for a target; reads configuration and headers only.

    method: "eagle" or "eagle3". Raises ModelError for a head that is broken or does not fit the
    target.
    """
    index = read_index(prepared)
    entries = {entry.name: entry for entry in index.tensors}
    config = ConfigReader(read_config(prepared), "config.json")
    spec = _spec_from_config(method, config, entries, target)
    WeightSource(index, spec, torch.float32, device)  # checks names and shapes
    if spec.draft_vocab_size:
        _token_map(index, spec)
    return spec


def _spec_from_config(
    method: str, config: ConfigReader, entries: Mapping[str, TensorEntry], target: ModelSpec
) -> HeadSpec:
    config.get("bias")  # of fc; the tensors say so, too
    config.get("has_own_embed_tokens")
    if not config.flag("use_sliding_window", False):
        for key in ("sliding_window", "max_window_layers"):
            config.get(key)
    bias = config.flag("attention_bias", f"{_LAYER}self_attn.q_proj.bias" in entries)
    is_third = method == "eagle3"
    if is_third != (f"{_LAYER}hidden_norm.weight" in entries):
        kind, right = ("EAGLE", "eagle") if is_third else ("EAGLE-3", "eagle3")
        raise ModelError(f"the head is one of {kind}; its method is {right}")
    residuals: tuple[int, ...] = ()
    if is_third:
        residuals = _residual_layers(config, target.num_layers)
    vocab_size = target.vocab_size
    draft_vocab_size = config.integer("draft_vocab_size", vocab_size, most=vocab_size)
    norm_before_residual = is_third and config.flag("norm_before_residual", False)
    config.must_be("target_hidden_size", target.hidden_size)
    attention = replace(
        llama_attention(config),
        qkv_bias=bias,
        output_bias=f"{_LAYER}self_attn.o_proj.bias" in entries,
    )
    found = replace(
        attention_decoder(config, attention),
        architecture="a head of EAGLE-3" if is_third else "a head of EAGLE",
        norms=_MLP_NORM,
        has_last_norm=is_third,
        has_head=is_third,
        unused_tensors=_UNUSED | {D2T},
    )
    config.refuse_unread_keys()
    if found.num_layers != 1:
        raise config.refusal("num_hidden_layers", found.num_layers, "a head has one layer")
    if found.hidden_size != target.hidden_size:
        raise config.refusal(
            "hidden_size", found.hidden_size, f"that of the model is {target.hidden_size}"
        )
    if found.vocab_size != vocab_size:
        raise config.refusal("vocab_size", found.vocab_size, f"that of the model is {vocab_size}")
    (layer,) = found.layers
    assert isinstance(layer.mixer, AttentionSpec)
    if is_third:
        layer = replace(layer, mixer=JoinedAttentionSpec(**vars(layer.mixer)))
    return HeadSpec(
        **vars(found)
        | {
            "layers": (layer,),
            "max_position": max(found.max_position, target.max_position),
            "tied_embeddings": False,
        },
        residuals=residuals,
        fc_bias="fc.bias" in entries,
        draft_vocab_size=draft_vocab_size if is_third else 0,
        norm_before_residual=norm_before_residual,
        longest=found.max_position,
    )


def _residual_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the layers before which the residual is read.

    Two ways to count are in use: a list that begins with 1 counts layers whose output it means,
    others mean the input of a layer, as the default of the published code does.
    """
    settings = ConfigReader(config.mapping("eagle_config"), "eagle_config in config.json")
    settings.must_be("use_aux_hidden_state", True)
    key = "eagle_aux_hidden_state_layer_ids"
    given = settings.get(key)
    settings.refuse_unread_keys()
    if given is None:
        given = [2, num_layers // 2, num_layers - 3]
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise settings.refusal(key, given, "a list of layers is needed")
    layers = tuple(layer + 1 if given[:1] == [1] else layer for layer in given)
    if len(layers) != _NUM_RESIDUALS or not all(0 <= layer <= num_layers for layer in layers):
        raise settings.refusal(
            key, given, f"{_NUM_RESIDUALS} layers of the model's {num_layers} are needed"
        )
    return layers


def _token_map(index: TensorIndex, spec: HeadSpec) -> torch.Tensor | None:
    """Return the token of each id of the head, int64 [draft_vocab_size]; None if all are equal.

    Raises ModelError if an id is no token of the target.
    """
    entry = next((entry for entry in index.tensors if entry.name == D2T), None)
    if entry is None:
        if spec.draft_vocab_size == spec.vocab_size:
            return None
        raise ModelError(f"tensor {D2T} of shape [{spec.draft_vocab_size}] is missing")
    if entry.type != "I64" or entry.shape != (spec.draft_vocab_size,):
        raise ModelError(
            f"tensor {D2T} has type {entry.type} and shape {list(entry.shape)}, "
            f"the configuration asks for I64 and [{spec.draft_vocab_size}]"
        )
    raw = TensorFiles(index).bytes_at(entry.file, entry.offset, entry.num_bytes)
    tokens = np.frombuffer(raw.tobytes(), dtype="<i8") + np.arange(spec.draft_vocab_size)
    if not ((tokens >= 0) & (tokens < spec.vocab_size)).all():
        raise ModelError(f"tensor {D2T} maps to tokens outside the vocabulary")
    return torch.from_numpy(tokens)


def _builder(
    prepared: PreparedModel,
    spec: HeadSpec,
    dtype: torch.dtype,
    device: LayerDevice,
    weight_format: WeightFormat,
) -> DecoderBuilder:
    source = WeightSource(read_index(prepared), spec, dtype, device)
    shards = shard_model(spec, 1)
    return DecoderBuilder(source, shards, weight_format, folder=prepared.folder)


def head_bytes(
    prepared: PreparedModel,
    spec: HeadSpec,
    dtype: torch.dtype,
    device: LayerDevice,
    weight_format: WeightFormat,
) -> Counter[str]:
    """Return what the head's weights take in memory, by format, without reading them."""
    builder = _builder(prepared, spec, dtype, device, weight_format)
    sizes: Counter[str] = Counter()
    for product in (*builder.products(0), *spec.products):
        sizes += weight_format.product_bytes(builder.source, product)
    return sizes


def load_head(
    prepared: PreparedModel,
    spec: HeadSpec,
    target: Decoder,
    dtype: torch.dtype,
    device: LayerDevice,
    weight_format: WeightFormat,
) -> "EagleHead":
    """Load a head whole, on every rank of the target. dtype: of the target's activations."""
    builder = _builder(prepared, spec, dtype, device, weight_format)
    source = builder.source
    products = [weight_format.read_product(source, each)() for each in spec.products]
    layer = builder.read_layer(0)()
    if not spec.residuals:
        builder.choose_products()
        source.release()
        return EagleHead(
            spec=spec, target=target, layer=layer, fc=products[0], dtype=dtype, device=device
        )
    norms = [device.norm(source.read_norm(name)) for name in (*_INPUT_NORMS, "norm")]
    tokens = _token_map(read_index(prepared), spec)
    builder.choose_products()
    source.release()
    return Eagle3Head(
        spec=spec,
        target=target,
        layer=layer,
        fc=products[0],
        dtype=dtype,
        device=device,
        norms=norms,
        head=products[1],
        tokens=None if tokens is None else tokens.to(device.torch_device),
    )


class EagleHead:
    """A head of EAGLE with its weights.

    fc: from e | f to x. dtype: of the target's activations. tokens: token of the target for each id
    of the head, int64; None if these are the target's ids.
    """

    tokens: torch.Tensor | None = None
    can_be_captured = False
    """Whether a CUDA graph can replay a step: the few kernels of its layer are launched singly."""

    def __init__(
        self,
        spec: HeadSpec,
        target: Decoder,
        layer: DecoderLayer,
        fc: Linear,
        dtype: torch.dtype,
        device: LayerDevice,
    ) -> None:
        assert isinstance(layer.mixer, Attention)
        self.spec = spec
        self.dtype = dtype
        self._target = target
        self._layer = layer
        self._mixer = layer.mixer
        self._fc = fc
        self._stacks = device.layer_stacks((layer,), spec.hidden_size)

    def record_residuals(self, most_tokens: int) -> None:
        """Let the target record what the head reads in each step of at most `most_tokens` tokens.

        EAGLE reads only what every step returns.
        """

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return f [T, H] of the target's last step, in new memory.

        hidden: [T, H], the result of the target's `forward`.
        """
        return self._target.normed(hidden).clone()

    def store(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        slots: torch.Tensor,
    ) -> None:
        """Write K and V of positions whose result is not needed.

        token_ids: those after the positions. All int64 [N] but features [N, H].
        """
        _, x = self._inputs(token_ids, features)
        spec = self._mixer.spec
        heads = self._mixer.qkv(x).view(len(x), -1, spec.head_dim)
        key, value = heads[:, spec.num_heads :].chunk(2, dim=1)
        keys, values = cache.layer_pages(0)
        keys.write(slots, rotate(key, self._mixer.rotary.at(positions)))
        values.write(slots, value)

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Return the head's own states [N, H]: features of the next positions.

        Arguments as for `store`; `attention` has planned these rows.
        """
        x, _ = self._inputs(token_ids, features)
        stack = next(stack for stack in self._stacks if stack.takes(len(x), attention))
        return stack.run(x, positions, attention)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, ids of the head] of the tokens after those of `forward`."""
        return self._target.logits_of_normed(states)

    def _inputs(
        self, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual [N, H], and the input of the attention."""
        embedded = self._target.embed(token_ids)
        x = self._fc(torch.cat((embedded, features), dim=1))
        return x, x


class Eagle3Head(EagleHead):
    """A head of EAGLE-3 with its weights.

    fc: from three residuals to f. norms: of e, of f, and the last one. head: its own.
    """

    def __init__(
        self,
        spec: HeadSpec,
        target: Decoder,
        layer: DecoderLayer,
        fc: Linear,
        dtype: torch.dtype,
        device: LayerDevice,
        *,
        norms: Sequence[Norm],
        head: Linear,
        tokens: torch.Tensor | None,
    ) -> None:
        super().__init__(spec, target, layer, fc, dtype, device)
        self._embedding_norm, self._feature_norm, self._last_norm = norms
        self._head = head
        self._device = device.torch_device
        self.tokens = tokens
        self._residuals = torch.empty(0)
        self._memory = ByteBuffer()

    def record_residuals(self, most_tokens: int) -> None:
        layers = self.spec.residuals
        shape = (len(layers), most_tokens, self.spec.hidden_size)
        self._residuals = torch.zeros(shape, dtype=self.dtype, device=self._device)
        self._target.record_residuals(layers, self._residuals)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        # [layer, token, H] to [token, layer | H]
        return self._fc(self._residuals[:, : len(hidden)].transpose(0, 1).flatten(1))

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        residual, x = self._inputs(token_ids, features)
        context = ForwardContext(positions, attention, self._memory)
        residual = self._mixer.add_to(residual, x, context)
        assert self._layer.mlp_norm is not None
        return self._layer.mlp.add_to(residual, self._layer.mlp_norm(residual), context)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._head(self._last_norm(states))

    def _inputs(
        self, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self._embedding_norm(self._target.embed(token_ids))
        normed = self._feature_norm(features)
        residual = normed if self.spec.norm_before_residual else features
        return residual.clone(), torch.cat((embedded, normed), dim=1)
