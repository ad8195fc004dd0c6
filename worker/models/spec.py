"""The arithmetic of a model: ModelSpec, which a family makes of its config.json.

The decoder, the loader and the sharding over ranks read nothing else. What is inside a layer is
described by its parts (parts.py); embedding, norms and head belong to the model.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal

from proto.errors import ConfigError
from proto.lifecycle import ComputeShape
from proto.pooling import Pooler
from worker.attention.base import AttentionShape
from worker.kv_cache import StateShape
from worker.models.attention import AttentionSpec
from worker.models.delta_rule import DeltaRuleSpec
from worker.models.latent_attention import LatentAttentionSpec
from worker.models.moe import MoeSpec
from worker.models.parts import PartSpec, WeightSpec, norm_weights, projection
from worker.models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: a mixer, through which tokens see each other, and an MLP for each token alone."""

    mixer: PartSpec
    mlp: PartSpec


NormNames = tuple[str, str]
"""Names of a layer's norm in a Hugging Face folder and in a GGUF file."""


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The norms that a layer has, by their names in model files.

    attention, mlp: of the residual before each part; without one, a part reads the residual itself.
    attention_post, mlp_post: of what each part adds to the residual.
    attention_sum, mlp_sum: of the residual after each part, which goes on with the norm.
    """

    attention: NormNames | None = None
    attention_post: NormNames | None = None
    mlp: NormNames | None = None
    mlp_post: NormNames | None = None
    attention_sum: NormNames | None = None
    mlp_sum: NormNames | None = None

    def items(self) -> list[tuple[str, NormNames]]:
        """Return the norms by this program's names."""
        norms = {
            "attention_norm": self.attention,
            "attention_post_norm": self.attention_post,
            "mlp_norm": self.mlp,
            "mlp_post_norm": self.mlp_post,
            "attention_sum_norm": self.attention_sum,
            "mlp_sum_norm": self.mlp_sum,
        }
        return [(name, names) for name, names in norms.items() if names is not None]


PRE_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"), mlp=("post_attention_layernorm", "ffn_norm")
)
POST_NORMS: Final = LayerNorms(
    attention_post=("post_attention_layernorm", "post_attention_norm"),
    mlp_post=("post_feedforward_layernorm", "post_ffw_norm"),
)
SANDWICH_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    attention_post=("post_attention_layernorm", "post_attention_norm"),
    mlp=("pre_feedforward_layernorm", "ffn_norm"),
    mlp_post=("post_feedforward_layernorm", "post_ffw_norm"),
)


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


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only model, or an encoder.

    architecture: the family, e.g. "LlamaForCausalLM".
    max_position: positions that the model was made for.
    layers: bottom to top; they may differ.
    inputs: of an encoder, beside the embedding of its tokens; None for others.
    norms: where each layer has norms. skips_first_norm: but not before the first attention.
    has_last_norm: whether there is a norm after the last layer.
    norm_kind: RMSNorm or LayerNorm, the last norm's too.
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
        Hugging Face folders of this family.
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
    norm_kind: Literal["rms", "layer"] = "rms"
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

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[AttentionSpec | LatentAttentionSpec, ...]:
        """The mixers that are attention, bottom to top."""
        mixers = (layer.mixer for layer in self.layers)
        kinds = (AttentionSpec, LatentAttentionSpec)
        return tuple(mixer for mixer in mixers if isinstance(mixer, kinds))

    @property
    def state_layers(self) -> tuple[DeltaRuleSpec, ...]:
        """The mixers that keep a state instead of KV, bottom to top."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, DeltaRuleSpec))

    @property
    def state_shape(self) -> StateShape | None:
        """The state of a sequence; None for a model whose layers all have attention."""
        layers = self.state_layers
        if not layers:
            return None
        (size,) = {layer.shape.state_floats for layer in layers}
        return StateShape(len(layers), size)

    def cache_layer(self, layer: int) -> int:
        """Return the number of a layer among those that keep the same: KV, or a state."""
        keeps_state = isinstance(self.layers[layer].mixer, DeltaRuleSpec)
        below = (each.mixer for each in self.layers[:layer])
        return sum(isinstance(mixer, DeltaRuleSpec) == keeps_state for mixer in below)

    @property
    def attention_shape(self) -> AttentionShape:
        """Heads and scale, which all layers with attention share: one KV cache holds them all."""
        (shape,) = {attention.shape for attention in self.attention_layers}
        return shape

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later ones, so that a prompt is computed as a whole."""
        return self.attention_shape.bidirectional

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer with attention; None for full attention."""
        return tuple(attention.window for attention in self.attention_layers)

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
            raise ConfigError(
                f"--enable-expert-parallel: {self.architecture} has no experts",
                "enable_expert_parallel",
            )
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
        renamed = (weight.renamed(self.hugging_face_names) for weight in specs)
        return {weight.name: weight for weight in renamed}

    def norms_of(self, number: int) -> LayerNorms:
        """Return the norms of a layer."""
        skips = self.skips_first_norm and number == 0
        return replace(self.norms, attention=None) if skips else self.norms

    def _layer_weights(self, number: int, layer: LayerSpec) -> list[WeightSpec]:
        """Return a layer's weights: norms, which belong to the model, and those of its parts."""
        norms = (
            norm_weights(name, *names, self.hidden_size, self.norm_bias)
            for name, names in self.norms_of(number).items()
        )
        return [*chain.from_iterable(norms), *layer.mixer.weights, *layer.mlp.weights]
