"""Mistral: every layer with a sliding window (the first 7B) or none (later ones, Nemo, Small)."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family, Gguf, ModelSpec
from worker.models.layout import window_from_config, windows_of_all_layers


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec. A GGUF file of a Mistral calls itself "llama" and permutes alike."""
    from worker.models.common import attention_decoder, llama_attention

    attention = replace(llama_attention(config), rope_interleaved_in=("gguf",))
    windows = windows_of_all_layers(config, window_from_config(config))
    return attention_decoder(config, attention, windows)


FAMILY = Family(
    models={"MistralForCausalLM": "Mistral 7B, Nemo, Small, Large, Ministral"},
    model_types=("mistral",),
    spec=spec,
    gguf=Gguf(name="llama"),
)
