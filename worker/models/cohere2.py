"""Cohere 2 (Command R7B, Command A): parallel blocks, rotation in layers with a window only."""

from typing import Final

from worker.models.common import FULL, WINDOWED, layer_kinds, layer_windows, llama_like
from worker.models.config_reader import ConfigReader
from worker.models.rope import NoRope, rope_from_config
from worker.models.spec import LayerNorms, ModelSpec

MODEL_TYPE = "cohere2"
_NORMS: Final = LayerNorms(attention=("input_layernorm", "attn_norm"))
_DEFAULT_LOGIT_SCALE: Final = 0.0625


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every fourth layer has full attention."""
    config.must_be("use_qk_norm", False)
    config.must_be("use_parallel_block", True)
    config.must_be("use_gated_activation", True)
    config.must_be("order_of_interleaved_layers", "local_attn_first")
    config.must_be("position_embedding_type", "rope_gptj")
    config.must_be("rotary_pct", 1)
    for key in ("use_embedding_sharing", "use_parallel_embedding"):
        config.get(key)
    pattern = 4
    for key in ("layer_switch", "_sliding_window_pattern", "sliding_window_pattern"):
        pattern = config.integer(key, pattern)
    kinds = layer_kinds(
        config, (FULL, WINDOWED), lambda layer: WINDOWED if (layer + 1) % pattern else FULL
    )
    windows = {FULL: None, WINDOWED: config.integer("sliding_window", 4096)}
    rope = rope_from_config(config, config.integer("max_position_embeddings"))
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        architecture="Cohere2ForCausalLM",
        ropes=[rope if kind == WINDOWED else NoRope() for kind in kinds],
        windows=layer_windows(config, kinds, windows),
        attention={
            "qkv_bias": bias,
            "output_bias": bias,
            "interleaved_in": ("safetensors", "gguf"),
        },
        norms=_NORMS,
        norm_kind="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        parallel_blocks=True,
        logit_scale=config.number("logit_scale", _DEFAULT_LOGIT_SCALE),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
