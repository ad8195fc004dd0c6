"""SmolLM3: every fourth layer does not rotate queries and keys."""

from dataclasses import replace
from typing import Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family, Gguf, ModelSpec
from worker.models.layout import layer_windows, num_layers_of, window_from_config, window_kinds
from worker.models.rope import NoRope, rope_from_config

_THETA: Final = 2_000_000.0


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `no_rope_layers` has a 1 for each layer that rotates."""
    from worker.models.common import attention_decoder, llama_attention

    config.get("max_window_layers")  # `layer_types` says which layers have a window
    num_layers = num_layers_of(config)
    interval = config.integer("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers")
    if rotates is None:
        rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) != num_layers or not {0, 1} >= set(rotates):
        raise config.refusal("no_rope_layers", rotates, f"{num_layers} numbers 0 or 1 are needed")
    window = window_from_config(config) if config.flag("use_sliding_window", False) else None
    kinds = window_kinds(config, window, lambda layer: not rotates[layer])
    rope = rope_from_config(config, config.integer("max_position_embeddings"), _THETA)
    attention = replace(
        llama_attention(config, rope=rope, bias=config.flag("attention_bias", False)),
        rope_interleaved_in=("gguf",),
    )
    windows = layer_windows(config, kinds, window)
    ropes = [rope if flag else NoRope() for flag in rotates]
    return attention_decoder(config, attention, windows, ropes, tied=True)


FAMILY = Family(
    models={"SmolLM3ForCausalLM": "SmolLM3"},
    model_types=("smollm3",),
    spec=spec,
    gguf=Gguf(name="smollm3"),
)
