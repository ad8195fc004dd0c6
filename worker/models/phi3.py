"""Phi-3, Phi-3.5 and Phi-4: stacked projections; LongRoPE and partial rotation in some sizes."""

from worker.models.common import llama_like, window_from_config, windows_of_all_layers
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "phi3"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; requests beyond the original length select the long factors of LongRoPE."""
    config.must_be("attention_bias", False)
    config.must_be("lm_head_bias", False)
    config.must_be("full_attn_mod", 1)
    return llama_like(
        config,
        architecture="Phi3ForCausalLM",
        partial_rotary_factor=1.0,
        windows=windows_of_all_layers(config, window_from_config(config)),
        attention={"stacked_qkv": True},
        stacked_gate_up=True,
    )
