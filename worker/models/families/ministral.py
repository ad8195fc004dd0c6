"""Ministral 8B: Mistral with windows in some layers, as `layer_types` says."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family, Gguf, ModelSpec
from worker.models.layout import layer_windows, window_from_config, window_kinds


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every layer has the window."""
    from worker.models.common import attention_decoder, llama_attention

    window = window_from_config(config)
    kinds = window_kinds(config, window, lambda layer: True)
    attention = replace(llama_attention(config), rope_interleaved_in=("gguf",))
    windows = layer_windows(config, kinds, window)
    return attention_decoder(config, attention, windows)


FAMILY = Family(
    models={"MinistralForCausalLM": "Ministral 8B with windows"},
    model_types=("ministral",),
    spec=spec,
    gguf=Gguf(name="llama"),
)
