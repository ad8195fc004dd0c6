"""Gemma 3, text only: windows in five of six layers, norms before and after each part, two rotary
bases. EmbeddingGemma attends in both directions.
"""

from typing import Final

from worker.models.common import FULL, WINDOWED, layer_kinds, layer_windows, llama_like
from worker.models.config_reader import ConfigReader
from worker.models.rope import KindOfRope, ropes_by_kind
from worker.models.spec import SANDWICH_NORMS, ModelSpec

MODEL_TYPE = "gemma3_text"
_DEFAULT_HEAD_DIM: Final = 256
_DEFAULT_QUERY_SCALAR: Final = 256
_DEFAULT_PATTERN: Final = 6
_ROPES: Final = (
    KindOfRope(FULL, "rope_theta", 1_000_000.0, scaled=True),
    KindOfRope(WINDOWED, "rope_local_base_freq", 10_000.0, scaled=False),
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; without `layer_types` every `sliding_window_pattern`th layer has full
    attention.
    """
    config.must_be("hidden_activation", "gelu_pytorch_tanh")
    bidirectional = config.flag("use_bidirectional_attention", False)
    hidden_size = config.integer("hidden_size")
    pattern = config.integer("_sliding_window_pattern", _DEFAULT_PATTERN)
    pattern = config.integer("sliding_window_pattern", pattern)
    kinds = layer_kinds(
        config,
        (FULL, WINDOWED),
        lambda layer: WINDOWED if (layer + 1) % pattern else FULL,
    )
    window = config.integer("sliding_window")
    if bidirectional:
        window = window // 2 + 1  # the configuration counts both sides
    windows = {FULL: None, WINDOWED: window}
    ropes = ropes_by_kind(config, _ROPES, config.integer("max_position_embeddings"))
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        architecture="Gemma3ForCausalLM",
        head_dim=config.integer("head_dim", _DEFAULT_HEAD_DIM),
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=layer_windows(config, kinds, windows),
        attention={
            "scale": config.integer("query_pre_attn_scalar", _DEFAULT_QUERY_SCALAR) ** -0.5,
            "qkv_bias": bias,
            "output_bias": bias,
            "qk_norm": True,
            "bidirectional": bidirectional,
        },
        embedding_scale=hidden_size**0.5,
        activation="gelu_tanh",
        norms=SANDWICH_NORMS,
        norms_add_one=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
