"""Granite 3: factors of the embedding, of what each part adds to the residual, and of logits."""

from typing import Any

from worker.models.common import llama_like
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "granite"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec of a model with the `factors` of Granite."""
    return llama_like(config, architecture="GraniteForCausalLM", **factors(config))


def factors(config: ConfigReader) -> dict[str, Any]:
    """Return arguments of llama_like for a model whose residual is divided by a factor.

    x + m · part(norm(x)), divided by m, is x / m + part(norm(x)); and the norm of x with some eps
    is that of x / m with eps / m². So embedding and eps contain m, `residual_multiplier`.
    """
    multiplier = config.number("residual_multiplier", 1.0)
    bias = config.flag("attention_bias", False)
    return {
        "attention": {
            "scale": config.number("attention_multiplier", 1.0),
            "qkv_bias": bias,
            "output_bias": bias,
            "interleaved_in": ("gguf",),
        },
        "norm_eps": config.number("rms_norm_eps", 1e-6) / multiplier**2,
        "embedding_scale": config.number("embedding_multiplier", 1.0) / multiplier,
        "logit_scale": 1.0 / config.number("logits_scaling", 1.0),
    }
