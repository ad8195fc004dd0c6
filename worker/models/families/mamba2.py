"""Mamba-2: every layer is a Mamba-2 layer without an MLP; there is no attention."""

from dataclasses import replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    VALUES_OF_ALL_HEADS,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
    add_mamba_expansion,
    recurrent_head_size,
)
from worker.models.families.nemotronh import BACKBONE_NAMES
from worker.models.layout import LayerNorms, num_layers_of

_LONGEST: Final = 1 << 17
"""Tokens of a sequence for which memory is planned: nothing in the model limits them."""


def spec(config: ConfigReader) -> ModelSpec:
    from worker.models.composite import NoPartSpec
    from worker.models.hybrids import MAMBA_SSM_KEYS, mamba2_mixer
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
        MAMBA_SSM_KEYS,
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
    config["head_dim"] = recurrent_head_size(metadata)
    add_mamba_expansion(config, metadata, "expand")
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
