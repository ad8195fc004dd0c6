"""Mistral: every layer with a sliding window (the first 7B) or none (later ones, Nemo, Small)."""

from worker.models.common import llama_like, window_from_config, windows_of_all_layers
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "mistral"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec. A GGUF file of a Mistral calls itself "llama" and permutes alike."""
    return llama_like(
        config,
        architecture="MistralForCausalLM",
        windows=windows_of_all_layers(config, window_from_config(config)),
        attention={"interleaved_in": ("gguf",)},
    )
