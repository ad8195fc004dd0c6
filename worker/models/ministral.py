"""Ministral 8B: Mistral with windows in some layers, as `layer_types` says."""

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

MODEL_TYPE = "ministral"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every layer has the window."""
    window = window_from_config(config)
    kinds = layer_kinds(
        config,
        (FULL,) if window is None else (FULL, WINDOWED),
        lambda layer: FULL if window is None else WINDOWED,
    )
    return llama_like(
        config,
        architecture="MinistralForCausalLM",
        windows=layer_windows(config, kinds, {FULL: None, WINDOWED: window}),
        attention={"interleaved_in": ("gguf",)},
    )
