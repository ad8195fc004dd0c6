"""Mistral: every layer with a sliding window (the first 7B) or none (later ones, Nemo, Small)."""

from worker.models.common import (
    FULL,
    WINDOWED,
    layer_kinds,
    layer_windows,
    llama_like,
    window_from_config,
)
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "mistral"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec. A GGUF file of a Mistral calls itself "llama" and permutes alike."""
    window = window_from_config(config)
    kind = FULL if window is None else WINDOWED
    return llama_like(
        config,
        architecture="MistralForCausalLM",
        windows=layer_windows(
            config, layer_kinds(config, (kind,), lambda layer: kind), {kind: window}
        ),
        attention={"gguf_permutes_qk": True},
    )
