"""Granite 3: factors of the embedding, of what each part adds to the residual, and of logits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family, Gguf, ModelSpec

if TYPE_CHECKING:
    from worker.models.attention import AttentionSpec
    from worker.models.parts import PartSpec

GRANITE_KEYS: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}


def spec(config: ConfigReader) -> ModelSpec:
    from worker.models.common import attention_layers, gated_mlps

    layers = attention_layers(config, granite_attention(config))
    return granite_decoder(config, layers, gated_mlps(config))


def granite_attention(config: ConfigReader) -> "AttentionSpec":
    """Return the attention of a layer, with a scale of its own."""
    from worker.models.common import llama_attention

    return replace(
        llama_attention(config, bias=config.flag("attention_bias", False)),
        scale=config.number("attention_multiplier", 1.0),
        rope_interleaved_in=("gguf",),
    )


def granite_decoder(
    config: ConfigReader, mixers: Sequence["PartSpec"], mlps: Sequence["PartSpec"]
) -> ModelSpec:
    """Return the spec of a decoder whose residual is divided by a factor.

    x + m · part(norm(x)), divided by m, is x / m + part(norm(x)); and the norm of x with some eps
    is that of x / m with eps / m². So embedding and eps contain m, `residual_multiplier`.
    """
    from worker.models.common import decoder

    multiplier = config.number("residual_multiplier", 1.0)
    return replace(
        decoder(config, mixers, mlps),
        norm_eps=config.number("rms_norm_eps", 1e-6) / multiplier**2,
        embedding_scale=config.number("embedding_multiplier", 1.0) / multiplier,
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


FAMILY = Family(
    models={"GraniteForCausalLM": "Granite 3"},
    model_types=("granite",),
    spec=spec,
    gguf=Gguf(name="granite", keys=GRANITE_KEYS),
)
