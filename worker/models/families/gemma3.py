"""Gemma 3, text only: windows in five of six layers, norms before and after each part, two rotary
bases. EmbeddingGemma attends in both directions.
"""

from dataclasses import replace
from typing import Any, Final

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    DEFAULT_THETA,
    WINDOW,
    Family,
    Gguf,
    GgufMetadata,
    ModelSpec,
    add_query_scale,
    set_window_theta,
)
from worker.models.layout import FULL, SANDWICH_NORMS, WINDOWED, layer_windows, window_kinds
from worker.models.rope import KindOfRope, ropes_by_kind

_PATTERN: Final = 6
"""Every sixth layer has full attention, in GGUF files and where config.json does not say."""
_THETA: Final = 1_000_000.0
_ROPES: Final = (
    KindOfRope(FULL, "rope_theta", _THETA, scaled=True),
    KindOfRope(WINDOWED, "rope_local_base_freq", DEFAULT_THETA, scaled=False),
)
_GGUF_WINDOW: Final = 4096
"""Of GGUF files that do not say it."""


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every `sliding_window_pattern`th layer has full
    attention.
    """
    from worker.models.common import attention_decoder, gated_mlps, llama_attention

    config.must_be("hidden_activation", "gelu_pytorch_tanh")
    bidirectional = config.flag("use_bidirectional_attention", False)
    pattern = config.integer("_sliding_window_pattern", _PATTERN)
    pattern = config.integer("sliding_window_pattern", pattern)
    window = config.integer("sliding_window")
    if bidirectional:
        window = window // 2 + 1  # the configuration counts both sides
    kinds = window_kinds(config, window, lambda layer: (layer + 1) % pattern != 0)
    windows = layer_windows(config, kinds, window)
    ropes = ropes_by_kind(config, _ROPES, config.integer("max_position_embeddings"))
    attention = replace(
        llama_attention(
            config,
            head_dim=config.integer("head_dim", 256),
            rope=ropes[FULL],
            bias=config.flag("attention_bias", False),
        ),
        scale=config.integer("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=True,
        bidirectional=bidirectional,
    )
    layer_ropes, mlps = [ropes[kind] for kind in kinds], gated_mlps(config, "gelu_tanh")
    return replace(
        attention_decoder(config, attention, windows, layer_ropes, mlps=mlps, tied=True),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        norms=SANDWICH_NORMS,
        norms_add_one=True,
    )


def _finish(config: dict[str, Any], metadata: GgufMetadata) -> None:
    """Add the windows of five of six layers, which rotate with a base of their own."""
    num_layers = metadata.keys["block_count"]
    config.setdefault("sliding_window", _GGUF_WINDOW)
    config["layer_types"] = [
        WINDOWED if (layer + 1) % _PATTERN else FULL for layer in range(num_layers)
    ]
    set_window_theta(config, DEFAULT_THETA)
    if metadata.only_pools:
        config["use_bidirectional_attention"] = True
    add_query_scale(config, is_27b=num_layers == 62)


FAMILY = Family(
    models={"Gemma3ForCausalLM": "Gemma 3, EmbeddingGemma"},
    model_types=("gemma3_text",),
    spec=spec,
    gguf=Gguf(
        name="gemma3",
        pooling_name="gemma-embedding",
        keys={WINDOW: "sliding_window"},
        rope_theta=_THETA,
        finish=_finish,
    ),
)
