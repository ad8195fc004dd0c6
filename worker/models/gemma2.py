"""Gemma 2: windows in every other layer, norms before and after each part, both soft caps."""

from typing import Final

from worker.models.common import FULL, WINDOWED, layer_kinds, layer_windows, llama_like
from worker.models.config_reader import ConfigReader
from worker.models.spec import SANDWICH_NORMS, ModelSpec

MODEL_TYPE = "gemma2"
_DEFAULT_HEAD_DIM: Final = 256
_DEFAULT_QUERY_SCALAR: Final = 256


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; a soft cap that is null is none."""
    config.must_be("hidden_activation", "gelu_pytorch_tanh")
    config.must_be("hidden_act", "gelu_pytorch_tanh")
    config.must_be("use_bidirectional_attention", False)
    config.get("sliding_window_size")  # beside `sliding_window` in the first files
    kinds = layer_kinds(config, (FULL, WINDOWED), lambda layer: FULL if layer % 2 else WINDOWED)
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        architecture="Gemma2ForCausalLM",
        head_dim=config.integer("head_dim", _DEFAULT_HEAD_DIM),
        windows=layer_windows(
            config, kinds, {FULL: None, WINDOWED: config.integer("sliding_window", 4096)}
        ),
        attention={
            "scale": config.integer("query_pre_attn_scalar", _DEFAULT_QUERY_SCALAR) ** -0.5,
            "soft_cap": config.soft_cap("attn_logit_softcapping", 50.0),
            "qkv_bias": bias,
            "output_bias": bias,
        },
        embedding_scale=config.integer("hidden_size") ** 0.5,
        activation="gelu_tanh",
        norms=SANDWICH_NORMS,
        norms_add_one=True,
        logit_soft_cap=config.soft_cap("final_logit_softcapping", 30.0),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
