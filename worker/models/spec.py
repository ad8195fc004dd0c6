"""The arithmetic of a model: ModelSpec, which a family makes of its config.json.

The decoder, the loader and the sharding over ranks read nothing else. What is inside a layer is
described by its parts (parts.py); embedding, norms and head belong to the model.
"""

from dataclasses import dataclass

from proto.lifecycle import ComputeShape
from worker.attention.base import AttentionShape
from worker.models.attention import AttentionSpec
from worker.models.parts import PartSpec, WeightSpec, norm_weight, projection
from worker.models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: a mixer, through which tokens see each other, and an MLP for each token alone."""

    mixer: PartSpec
    mlp: PartSpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only model with a norm before each part of a layer.

    architecture: the family, e.g. "LlamaForCausalLM".
    max_position: positions that the model was made for.
    layers: bottom to top; they may differ.
    post_norms: another RMSNorm over what each part adds to the residual.
    norms_add_one: norms multiply by 1 + weight; a GGUF file stores the sum.
    embedding_scale: factor of the embedding, not of a tied head.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    embedding_scale: float = 1.0
    post_norms: bool = False
    norms_add_one: bool = False
    tied_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """The mixers that are attention, bottom to top."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    @property
    def attention_shape(self) -> AttentionShape:
        """Heads and scale, which all layers with attention share: one KV cache holds them all."""
        (shape,) = {attention.shape for attention in self.attention_layers}
        return shape

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer with attention; None for full attention."""
        return tuple(attention.window for attention in self.attention_layers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding of each layer with attention."""
        return tuple(attention.rope for attention in self.attention_layers)

    @property
    def compute_shape(self) -> ComputeShape:
        """The FLOPs of a forward pass; norms, activations and the softmax are left out."""
        matrices = (
            weight.shape
            for layer in self.layers
            for part in (layer.mixer, layer.mlp)
            for weight in part.weights
            if len(weight.shape) == 2
        )
        by_window: dict[int | None, int] = {}
        for attention in self.attention_layers:
            flops = 2 * 2 * attention.query_size  # query by key, probabilities by value
            by_window[attention.window] = by_window.get(attention.window, 0) + flops
        return ComputeShape(
            sum(2 * rows * columns for rows, columns in matrices),
            2 * self.vocab_size * self.hidden_size,
            tuple(by_window.items()),
        )

    def weights(self) -> dict[str, WeightSpec]:
        """Return every weight of the model by its full name, bottom to top."""
        table = (self.vocab_size, self.hidden_size)
        specs = [*projection("embedding", "model.embed_tokens", "token_embd", table)]
        for number, layer in enumerate(self.layers):
            specs += [weight.in_layer(number) for weight in self._layer_weights(layer)]
        specs.append(norm_weight("norm", "model.norm", "output_norm", self.hidden_size))
        if not self.tied_embeddings:
            specs += projection("head", "lm_head", "output", table)
        return {weight.name: weight for weight in specs}

    def _layer_weights(self, layer: LayerSpec) -> list[WeightSpec]:
        """Return a layer's weights: norms, which belong to the model, and those of its parts."""

        def norm(name: str, hugging_face: str, gguf: str) -> WeightSpec:
            return norm_weight(name, hugging_face, gguf, self.hidden_size)

        before_mlp = "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"
        specs = [norm("attention_norm", "input_layernorm", "attn_norm"), *layer.mixer.weights]
        if self.post_norms:
            specs += [
                norm("attention_post_norm", "post_attention_layernorm", "post_attention_norm"),
                norm("mlp_post_norm", "post_feedforward_layernorm", "post_ffw_norm"),
            ]
        return [*specs, norm("mlp_norm", before_mlp, "ffn_norm"), *layer.mlp.weights]
