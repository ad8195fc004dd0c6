"""Llama (1, 2, 3, 3.x, SmolLM2 and other models of that architecture)."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family, Gguf, ModelSpec


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `attention_bias` gives all four projections of the attention a bias."""
    from worker.models.common import attention_decoder, llama_attention

    attention = replace(
        llama_attention(config, bias=config.flag("attention_bias", False)),
        rope_interleaved_in=("gguf",),
    )
    return attention_decoder(config, attention)


FAMILY = Family(
    models={"LlamaForCausalLM": "Llama 1 to 3.3, SmolLM 2 and other models of that architecture"},
    model_types=("llama",),
    spec=spec,
    gguf=Gguf(name="llama"),
)
