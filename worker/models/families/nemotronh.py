"""Nemotron-H and Nemotron 3: a layer is a Mamba-2 layer, attention without positions, or an MLP.

MLPs and experts have a squared ReLU and no gate.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from proto.errors import ModelError, shown
from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    SIGMOID,
    VALUES_OF_ALL_HEADS,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
    layers_with_attention,
    recurrent_head_size,
    set_head_dim,
)
from worker.models.layout import FULL, LINEAR, LayerNorms

if TYPE_CHECKING:
    from worker.models.moe import MoeSpec
    from worker.models.parts import PartSpec

_MLP: Final = "mlp"
_EXPERTS: Final = "moe"
_OF_PATTERN: Final = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
"""Letters of `hybrid_override_pattern`, which older configurations have."""
_OLDER_KINDS: Final = {"mamba": LINEAR, "attention": FULL}
_NORM: Final = ("norm", "attn_norm")
"""The only norm of a layer of any kind."""
_EXPERTS_KEYS: Final = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size"),
    *("n_shared_experts", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
    *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
)
"""Keys of configurations, also of models without experts."""
BACKBONE_NAMES: Final = (
    ("model.embed_tokens", "backbone.embeddings"),
    ("model.norm.", "backbone.norm_f."),
    ("model.layers.", "backbone.layers."),
    ("self_attn.", "mixer."),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec.

    `time_step_min` and `time_step_max` are those of the random weights that training begins with:
    the time step of a trained model has no limits.
    """
    from worker.models.common import decoder, llama_attention
    from worker.models.composite import NoPartSpec
    from worker.models.hybrids import MAMBA_SSM_KEYS, mamba2_mixer
    from worker.models.mlp import MlpSpec
    from worker.models.rope import NoRope

    kinds = _kinds(config)
    config.must_be("mlp_hidden_act", "relu2")
    config.must_be("mamba_hidden_act", "silu", "swish")
    for key in ("rescale_prenorm_residual", "mtp_layers_block_type", "mtp_hybrid_override_pattern"):
        config.get(key)
    eps = config.number("layer_norm_epsilon", 1e-5)
    config.must_be("rms_norm_eps", eps)
    mamba = mamba2_mixer(
        config,
        replace(
            MAMBA_SSM_KEYS,
            heads="mamba_num_heads",
            head_size="mamba_head_dim",
            state_size="ssm_state_size",
        ),
        eps=eps,
        defaults=(128, 8, 128),
    )
    config.must_be("attention_bias", False)
    attention = llama_attention(config, head_dim=config.integer("head_dim", 128), rope=NoRope())
    mlp = MlpSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size", 21504),
        activation="relu2",
        bias=config.flag("mlp_bias", False),
        is_gated=False,
        up="mixer.up_proj",
        down="mixer.down_proj",
    )
    # Of GGUF files, which count them; those of folders have other names.
    num_unused = config.integer("num_nextn_predict_layers", 0, least=0)
    mlps: dict[str, PartSpec] = {_MLP: mlp}
    if _EXPERTS in kinds:
        mlps[_EXPERTS] = _mixture(config)
    else:
        for key in _EXPERTS_KEYS:
            config.get(key)
    mixers: dict[str, PartSpec] = {LINEAR: replace(mamba, module="mixer"), FULL: attention}
    nothing = NoPartSpec()
    return replace(
        decoder(
            config,
            [mixers.get(kind, nothing) for kind in kinds],
            [mlps.get(kind, nothing) for kind in kinds],
        ),
        norm_eps=eps,
        norms=LayerNorms(attention=_NORM, mlp=_NORM),
        hugging_face_names=BACKBONE_NAMES,
        num_unused_layers=num_unused,
        unused_prefixes=("mtp.",),
    )


def _mixture(config: ConfigReader) -> "MoeSpec":
    """Return the mixture of a layer of Nemotron 3: experts without gates, mostly of a latent."""
    from worker.models.common import sigmoid_router
    from worker.models.moe import MoeNames, MoeSpec

    config.get("moe_shared_expert_overlap")  # of streams on a GPU
    config.must_be("n_shared_experts", 1)
    config.must_be("mlp_bias", False)
    latent_size = config.get("moe_latent_size")
    return MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size", 7688),
        router=sigmoid_router(config),
        activation="relu2",
        shared_size=config.integer("moe_shared_expert_intermediate_size", 7688),
        latent_size=0 if latent_size is None else config.integer("moe_latent_size"),
        names=MoeNames(
            router="mixer.gate",
            experts="mixer.experts",
            stacked_gate_up="mixer.experts.up_proj",
            stacked_down="mixer.experts.down_proj",
            shared="mixer.shared_experts",
            latent_down="mixer.fc1_latent_proj",
            latent_up="mixer.fc2_latent_proj",
        ),
    )


def _kinds(config: ConfigReader) -> list[str]:
    """Return the kind of each layer."""
    pattern, named = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    supported = (LINEAR, FULL, _MLP, _EXPERTS)
    config.get("num_hidden_layers")
    found: list[str]
    if isinstance(named, list):
        key, found = "layers_block_type", [_OLDER_KINDS.get(each, each) for each in map(str, named)]
    elif isinstance(pattern, str):
        key, found = "hybrid_override_pattern", [_OF_PATTERN.get(each, each) for each in pattern]
    else:
        raise config.refusal("layers_block_type", named, "a list of kinds of layers is needed")
    for kind in found:
        if kind not in supported:
            raise config.refusal(key, kind, f"supported: {', '.join(supported)}")
    if FULL not in found:
        raise config.refusal(key, sorted(set(found)), f"one {FULL} at least is needed")
    return found


def _add_heads(config: dict[str, Any], metadata: GgufMetadata) -> None:
    set_head_dim(config, metadata, metadata.keys.get("attention.key_length"), None)


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the kinds of layers: those without KV heads and MLP are Mamba-2 layers."""
    sizes = config["intermediate_size"]
    has_attention = layers_with_attention(config, metadata)
    mlp = _EXPERTS if "n_routed_experts" in config else _MLP
    if isinstance(sizes, list):
        sizes = sizes[: len(has_attention)]
    if not isinstance(sizes, list) or len(sizes) != len(has_attention):
        raise ModelError(
            f"{metadata.prefix}feed_forward_length {shown(sizes)}: one number a layer is needed"
        )
    config["layers_block_type"] = [
        FULL if attends else mlp if size else LINEAR
        for attends, size in zip(has_attention, sizes, strict=True)
    ]
    config["intermediate_size"] = max(sizes)
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps", 1e-5)
    config["mamba_head_dim"] = recurrent_head_size(metadata)
    config["of_llama_cpp"] = True


FAMILY = Family(
    models={"NemotronHForCausalLM": "Nemotron-H, Nemotron 3"},
    model_types=("nemotron_h",),
    spec=spec,
    gguf=Gguf(
        name="nemotron_h",
        other_names=("nemotron_h_moe",),
        keys={
            "expert_count": "n_routed_experts",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "moe_latent_size": "moe_latent_size",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        other_keys=(VALUES_OF_ALL_HEADS,),
        gating=SIGMOID,
        add_heads=_add_heads,
        finish=_finish,
    ),
)
