"""Mistral without a sliding window (7B from v0.2 on, Nemo, Small)."""

from worker.models.common import llama_like, refuse_sliding_window
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "mistral"


def spec(config: ConfigReader) -> ModelSpec:
    """No biases; a GGUF file of a Mistral calls itself "llama" and permutes like one."""
    refuse_sliding_window(config)
    return llama_like(config, architecture="MistralForCausalLM", gguf_permutes_qk=True)
