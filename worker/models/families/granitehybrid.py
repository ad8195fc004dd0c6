"""Granite 4 hybrid: most layers are Mamba-2 layers; a mixture of experts, or a dense MLP."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    MAMBA2_KEYS,
    ROTATES,
    SOFTMAX,
    VALUES_OF_ALL_HEADS,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
    add_heads_of_width,
    add_mamba_expansion,
    layers_with_attention,
)
from worker.models.families.granite import GRANITE_KEYS, granite_attention, granite_decoder
from worker.models.families.granitemoe import granite_mixture
from worker.models.layout import FULL, LINEAR

if TYPE_CHECKING:
    from worker.models.parts import PartSpec

_NAMES: Final = (
    ("mlp.gate_up_proj", "shared_mlp.input_linear"),
    ("mlp.down_proj", "shared_mlp.output_linear"),
)
"""The names of the dense MLP, which is the shared expert of models with others."""


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; queries and keys rotate only if `position_embedding_type` says so."""
    from worker.models.hybrids import Mamba2Keys, hybrid_kinds, hybrid_mixers, mamba2_mixer
    from worker.models.mlp import MlpSpec
    from worker.models.rope import NoRope

    config.must_be("hidden_act", "silu", "swish")
    config.must_be("normalization_function", "rmsnorm")
    hidden_size = config.integer("hidden_size")
    kinds = hybrid_kinds(config, (LINEAR, FULL), lambda layer: LINEAR)
    attention = granite_attention(config)
    config.must_be("position_embedding_type", "rope", "nope")
    if config.get("position_embedding_type") != "rope":
        attention = replace(attention, rope=NoRope(), rope_interleaved_in=())
    mamba = mamba2_mixer(
        config,
        Mamba2Keys(),
        inner=config.integer("mamba_expand", 2) * hidden_size,
        eps=config.number("rms_norm_eps", 1e-6),
    )
    mixers = hybrid_mixers(config, kinds, attention, mamba)
    shared_size = config.integer("shared_intermediate_size", 1024)
    mlp: PartSpec
    if config.integer("num_local_experts", 8, least=0):
        mixture = granite_mixture(config)
        names = replace(
            mixture.names,
            shared_gate_up="shared_mlp.input_linear",
            shared_down="shared_mlp.output_linear",
        )
        mlp = replace(mixture, shared_size=shared_size, names=names)
    else:
        config.get("intermediate_size")
        config.get("num_experts_per_tok")
        mlp = MlpSpec(
            hidden_size=hidden_size,
            intermediate_size=shared_size,
            stacked_gate_up=True,
            stacked_in_gguf=False,
        )
    return replace(granite_decoder(config, mixers, [mlp] * len(kinds)), hugging_face_names=_NAMES)


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the kinds of layers and the channels of Mamba-2 layers."""
    has_attention = layers_with_attention(config, metadata)
    config["layer_types"] = [FULL if each else LINEAR for each in has_attention]
    config["position_embedding_type"] = "rope" if metadata.keys.get(ROTATES) else "nope"
    config.setdefault("num_local_experts", 0)
    add_mamba_expansion(config, metadata)
    config["of_llama_cpp"] = True


FAMILY = Family(
    models={"GraniteMoeHybridForCausalLM": "Granite 4 hybrid, with and without experts"},
    model_types=("granitemoehybrid",),
    spec=spec,
    gguf=Gguf(
        name="granitehybrid",
        keys={
            **GRANITE_KEYS,
            **MAMBA2_KEYS,
            "expert_count": "num_local_experts",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        other_keys=(VALUES_OF_ALL_HEADS,),
        gating=SOFTMAX,
        add_heads=add_heads_of_width,
        finish=_finish,
    ),
)
