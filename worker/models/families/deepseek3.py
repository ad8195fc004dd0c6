"""DeepSeek-V3, R1 and Kimi K2: latent attention, and sigmoid scores, biased for the choice."""

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    GATING,
    KEY_LENGTH,
    LATENT_KEYS,
    SIGMOID,
    VALUE_LENGTH,
    YARN_LOG,
    Family,
    Gguf,
    ModelSpec,
    add_latent_heads,
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; rotated parts are interleaved in files unless `rope_interleave` is false."""
    from worker.models.common import latent_decoder, mixtures_above_dense_layers, sigmoid_router

    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    return latent_decoder(
        config,
        mixtures_above_dense_layers(config, sigmoid_router(config)),
        is_interleaved=config.flag("rope_interleave", True),
    )


FAMILY = Family(
    models={"DeepseekV3ForCausalLM": "DeepSeek-V3, R1, V3.1, Kimi K2, K2.5"},
    model_types=("deepseek_v3", "kimi_k2"),
    spec=spec,
    gguf=Gguf(
        name="deepseek2",
        is_marked=lambda keys: keys.get(GATING) == SIGMOID,
        keys=LATENT_KEYS,
        other_keys=(KEY_LENGTH, VALUE_LENGTH, YARN_LOG),
        gating=SIGMOID,
        settings={"norm_topk_prob": False},
        add_heads=add_latent_heads,
    ),
)
