"""ERNIE 4.5, dense: Llama's layers whose heads rotate in interleaved pairs."""

from typing import Final

from worker.models.common import llama_like
from worker.models.config_reader import ConfigReader
from worker.models.mlp import MlpSpec
from worker.models.rope import rope_from_config
from worker.models.spec import ModelSpec

MODEL_TYPE = "ernie4_5"
_THETA: Final = 500_000.0


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `use_bias` is for all linear layers."""
    config.must_be("hidden_act", "silu", "swish")
    bias = config.flag("use_bias", False)
    num_layers = config.integer("num_hidden_layers")
    mlp = MlpSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        bias=bias,
    )
    rope = rope_from_config(config, config.integer("max_position_embeddings"), _THETA)
    return llama_like(
        config,
        architecture="Ernie4_5ForCausalLM",
        head_dim=config.integer("head_dim", 128),
        ropes=[rope] * num_layers,
        attention={
            "qkv_bias": bias,
            "output_bias": bias,
            "interleaved_in": ("safetensors", "gguf"),
        },
        mlps=[mlp] * num_layers,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
