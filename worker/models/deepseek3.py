"""DeepSeek-V3, R1 and Kimi K2: latent attention, and sigmoid scores, biased for the choice."""

from worker.layers.router import RouterSpec
from worker.models.common import latent_decoder, router_from_config
from worker.models.config_reader import ConfigReader
from worker.models.deepseek2 import mixtures_above_dense_layers
from worker.models.spec import ModelSpec

MODEL_TYPE = ("deepseek_v3", "kimi_k2")


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; rotated parts are interleaved in files unless `rope_interleave` is false."""
    config.must_be("scoring_func", "sigmoid")
    return latent_decoder(
        config,
        architecture="DeepseekV3ForCausalLM",
        mlps=mixtures_above_dense_layers(config, sigmoid_router(config)),
        is_interleaved=config.flag("rope_interleave", True),
    )


def sigmoid_router(config: ConfigReader) -> RouterSpec:
    """Return a router with a bias for balance in place of a loss (DeepSeek-V3, section 2.1.2)."""
    config.must_be("topk_method", "noaux_tc")
    return router_from_config(
        config,
        scoring="sigmoid",
        selection_bias=True,
        normalised=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
