"""The arithmetic of a model: ModelSpec, which a family makes of its config.json.

The decoder, the loader and the sharding over ranks read nothing else. What is inside a layer is
described by its parts (parts.py); embedding, norms and head belong to the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal, TypeGuard

from proto.errors import ConfigError
from proto.messages.lifecycle import ComputeShape
from proto.messages.pooling import Pooler
from worker.attention.backend import AttentionShape
from worker.attention.kv_cache import StateShape
from worker.models.attention import AttentionSpec
from worker.models.composite import NoPartSpec
from worker.models.latent_attention import LatentAttentionSpec
from worker.models.layout import PRE_NORMS, LayerNorms
from worker.models.moe import MoeSpec
from worker.models.parts import PartSpec, WeightSpec, norm_weights, projection
from worker.models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: a mixer, through which tokens see each other, and an MLP for each token alone."""

    mixer: PartSpec
    mlp: PartSpec


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """What an encoder adds to the embedding of each token, and the norm of the sum.

    positions: rows of the table of positions, of which token 0 has row `first_position`; 0: there
        is no such table. token_types: rows of the table of token types.
    """

    positions: int = 0
    first_position: int = 0
    token_types: int = 0

    def weights(self, hidden_size: int, norm_bias: bool) -> list[WeightSpec]:
        """Return the tables and the norm, with the names before `ModelSpec.hugging_face_names`."""
        tables = {
            "positions": ("position_embd", self.positions),
            "token_types": ("token_types", self.token_types),
        }
        norm = "input_norm", "model.input_norm", "token_embd_norm"
        return [
            *(
                weight
                for name, (gguf, rows) in tables.items()
                if rows
                for weight in projection(name, f"model.{name}", gguf, (rows, hidden_size))
            ),
            *norm_weights(*norm, hidden_size, norm_bias),
        ]


NO_ATTENTION: Final = AttentionShape(1, 1, 8, 1.0)
"""The smallest heads that kernels take: of blocks that no layer reads or writes."""


def _keeps_kv(mixer: PartSpec) -> TypeGuard[AttentionSpec | LatentAttentionSpec]:
    return isinstance(mixer, AttentionSpec | LatentAttentionSpec)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only model, or an encoder.

    architecture: the family, e.g. "LlamaForCausalLM".
    max_position: positions that the model was made for.
    layers: bottom to top; they may differ.
    inputs: of an encoder, beside the embedding of its tokens; None for others.
    norms: where each layer has norms. skips_first_norm: but not before the first attention.
    has_last_norm: whether there is a norm after the last layer.
    norm_type: RMSNorm or LayerNorm, the last norm's too.
    norm_bias: LayerNorms have a bias.
    norms_add_one: norms multiply by 1 + weight; a GGUF file stores the sum.
    parallel_blocks: the MLP reads what the mixer reads, the norm of the residual before both.
    embedding_scale: factor of the embedding, not of a tied head.
    logit_scale: factor of the logits.
    num_unused_layers: layers above the last one whose weights files have and nothing reads.
    has_head: whether it has logits. unused_tensors: names of tensors that are no part of it, which
        files may have: those of a pooler. unused_prefixes: the same by how their names in Hugging
        Face folders begin.
    hugging_face_names: parts of the names of Llama's tensors, and what is in their place in
        Hugging Face folders of this family. gguf_names: the same of the names of single tensors in
        GGUF files.
    logit_soft_cap: logits become soft_cap * tanh(logit / soft_cap); 0 leaves them unchanged.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    inputs: InputSpec | None = None
    norms: LayerNorms = PRE_NORMS
    skips_first_norm: bool = False
    has_last_norm: bool = True
    norm_type: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norms_add_one: bool = False
    parallel_blocks: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    tied_embeddings: bool = False
    num_unused_layers: int = 0
    has_head: bool = True
    unused_tensors: frozenset[str] = frozenset()
    unused_prefixes: tuple[str, ...] = ()
    hugging_face_names: tuple[tuple[str, str], ...] = ()
    gguf_names: tuple[tuple[str, str], ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[AttentionSpec | LatentAttentionSpec, ...]:
        """The mixers that are attention, bottom to top."""
        return tuple(filter(_keeps_kv, self._mixers(self.num_layers)))

    @property
    def state_layers(self) -> tuple[PartSpec, ...]:
        """The mixers that keep a state, bottom to top."""
        return tuple(mixer for mixer in self._mixers(self.num_layers) if mixer.state_floats)

    def state_shape(self, max_logged: int = 0) -> StateShape | None:
        """Return the state of a sequence with a log of `max_logged` tokens; None without states."""
        sizes = tuple(
            mixer.state_floats + max_logged * mixer.logged_floats for mixer in self.state_layers
        )
        return StateShape(sizes, max_logged) if sizes else None

    def cache_layer(self, layer: int) -> int:
        """Return the number of layers below this one that keep KV."""
        return sum(map(_keeps_kv, self._mixers(layer)))

    def state_layer(self, layer: int) -> int:
        """Return the number of layers below this one that keep a state."""
        return sum(mixer.state_floats > 0 for mixer in self._mixers(layer))

    def _mixers(self, end: int) -> Iterator[PartSpec]:
        """Yield the mixers of the layers below `end`, those that run in parallel one by one."""
        for layer in self.layers[:end]:
            yield from layer.mixer.mixers

    @property
    def attention_shape(self) -> AttentionShape:
        """Heads and scale, which all layers with attention share: one KV cache holds them all.

        Those of NO_ATTENTION for a model without such layers.
        """
        (shape,) = {attention.shape for attention in self.attention_layers} or {NO_ATTENTION}
        return shape

    @property
    def has_attention(self) -> bool:
        """Whether a layer reads KV."""
        return self.attention_shape != NO_ATTENTION

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later ones, so that a prompt is computed as a whole."""
        return self.attention_shape.bidirectional

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer with attention; None for full attention.

        A model without such layers has blocks like those of one: the engine counts tokens and finds
        prefixes by them.
        """
        return tuple(attention.window for attention in self.attention_layers) or (None,)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding of each layer with attention."""
        return tuple(attention.rope for attention in self.attention_layers)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, MoeSpec) for layer in self.layers)

    @property
    def is_expert_parallel(self) -> bool:
        """Whether ranks have whole experts of a mixture."""
        mlps = (layer.mlp for layer in self.layers)
        return any(isinstance(mlp, MoeSpec) and mlp.is_expert_parallel for mlp in mlps)

    def with_expert_parallel(self) -> "ModelSpec":
        """Return the model with mixtures whose experts are dealt out to ranks.

        Raises ConfigError if it has none.
        """
        layers = tuple(
            replace(layer, mlp=replace(layer.mlp, is_expert_parallel=True))
            if isinstance(layer.mlp, MoeSpec)
            else layer
            for layer in self.layers
        )
        if layers == self.layers:
            raise ConfigError(f"--enable-expert-parallel: {self.architecture} has no experts")
        return replace(self, layers=layers)

    def for_pooling(self, pooler: Pooler) -> "ModelSpec":
        """Return the model with a head only if the pooler reads logits."""
        return replace(
            self,
            has_head=bool(pooler.logit_tokens),
            unused_tensors=self.unused_tensors | frozenset(pooler.tensors),
        )

    @property
    def outputs_per_layer(self) -> int:
        """Numbers that the products of one token give, in the layer with the most of them."""
        return max(
            layer.mixer.outputs_per_token + layer.mlp.outputs_per_token for layer in self.layers
        )

    @property
    def compute_shape(self) -> ComputeShape:
        """The FLOPs of a forward pass; norms, activations and the softmax are left out."""
        parts = (part for layer in self.layers for part in (layer.mixer, layer.mlp))
        by_window: dict[int | None, int] = {}
        for attention in self.attention_layers:
            by_window.setdefault(attention.window, 0)
            by_window[attention.window] += attention.shape.flops_per_key
        return ComputeShape(
            sum(part.flops_per_token for part in parts),
            2 * self.vocab_size * self.hidden_size,
            tuple(by_window.items()),
        )

    def weights(self) -> dict[str, WeightSpec]:
        """Return every weight of the model by its full name, bottom to top."""
        table = (self.vocab_size, self.hidden_size)
        specs = [*projection("embedding", "model.embed_tokens", "token_embd", table)]
        for number, layer in enumerate(self.layers):
            specs += [weight.in_layer(number) for weight in self._layer_weights(number, layer)]
        if self.inputs is not None:
            specs += self.inputs.weights(self.hidden_size, self.norm_bias)
        if self.has_last_norm:
            size = self.hidden_size
            specs += norm_weights("norm", "model.norm", "output_norm", size, self.norm_bias)
        if self.has_head and not self.tied_embeddings:
            specs += projection("head", "lm_head", "output", table)
        renamed = (weight.renamed(self.hugging_face_names, self.gguf_names) for weight in specs)
        return {weight.name: weight for weight in renamed}

    def norms_of(self, number: int) -> LayerNorms:
        """Return the norms of a layer."""
        norms, layer = self.norms, self.layers[number]
        if isinstance(layer.mixer, NoPartSpec):
            norms = replace(norms, attention=None, attention_post=None, attention_sum=None)
        if isinstance(layer.mlp, NoPartSpec):
            norms = replace(norms, mlp=None, mlp_post=None, mlp_sum=None)
        skips = self.skips_first_norm and number == 0
        return replace(norms, attention=None) if skips else norms

    def _layer_weights(self, number: int, layer: LayerSpec) -> list[WeightSpec]:
        """Return a layer's weights: norms, which belong to the model, and those of its parts."""
        norms = (
            norm_weights(name, *names, self.hidden_size, self.norm_bias)
            for name, names in self.norms_of(number).items()
        )
        return [*chain.from_iterable(norms), *layer.mixer.weights, *layer.mlp.weights]
