"""SmolLM3: every fourth layer does not rotate queries and keys."""

from typing import Final

from worker.models.common import FULL, WINDOWED, layer_kinds, layer_windows, llama_like
from worker.models.config_reader import ConfigReader
from worker.models.rope import NoRope, Rope, rope_from_config
from worker.models.spec import ModelSpec

MODEL_TYPE = "smollm3"
_THETA: Final = 2_000_000.0


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `no_rope_layers` has a 1 for each layer that rotates."""
    config.get("max_window_layers")  # `layer_types` says which layers have a window
    num_layers = config.integer("num_hidden_layers")
    interval = config.integer("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers")
    if rotates is None:
        rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) != num_layers or not {0, 1} >= set(rotates):
        raise config.refusal("no_rope_layers", rotates, f"{num_layers} numbers 0 or 1 are needed")
    window = None
    if config.flag("use_sliding_window", False) and config.get("sliding_window") is not None:
        window = config.integer("sliding_window")
    kinds = layer_kinds(
        config,
        (FULL, WINDOWED) if window else (FULL,),
        lambda layer: FULL if rotates[layer] or window is None else WINDOWED,
    )
    rope: Rope = rope_from_config(config, config.integer("max_position_embeddings"), _THETA)
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        architecture="SmolLM3ForCausalLM",
        ropes=[rope if flag else NoRope() for flag in rotates],
        windows=layer_windows(config, kinds, {FULL: None, WINDOWED: window}),
        attention={"qkv_bias": bias, "output_bias": bias, "interleaved_in": ("gguf",)},
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
