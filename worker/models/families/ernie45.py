"""ERNIE 4.5, dense: Llama's layers whose heads rotate in interleaved pairs."""

from dataclasses import replace
from typing import Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import QUERY_BIAS, Family, Gguf, ModelSpec
from worker.models.layout import num_layers_of
from worker.models.rope import rope_from_config

_THETA: Final = 500_000.0


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `use_bias` is for all linear layers."""
    from worker.models.common import attention_decoder, llama_attention
    from worker.models.mlp import MlpSpec

    config.must_be("hidden_act", "silu", "swish")
    bias = config.flag("use_bias", False)
    rope = rope_from_config(config, config.integer("max_position_embeddings"), _THETA)
    attention = replace(
        llama_attention(config, head_dim=config.integer("head_dim", 128), rope=rope, bias=bias),
        rope_interleaved_in=("safetensors", "gguf"),
    )
    mlp = MlpSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        bias=bias,
    )
    mlps = [mlp] * num_layers_of(config)
    return attention_decoder(config, attention, mlps=mlps, eps=1e-5, tied=True)


FAMILY = Family(
    models={"Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B"},
    model_types=("ernie4_5",),
    spec=spec,
    gguf=Gguf(name="ernie4_5", flags={"use_bias": QUERY_BIAS}),
)
