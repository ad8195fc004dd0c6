"""What a model is, as far as its arithmetic goes: sizes, biases, norms, rotary embedding.

A family turns a configuration into a ModelSpec; the decoder and the loader read
nothing else. Knows nothing of configuration files or of tensors in files.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class DefaultRope:
    """Rotary embedding with frequencies theta^(-2i/d) (Su et al., RoFormer, section 3.4)."""

    theta: float


@dataclass(frozen=True)
class LinearRope:
    """Every position divided by `factor` (Chen et al., Position Interpolation)."""

    theta: float
    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (Peng et al., sections 3.2 to 3.4).

    beta_fast, beta_slow: rotations over the original length between which the ramp lies.
    truncate: round the ends of the ramp to whole dimensions.
    attention_factor: multiplies cosines and sines, so query times key gets its square.
    """

    theta: float
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True)
class FactorsRope:
    """Frequencies divided by factors [head_dim / 2] that come with the weights."""

    theta: float
    factors: tuple[float, ...]


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope | FactorsRope


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The arithmetic of one decoder-only model.

    architecture: the family, e.g. "LlamaForCausalLM".
    max_position: positions that the model was made for.
    head_dim: need not be hidden_size / num_heads.
    qkv_bias, output_bias: biases of the attention's projections.
    qk_norm: RMSNorm over each query and key head before the rotary embedding.
    post_norms: RMSNorm over what attention and MLP add to the residual.
    norms_add_one: norms multiply by 1 + weight; a GGUF file has the sum.
    ropes: of each layer.
    windows: per layer the sliding window in tokens, None for full attention.
    attention_scale: factor of query times key before the softmax.
    embedding_scale: factor of the embedding, not of a tied head.
    gguf_permutes_qk: a GGUF file of this family interleaves the rows of query and
        key heads (pairs 2i, 2i+1 rotate together) and the loader undoes it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]
    attention_scale: float
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norms_add_one: bool = False
    tied_embeddings: bool = False
    gguf_permutes_qk: bool = False

    @property
    def query_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of the model, in tokend's own names, top to bottom."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        for name, shape in layer_parameter_shapes(spec).items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes["norm.weight"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["head.weight"] = (spec.vocab_size, hidden)
    return shapes


def layer_parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name (without the layer's prefix) and shape of every weight of one layer."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": (hidden,)}
    for part, rows in (("q", spec.query_size), ("k", spec.kv_size), ("v", spec.kv_size)):
        shapes[f"{part}.weight"] = (rows, hidden)
        if spec.qkv_bias:
            shapes[f"{part}.bias"] = (rows,)
    if spec.qk_norm:
        shapes["q_norm.weight"] = (spec.head_dim,)
        shapes["k_norm.weight"] = (spec.head_dim,)
    shapes["o.weight"] = (hidden, spec.query_size)
    if spec.output_bias:
        shapes["o.bias"] = (hidden,)
    if spec.post_norms:
        shapes["attention_post_norm.weight"] = (hidden,)
        shapes["mlp_post_norm.weight"] = (hidden,)
    shapes["mlp_norm.weight"] = (hidden,)
    shapes["gate.weight"] = (inner, hidden)
    shapes["up.weight"] = (inner, hidden)
    shapes["down.weight"] = (hidden, inner)
    return shapes
