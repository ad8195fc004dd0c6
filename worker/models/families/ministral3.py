"""Ministral 3: Mistral's layers, with queries that grow with their position beyond the length that
YaRN extends.
"""

from dataclasses import replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import YARN_LOG, Family, Gguf, GgufMetadata, ModelSpec
from worker.models.layout import window_from_config, windows_of_all_layers
from worker.models.rope import rope_from_config

_ROPE_KEYS: Final = {
    "attention.temperature_scale": "llama_4_scaling_beta",
    YARN_LOG: "mscale_all_dim",
}
"""Metadata key → key of rope_parameters with the same meaning."""


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `llama_4_scaling_beta` of the rotary embedding scales queries."""
    from worker.models.common import attention_decoder, llama_attention

    attention = llama_attention(
        config,
        head_dim=config.integer("head_dim", 128),
        rope=rope_from_config(
            config, config.integer("max_position_embeddings"), scales_queries=True
        ),
    )
    windows = windows_of_all_layers(config, window_from_config(config))
    attention = replace(attention, rope_interleaved_in=("gguf",))
    return attention_decoder(config, attention, windows, eps=1e-5)


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add how queries grow with positions, and the scale of YaRN."""
    config["rope_parameters"] |= metadata.renamed(_ROPE_KEYS)
    if YARN_LOG in metadata.keys:
        config["rope_parameters"]["mscale"] = 1.0


FAMILY = Family(
    models={"Ministral3ForCausalLM": "Ministral 3"},
    model_types=("ministral3",),
    spec=spec,
    gguf=Gguf(name="mistral3", other_keys=tuple(_ROPE_KEYS), finish=_finish),
)
