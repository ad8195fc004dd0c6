"""Mamba-2: every layer is a Mamba-2 layer without an MLP; there is no attention."""

from dataclasses import replace
from typing import Any, Final

from proto.errors import ModelError, shown
from worker.models.config_reader import ConfigReader
from worker.models.families.base import VALUES_OF_ALL_HEADS, Family, Gguf, GgufMetadata, ModelSpec
from worker.models.families.nemotronh import BACKBONE_NAMES
from worker.models.layout import LayerNorms, num_layers_of

_LONGEST: Final = 1 << 17
"""Tokens of a sequence for which memory is planned: nothing in the model limits them."""


def spec(config: ConfigReader) -> ModelSpec:
    from worker.models.composite import NoPartSpec
    from worker.models.hybrids import Mamba2Keys, mamba2_mixer
    from worker.models.spec import LayerSpec, ModelSpec

    config.must_be("hidden_act", "silu", "swish")
    config.must_be("rms_norm", True)
    # of random weights, of training, and of nothing in transformers' code
    for key in ("rescale_prenorm_residual", "norm_before_gate", "rope_parameters"):
        config.get(key)
    eps = config.number("layer_norm_epsilon", 1e-5)
    hidden_size = config.integer("hidden_size")
    mamba = mamba2_mixer(
        config,
        Mamba2Keys(
            heads="num_heads",
            head_size="head_dim",
            groups="n_groups",
            state_size="state_size",
            taps="conv_kernel",
            bias="use_bias",
            conv_bias="use_conv_bias",
            chunk_size="chunk_size",
        ),
        inner=config.integer("expand", 2) * hidden_size,
        eps=eps,
        defaults=(128, 8, 128),
    )
    layer = LayerSpec(mixer=replace(mamba, module="mixer"), mlp=NoPartSpec())
    return ModelSpec(
        architecture="Mamba2ForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position=config.integer("max_position_embeddings", _LONGEST),
        norm_eps=eps,
        layers=(layer,) * num_layers_of(config),
        norms=LayerNorms(attention=("norm", "attn_norm"), mlp=("norm", "attn_norm")),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        hugging_face_names=BACKBONE_NAMES,
    )


def _add_heads(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the size of a head of Mamba-2 layers: there is no other."""
    inner: Any = metadata.keys.get(VALUES_OF_ALL_HEADS)
    heads: Any = metadata.keys.get("ssm.time_step_rank")
    hidden = config["hidden_size"]
    are_sizes = all(type(size) is int and size > 0 for size in (inner, heads, hidden))
    if not are_sizes or inner % heads or inner % hidden:
        raise ModelError(
            f"{metadata.prefix}{VALUES_OF_ALL_HEADS} {shown(inner)} and ssm.time_step_rank "
            f"{shown(heads)}: channels of all heads and the number of heads are needed"
        )
    config["head_dim"], config["expand"] = inner // heads, inner // hidden
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps", 1e-5)
    # Converters write a million for every model.
    config["max_position_embeddings"] = _LONGEST


FAMILY = Family(
    models={"Mamba2ForCausalLM": "Mamba-2, Codestral Mamba"},
    model_types=("mamba2",),
    spec=spec,
    gguf=Gguf(
        name="mamba2",
        keys={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "num_heads",
        },
        other_keys=(VALUES_OF_ALL_HEADS,),
        settings={"of_llama_cpp": True},
        add_heads=_add_heads,
    ),
)
