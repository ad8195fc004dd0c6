"""Cohere 2 (Command R7B, Command A): parallel blocks, rotation in layers with a window only."""

from dataclasses import replace
from typing import Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import NORM_EPS, WINDOW, Family, Gguf, ModelSpec
from worker.models.layout import WINDOWED, LayerNorms, layer_windows, window_kinds
from worker.models.rope import NoRope

_NORMS: Final = LayerNorms(attention=("input_layernorm", "attn_norm"))


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every fourth layer has full attention."""
    from worker.models.common import attention_decoder, llama_attention

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
    window = config.integer("sliding_window", 4096)
    kinds = window_kinds(config, window, lambda layer: (layer + 1) % pattern != 0)
    windows = layer_windows(config, kinds, window)
    attention = replace(
        llama_attention(config, bias=config.flag("attention_bias", False)),
        rope_interleaved_in=("safetensors", "gguf"),
    )
    ropes = [attention.rope if kind == WINDOWED else NoRope() for kind in kinds]
    return replace(
        attention_decoder(config, attention, windows, ropes, tied=True),
        norms=_NORMS,
        norm_type="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        parallel_blocks=True,
        logit_scale=config.number("logit_scale", 0.0625),
    )


FAMILY = Family(
    models={"Cohere2ForCausalLM": "Command R7B, Command A"},
    model_types=("cohere2",),
    spec=spec,
    gguf=Gguf(
        name="cohere2",
        keys={NORM_EPS: "layer_norm_eps", "logit_scale": "logit_scale", WINDOW: "sliding_window"},
    ),
)
