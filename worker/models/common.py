"""What Llama-like families share: reading their common configuration keys into a ModelSpec.

A family file calls llama_like with its own differences.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from worker.layers.activation import Activation
from worker.layers.delta_rule import DeltaRuleShape
from worker.layers.router import RouterSpec
from worker.models.attention import AttentionSpec
from worker.models.config_reader import ConfigReader
from worker.models.delta_rule import DeltaRuleSpec
from worker.models.latent_attention import LatentAttentionSpec
from worker.models.mlp import MlpSpec
from worker.models.moe import MoeNames, MoeSpec
from worker.models.parts import PartSpec
from worker.models.rope import FactorsRope, Rope, rope_from_config, rotary_dim_from_config
from worker.models.spec import LayerNorms, LayerSpec, ModelSpec

FULL: Final = "full_attention"
WINDOWED: Final = "sliding_attention"
LINEAR: Final = "linear_attention"
"""Kinds of layers, as configurations call them."""
_DEFAULT_MAX_WINDOW_LAYERS: Final = 28
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_NO_MIXERS: Final[Mapping[int, PartSpec]] = MappingProxyType({})
_QWEN_NORMS: Final = LayerNorms(
    attention=("input_layernorm", "attn_norm"),
    mlp=("post_attention_layernorm", "post_attention_norm"),
)
"""Names of the norms of models with gated delta-rule layers."""
_MAX_LAYERS: Final = 4096
_MAX_EXPERTS: Final = 4096
_MAX_GROUPS: Final = 64
"""Most groups of experts: the kernel has a bit for each."""
_EXPERTS_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of experts: one name each, some a new one since then."""
_MAX_HEAD_DIM: Final = 1 << 14
_MAX_TAPS: Final = 64
_MAX_ROTATIONS: Final = 1 << 30
"""Positions times the size of a head: cosines and sines of all are kept."""


def llama_like(
    config: ConfigReader,
    *,
    architecture: str,
    head_dim: int | None = None,
    partial_rotary_factor: float | None = None,
    ropes: Sequence[Rope] | None = None,
    windows: Sequence[int | None] | None = None,
    attention: Mapping[str, Any] = _NOTHING,
    activation: Activation | None = None,
    stacked_gate_up: bool = False,
    mlps: Sequence[PartSpec] | None = None,
    other_mixers: Mapping[int, PartSpec] = _NO_MIXERS,
    **model: Any,
) -> ModelSpec:
    """Return the spec of a decoder with pre-norms, rotary attention and a gated MLP.

    A family passes what is different from Llama: head_dim, the default of partial_rotary_factor if
    it may rotate a part of each head, ropes and windows of each layer, other fields of
    AttentionSpec, the activation, whether files stack gate and up projections, the MLP of each
    layer if these are not gated MLPs of one size, the mixers of layers without attention, by the
    number of the layer, and fields of ModelSpec. The keys of the
    configuration behind ropes, windows, activation and MLPs are read here only if the family does
    not pass them.
    Raises ModelError naming key and value for what is missing or not supported.
    """
    hidden_size = config.integer("hidden_size")
    num_layers = config.integer("num_hidden_layers", most=_MAX_LAYERS)
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = head_dim or config.integer("head_dim", max(1, hidden_size // num_heads))
    max_position = config.integer("max_position_embeddings")
    if num_heads % num_kv_heads:
        raise config.refusal(
            "num_key_value_heads", num_kv_heads, f"must divide num_attention_heads = {num_heads}"
        )
    if head_dim % 2:
        raise config.refusal("head_dim", head_dim, "the rotary embedding needs an even number")
    if head_dim * max_position > _MAX_ROTATIONS:
        raise config.refusal(
            "max_position_embeddings",
            max_position,
            f"at most {_MAX_ROTATIONS // head_dim} is supported with heads of {head_dim}",
        )
    if activation is None and mlps is None:
        config.must_be("hidden_act", "silu", "swish")
    rotary_dim = rotary_dim_from_config(config, head_dim, partial_rotary_factor)
    if ropes is None:
        ropes = (rope_from_config(config, max_position),) * num_layers
    for rope in ropes:
        if isinstance(rope, FactorsRope) and 2 * len(rope.factors) != rotary_dim:
            raise config.refusal(
                "rope_parameters", list(rope.factors), f"{rotary_dim // 2} factors are needed"
            )
    if windows is None:
        kinds = layer_kinds(config, (FULL,), lambda layer: FULL)
        windows = layer_windows(config, kinds, {FULL: None})
    heads: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "scale": head_dim**-0.5,
    }
    mlp_bias = config.flag("mlp_bias", False)
    if mlps is None:
        mlp = MlpSpec(
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            activation=activation or "silu",
            bias=mlp_bias,
            stacked_gate_up=stacked_gate_up,
        )
        mlps = (mlp,) * num_layers
    fields: dict[str, Any] = {
        "vocab_size": config.integer("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
    }
    spec = ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        max_position=max_position,
        layers=tuple(
            LayerSpec(
                mixer=other_mixers.get(number)
                or AttentionSpec(**(heads | dict(attention)), rope=rope, window=window),
                mlp=mlp,
            )
            for number, (rope, window, mlp) in enumerate(zip(ropes, windows, mlps, strict=True))
        ),
        **(fields | model),
    )
    config.refuse_leftovers()
    return spec


def latent_decoder(
    config: ConfigReader, *, architecture: str, mlps: Sequence[PartSpec], **attention: Any
) -> ModelSpec:
    """Return the spec of a decoder with pre-norms and latent attention.

    attention: other fields of LatentAttentionSpec. Layers that predict further tokens are not
    loaded. Raises ModelError naming key and value for what is missing or not supported.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config.must_be("num_key_value_heads", num_heads)
    config.must_be("hidden_act", "silu", "swish")
    config.must_be("mlp_bias", False)
    max_position = config.integer("max_position_embeddings")
    rotary_dim, nope_dim = (
        config.integer(f"qk_{part}_head_dim", most=_MAX_HEAD_DIM) for part in ("rope", "nope")
    )
    config.must_be("head_dim", rotary_dim, rotary_dim + nope_dim)
    config.must_be("qk_head_dim", rotary_dim + nope_dim)
    if rotary_dim % 2:
        reason = "the rotary embedding needs an even number"
        raise config.refusal("qk_rope_head_dim", rotary_dim, reason)
    if rotary_dim * max_position > _MAX_ROTATIONS:
        reason = (
            f"at most {_MAX_ROTATIONS // rotary_dim} is supported with {rotary_dim} that rotate"
        )
        raise config.refusal("max_position_embeddings", max_position, reason)
    mixer = LatentAttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        q_lora_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank", most=_MAX_HEAD_DIM),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rotary_dim,
        v_head_dim=config.integer("v_head_dim", most=_MAX_HEAD_DIM),
        rope=rope_from_config(config, max_position),
        bias=config.flag("attention_bias", False),
        **attention,
    )
    num_unused = config.integer("num_nextn_predict_layers", 0, least=0)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        layers=tuple(LayerSpec(mixer=mixer, mlp=mlp) for mlp in mlps),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        num_unused_layers=config.integer("num_mtp_layers", num_unused, least=0),
    )
    config.refuse_leftovers()
    return spec


def delta_rule_decoder(
    config: ConfigReader,
    *,
    architecture: str,
    mlps: Sequence[PartSpec] | None = None,
    grouped_inputs: bool = False,
) -> ModelSpec:
    """Return the spec of a decoder of Qwen's in which most layers are gated delta-rule layers.

    The others have attention with a gate. mlps, grouped_inputs: see llama_like and DeltaRuleSpec.
    Layers that predict further tokens are not loaded. Raises ModelError naming key and value for
    what is missing or not supported.
    """
    config.must_be("hidden_act", "silu", "swish")
    config.must_be("attn_output_gate", True)
    config.get("mtp_num_hidden_layers")
    of_llama_cpp = config.flag("of_llama_cpp", False)  # set by deploy/models/gguf_config.py
    interval = config.integer("full_attention_interval", 4)
    kinds = layer_kinds(
        config, (LINEAR, FULL), lambda layer: LINEAR if (layer + 1) % interval else FULL
    )
    if FULL not in kinds:
        raise config.refusal("layer_types", list(set(kinds)), f"one {FULL} at least is needed")
    key_heads, value_heads = (
        config.integer(f"linear_num_{part}_heads", default, most=_MAX_HEAD_DIM)
        for part, default in (("key", 16), ("value", 32))
    )
    if value_heads % key_heads:
        reason = f"must be a multiple of linear_num_key_heads = {key_heads}"
        raise config.refusal("linear_num_value_heads", value_heads, reason)
    mixer = DeltaRuleSpec(
        hidden_size=config.integer("hidden_size"),
        shape=DeltaRuleShape(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_size=config.integer("linear_key_head_dim", 128, most=_MAX_HEAD_DIM),
            value_size=config.integer("linear_value_head_dim", 128, most=_MAX_HEAD_DIM),
            num_taps=config.integer("linear_conv_kernel_dim", 4, most=_MAX_TAPS),
            is_tiled=of_llama_cpp and key_heads < value_heads,
        ),
        eps=config.number("rms_norm_eps", 1e-6),
        grouped_inputs=grouped_inputs,
        of_llama_cpp=of_llama_cpp,
    )
    bias = config.flag("attention_bias", False)
    max_position = config.integer("max_position_embeddings")
    rope = rope_from_config(config, max_position)
    return llama_like(
        config,
        architecture=architecture,
        head_dim=config.integer("head_dim", 256),
        partial_rotary_factor=0.25,
        ropes=(rope,) * len(kinds),
        windows=(None,) * len(kinds),
        attention={
            "qkv_bias": bias,
            "output_bias": bias,
            "qk_norm": True,
            "output_gate": True,
        },
        mlps=mlps,
        other_mixers={number: mixer for number, kind in enumerate(kinds) if kind == LINEAR},
        norms=_QWEN_NORMS,
        norms_add_one=True,
        num_unused_layers=config.integer("num_nextn_predict_layers", 0, least=0),
        unused_prefixes=("mtp.",),
    )


def qwen_mixture(config: ConfigReader, *, normalised: bool) -> MoeSpec:
    """Return the mixture of these models: its shared expert has a gate.

    normalised: whether the weights of a token's experts sum to 1.
    """
    return MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        router=router_from_config(config, normalised=normalised),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        names=MoeNames(shared="mlp.shared_expert"),
    )


def router_from_config(config: ConfigReader, **fields: Any) -> RouterSpec:
    """Return the router of a mixture; fields: others of RouterSpec.

    Raises ModelError for more experts per token than there are, and for groups that do not fit.
    """
    given = [key for key in _EXPERTS_KEYS if config.get(key) is not None]
    key = given[0] if given else _EXPERTS_KEYS[0]
    num_experts = config.integer(key, most=_MAX_EXPERTS)
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.refusal("num_experts_per_tok", top_k, f"{key} is {num_experts}")
    num_groups = config.integer("n_group", 1, most=_MAX_GROUPS)
    top_groups = config.integer("topk_group", 1)
    least = fields.get("best_of_group", 2)
    if num_groups > 1 and (num_experts % num_groups or num_experts < least * num_groups):
        reason = f"{num_experts} experts cannot be divided into groups of {least} or more"
        raise config.refusal("n_group", num_groups, reason)
    if top_groups > num_groups or top_k > num_experts // num_groups * top_groups:
        reason = f"{num_groups} groups, {top_k} experts of a token"
        raise config.refusal("topk_group", top_groups, reason)
    return RouterSpec(
        num_experts=num_experts,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        **fields,
    )


def dense_and_sparse(
    config: ConfigReader, mixture: PartSpec, is_sparse: Callable[[int], bool]
) -> tuple[PartSpec, ...]:
    """Return the MLP of each layer: the mixture, or a gated MLP of `intermediate_size`."""
    numbers = range(config.integer("num_hidden_layers", most=_MAX_LAYERS))
    if all(map(is_sparse, numbers)):
        config.get("intermediate_size")
        return (mixture,) * len(numbers)
    dense = MlpSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
    )
    return tuple(mixture if is_sparse(number) else dense for number in numbers)


def qwen_sparse_layers(config: ConfigReader) -> Callable[[int], bool]:
    """Return which layers of Qwen's mixtures have experts: every `decoder_sparse_step`th one.

    Those in `mlp_only_layers` have none.
    """
    step = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise config.refusal("mlp_only_layers", dense, "a list of layers is needed")
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def layer_kinds(
    config: ConfigReader, supported: tuple[str, ...], default: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the kind of each layer: from `layer_types`, or by the family's own pattern.

    Raises ModelError for a kind that is not supported.
    """
    num_layers = config.integer("num_hidden_layers", most=_MAX_LAYERS)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(default(layer) for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.refusal("layer_types", kinds, f"{num_layers} names are needed")
    for kind in kinds:
        if kind not in supported:
            raise config.refusal("layer_types", kind, f"supported: {', '.join(supported)}")
    return tuple(kinds)


def layer_windows(
    config: ConfigReader, kinds: tuple[str, ...], windows: Mapping[str, int | None]
) -> tuple[int | None, ...]:
    """Return the window of each layer by its kind.

    A window as long as the model's longest sequence hides nothing and becomes None.
    """
    max_position = config.integer("max_position_embeddings")
    narrow = {
        kind: window if window is not None and window < max_position else None
        for kind, window in windows.items()
    }
    return tuple(narrow[kind] for kind in kinds)


def windows_of_all_layers(config: ConfigReader, window: int | None) -> tuple[int | None, ...]:
    """Return the same window for each layer; None for full attention."""
    kind = FULL if window is None else WINDOWED
    return layer_windows(config, layer_kinds(config, (kind,), lambda layer: kind), {kind: window})


def window_from_config(config: ConfigReader) -> int | None:
    return None if config.get("sliding_window") is None else config.integer("sliding_window")


def windows_of_upper_layers(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the windows of Qwen's layers.

    With `use_sliding_window`, layers from `max_window_layers` on have a window.
    """
    window = window_from_config(config)
    used = config.flag("use_sliding_window", False) and window is not None
    first = config.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, least=0)
    supported = (FULL, WINDOWED) if used else (FULL,)
    kinds = layer_kinds(
        config, supported, lambda layer: WINDOWED if used and layer >= first else FULL
    )
    return layer_windows(config, kinds, {FULL: None, WINDOWED: window})
