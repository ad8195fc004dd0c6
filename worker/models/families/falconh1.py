"""Falcon-H1: attention and a Mamba-2 layer in parallel in every layer."""

from dataclasses import replace
from typing import TYPE_CHECKING

from worker.models.config_reader import ConfigReader
from worker.models.families.bamba import FEED_FORWARD_NAMES, FEED_FORWARD_NORMS
from worker.models.families.base import (
    MAMBA2_KEYS,
    VALUES_OF_ALL_HEADS,
    Family,
    Gguf,
    ModelSpec,
    add_heads_of_width,
)
from worker.models.layout import num_layers_of

if TYPE_CHECKING:
    from worker.layers.mamba2 import GateNorm


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec, with the factors of maximal update parametrisation."""
    from worker.models.common import decoder, gated_mlps, llama_attention
    from worker.models.composite import ParallelMixerSpec
    from worker.models.hybrids import Mamba2Keys, mamba2_mixer

    config.get("mlp_expansion_factor")  # intermediate_size is what it says
    attention = llama_attention(config, bias=config.flag("attention_bias", False))
    key_factor = config.number("key_multiplier", 1.0)
    attention = replace(attention, scale=attention.scale * key_factor)
    expanded = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    gate_norm: GateNorm = "none"
    norm_is_first = config.flag("mamba_norm_before_gate", True)
    if config.flag("mamba_rms_norm", False):
        gate_norm = "gated norm" if norm_is_first else "norm of gated"
    gate, x, b, c, time = _factors(config, "ssm_multipliers", 5)
    mamba = replace(
        mamba2_mixer(
            config,
            Mamba2Keys(),
            inner=config.integer("mamba_d_ssm", expanded),
            eps=config.number("rms_norm_eps", 1e-5),
            gate_norm=gate_norm,
        ),
        output_bias=config.flag("projectors_bias", False),
        factors=(gate, x, b, c, time),
    )
    mixer = ParallelMixerSpec(
        parts=(mamba, attention),
        input_factors=(
            config.number("ssm_in_multiplier", 1.0),
            config.number("attention_in_multiplier", 1.0),
        ),
        output_factors=(
            config.number("ssm_out_multiplier", 1.0),
            config.number("attention_out_multiplier", 1.0),
        ),
    )
    gate_factor, output_factor = _factors(config, "mlp_multipliers", 2)
    mlps = [
        replace(mlp, gate_factor=gate_factor, output_factor=output_factor)
        for mlp in gated_mlps(config)
    ]
    return replace(
        decoder(config, [mixer] * num_layers_of(config), mlps, eps=1e-5),
        norms=FEED_FORWARD_NORMS,
        hugging_face_names=FEED_FORWARD_NAMES,
        gguf_names=((".ffn_norm.weight", ".ffn_norm"),),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )


def _factors(config: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """Return a list of factors, by default all 1."""
    if config.get(key) is None:
        return (1.0,) * count
    factors = config.numbers(key)
    if len(factors) != count:
        raise config.refusal(key, list(factors), f"{count} numbers are needed")
    return factors


FAMILY = Family(
    models={"FalconH1ForCausalLM": "Falcon-H1"},
    model_types=("falcon_h1",),
    spec=spec,
    # The converter has multiplied the weights by all factors.
    gguf=Gguf(
        name="falcon-h1",
        keys={**MAMBA2_KEYS, VALUES_OF_ALL_HEADS: "mamba_d_ssm"},
        settings={"of_llama_cpp": True},
        add_heads=add_heads_of_width,
    ),
)
