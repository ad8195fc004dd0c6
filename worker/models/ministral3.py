"""Ministral 3: Mistral's layers, with queries that grow with their position beyond the length that
YaRN extends.
"""

from worker.models.common import llama_like, window_from_config, windows_of_all_layers
from worker.models.config_reader import ConfigReader
from worker.models.rope import rope_from_config
from worker.models.spec import ModelSpec

MODEL_TYPE = "ministral3"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `llama_4_scaling_beta` of the rotary embedding scales queries."""
    num_layers = config.integer("num_hidden_layers")
    max_position = config.integer("max_position_embeddings")
    rope = rope_from_config(config, max_position, scales_queries=True)
    return llama_like(
        config,
        architecture="Ministral3ForCausalLM",
        head_dim=config.integer("head_dim", 128),
        ropes=[rope] * num_layers,
        windows=windows_of_all_layers(config, window_from_config(config)),
        attention={"interleaved_in": ("gguf",)},
        norm_eps=config.number("rms_norm_eps", 1e-5),
    )
