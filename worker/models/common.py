"""What families share: reading the keys of a configuration into the parts of a ModelSpec.

A family builds its decoder of these pieces, and says by `dataclasses.replace` what is different:

    attention = replace(llama_attention(config), qkv_bias=True)
    return replace(attention_decoder(config, attention), norm_type="layer")

All raise ModelError naming key and value for what is missing or not supported.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal

from worker.layers.activation import Activation
from worker.layers.router import RouterSpec
from worker.models.attention import AttentionSpec
from worker.models.config_reader import ConfigReader
from worker.models.latent_attention import LatentAttentionSpec
from worker.models.layout import num_layers_of, windows_of_all_layers
from worker.models.mlp import MlpSpec
from worker.models.moe import MoeNames, MoeSpec
from worker.models.parts import PartSpec
from worker.models.rope import FactorsRope, Rope, rope_from_config, rotary_dim_from_config
from worker.models.spec import LayerSpec, ModelSpec

_MAX_EXPERTS: Final = 4096
_MAX_GROUPS: Final = 64
"""Most groups of experts: the kernel has a bit for each."""
_EXPERTS_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of experts: one name each, some a new one since then."""
ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by their names in configurations."""
MAX_HEAD_DIM: Final = 1 << 14
_MAX_ROTATIONS: Final = 1 << 30
"""Positions times the size of a head: cosines and sines of all are kept."""


def decoder(
    config: ConfigReader,
    mixers: Sequence[PartSpec],
    mlps: Sequence[PartSpec],
    *,
    eps: float = 1e-6,
    tied: bool = False,
) -> ModelSpec:
    """Return the spec of a decoder with Llama's norms and ends, and these parts of each layer.

    eps, tied: for a configuration without `rms_norm_eps`, `tie_word_embeddings`.
    """
    names = config.get("architectures") or [""]
    return ModelSpec(
        architecture=names[0],
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_position=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", eps),
        tied_embeddings=config.flag("tie_word_embeddings", tied),
        layers=tuple(
            LayerSpec(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True)
        ),
    )


def llama_attention(
    config: ConfigReader,
    *,
    head_dim: int | None = None,
    rotary_fraction: float | None = None,
    rope: Rope | None = None,
    bias: bool = False,
) -> AttentionSpec:
    """Return rotary attention.

    head_dim: None for that of the configuration, by default hidden_size / num_attention_heads.
    rotary_fraction: the default of `partial_rotary_factor` in a family that may rotate a part of
        each head; None for a family that rotates whole heads.
    rope: None for that of the configuration.
    bias: whether all four projections have one.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = head_dim or config.integer("head_dim", max(1, hidden_size // num_heads))
    max_position = config.integer("max_position_embeddings")
    if num_heads % num_kv_heads:
        raise config.refusal(
            "num_key_value_heads", num_kv_heads, f"must divide num_attention_heads = {num_heads}"
        )
    _check_rotations(config, "head_dim", head_dim, max_position)
    return AttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim_from_config(config, head_dim, rotary_fraction),
        scale=head_dim**-0.5,
        rope=rope or rope_from_config(config, max_position),
        qkv_bias=bias,
        output_bias=bias,
    )


def _check_rotations(config: ConfigReader, key: str, size: int, max_position: int) -> None:
    """Raise ModelError for a part of a head that cannot rotate. key: of its size."""
    if size % 2:
        raise config.refusal(key, size, "the rotary embedding needs an even number")
    if size * max_position > _MAX_ROTATIONS:
        reason = f"at most {_MAX_ROTATIONS // size} is supported with {key} = {size}"
        raise config.refusal("max_position_embeddings", max_position, reason)


def bidirectional_attention(config: ConfigReader, rope: Rope) -> AttentionSpec:
    """Return multi-head attention without a causal mask, every head with keys of its own.

    For encoders. Raises ModelError for heads that do not divide the hidden size, or of an odd size.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden_size % (2 * num_heads):
        reason = f"heads of an even size must divide hidden_size = {hidden_size}"
        raise config.refusal("num_attention_heads", num_heads, reason)
    head_dim = hidden_size // num_heads
    return AttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bidirectional=True,
        rope=rope,
    )


def attention_layers(
    config: ConfigReader,
    attention: AttentionSpec,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[Rope] | None = None,
) -> list[AttentionSpec]:
    """Return the attention of each layer.

    windows: None for a model whose `layer_types`, if any, are all full attention. ropes: None for
    that of `attention`.
    """
    if windows is None:
        windows = windows_of_all_layers(config, None)
    ropes = ropes or [attention.rope] * len(windows)
    num_pairs = attention.rotary_dim // 2
    for rope in ropes:
        if isinstance(rope, FactorsRope) and len(rope.factors) != num_pairs:
            raise config.refusal(
                "rope_parameters", list(rope.factors), f"{num_pairs} factors are needed"
            )
    return [
        replace(attention, window=window, rope=rope)
        for window, rope in zip(windows, ropes, strict=True)
    ]


def attention_decoder(
    config: ConfigReader,
    attention: AttentionSpec,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[Rope] | None = None,
    *,
    mlps: Sequence[PartSpec] | None = None,
    eps: float = 1e-6,
    tied: bool = False,
) -> ModelSpec:
    """Return the spec of a decoder in which every layer has attention, and gated MLPs by default.

    windows, ropes: see `attention_layers`. eps, tied: see `decoder`.
    """
    layers = attention_layers(config, attention, windows, ropes)
    return decoder(config, layers, gated_mlps(config) if mlps is None else mlps, eps=eps, tied=tied)


def gated_mlps(
    config: ConfigReader, activation: Activation | None = None, *, stacked_gate_up: bool = False
) -> list[MlpSpec]:
    """Return a gated MLP of `intermediate_size` for each layer.

    activation: None for SiLU, which `hidden_act` must be then.
    stacked_gate_up: files have gate and up projections as one tensor.
    """
    if activation is None:
        config.must_be("hidden_act", "silu", "swish")
    mlp = MlpSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        activation=activation or "silu",
        bias=config.flag("mlp_bias", False),
        stacked_gate_up=stacked_gate_up,
    )
    return [mlp] * num_layers_of(config)


def latent_decoder(
    config: ConfigReader, mlps: Sequence[PartSpec], *, is_interleaved: bool = True
) -> ModelSpec:
    """Return the spec of a decoder with Llama's norms and latent attention.

    is_interleaved: see LatentAttentionSpec. Layers that predict further tokens are not loaded.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config.must_be("num_key_value_heads", num_heads)
    config.must_be("hidden_act", "silu", "swish")
    config.must_be("mlp_bias", False)
    max_position = config.integer("max_position_embeddings")
    rotary_dim, nope_dim = (
        config.integer(f"qk_{part}_head_dim", most=MAX_HEAD_DIM) for part in ("rope", "nope")
    )
    config.must_be("head_dim", rotary_dim, rotary_dim + nope_dim)
    config.must_be("qk_head_dim", rotary_dim + nope_dim)
    _check_rotations(config, "qk_rope_head_dim", rotary_dim, max_position)
    mixer = LatentAttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        q_lora_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank", most=MAX_HEAD_DIM),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rotary_dim,
        v_head_dim=config.integer("v_head_dim", most=MAX_HEAD_DIM),
        rope=rope_from_config(config, max_position),
        bias=config.flag("attention_bias", False),
        is_interleaved=is_interleaved,
    )
    num_unused = config.integer("num_nextn_predict_layers", 0, least=0)
    return replace(
        decoder(config, [mixer] * len(mlps), mlps),
        num_unused_layers=config.integer("num_mtp_layers", num_unused, least=0),
    )


def moe_spec(
    config: ConfigReader, router: RouterSpec, inner: str = "moe_intermediate_size"
) -> MoeSpec:
    """Return a mixture of experts without a shared one. inner: the key of the size of an expert."""
    return MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer(inner),
        router=router,
    )


def qwen_mixture(config: ConfigReader, *, normalised: bool) -> MoeSpec:
    """Return the mixture of these models: its shared expert has a gate.

    normalised: whether the weights of a token's experts sum to 1.
    """
    return replace(
        moe_spec(config, replace(router_from_config(config), normalised=normalised)),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        names=MoeNames(shared="mlp.shared_expert"),
    )


def router_from_config(config: ConfigReader, best_of_group: Literal[1, 2] = 2) -> RouterSpec:
    """Return the router of a mixture: a softmax over the logits of the chosen experts.

    best_of_group: see RouterSpec. More experts per token than there are, and groups that do not fit
    raise ModelError.
    """
    given = [key for key in _EXPERTS_KEYS if config.get(key) is not None]
    key = given[0] if given else _EXPERTS_KEYS[0]
    num_experts = config.integer(key, most=_MAX_EXPERTS)
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.refusal("num_experts_per_tok", top_k, f"{key} is {num_experts}")
    num_groups = config.integer("n_group", 1, most=_MAX_GROUPS)
    top_groups = config.integer("topk_group", 1)
    if num_groups > 1 and (num_experts % num_groups or num_experts < best_of_group * num_groups):
        reason = f"{num_experts} experts cannot be divided into groups of {best_of_group} or more"
        raise config.refusal("n_group", num_groups, reason)
    if top_groups > num_groups or top_k > num_experts // num_groups * top_groups:
        reason = f"{num_groups} groups, {top_k} experts of a token"
        raise config.refusal("topk_group", top_groups, reason)
    return RouterSpec(
        num_experts=num_experts,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        best_of_group=best_of_group,
    )


def dense_and_sparse(
    config: ConfigReader, experts: PartSpec, is_sparse: Callable[[int], bool]
) -> tuple[PartSpec, ...]:
    """Return the MLP of each layer: a mixture of experts, or a gated MLP of `intermediate_size`."""
    numbers = range(num_layers_of(config))
    if all(map(is_sparse, numbers)):
        config.get("intermediate_size")
        return (experts,) * len(numbers)
    dense = MlpSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
    )
    return tuple(experts if is_sparse(number) else dense for number in numbers)


def qwen_sparse_layers(config: ConfigReader) -> Callable[[int], bool]:
    """Return which layers of Qwen's mixtures have experts: every `decoder_sparse_step`th one.

    Those in `mlp_only_layers` have none.
    """
    step = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise config.refusal("mlp_only_layers", dense, "a list of layers is needed")
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def sigmoid_router(config: ConfigReader) -> RouterSpec:
    """Return a router with a bias for balance in place of a loss (DeepSeek-V3, section 2.1.2)."""
    return replace(
        router_from_config(config),
        scoring="sigmoid",
        selection_bias=True,
        normalised=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )


def deepseek_mixture(config: ConfigReader, router: RouterSpec, num_shared: int = 0) -> MoeSpec:
    """Return a mixture whose shared experts are as large as `n_shared_experts` of the others.

    num_shared: their number if the configuration does not say it.
    """
    if config.get("n_shared_experts") is not None:
        num_shared = config.integer("n_shared_experts", least=0)
    experts = moe_spec(config, router)
    return replace(experts, shared_size=experts.intermediate_size * num_shared)


def mixtures_above_dense_layers(config: ConfigReader, router: RouterSpec) -> tuple[PartSpec, ...]:
    """Return the MLP of each layer: mixtures from `first_k_dense_replace` on, with shared experts.

    Every `moe_layer_freq`th of these layers, by its number, has experts.
    """
    num_dense = config.integer("first_k_dense_replace", 0, least=0)
    step = config.integer("moe_layer_freq", 1)
    return dense_and_sparse(
        config,
        deepseek_mixture(config, router),
        lambda layer: layer >= num_dense and layer % step == 0,
    )
