"""DeepSeek-V2: latent attention, and softmax scores of experts, by groups in the large model."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    KEY_LENGTH,
    LATENT_KEYS,
    SOFTMAX,
    VALUE_LENGTH,
    YARN_LOG,
    Family,
    Gguf,
    ModelSpec,
    add_latent_heads,
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; experts are chosen among all, or with `group_limited_greedy` by groups."""
    from worker.models.common import (
        latent_decoder,
        mixtures_above_dense_layers,
        router_from_config,
    )

    config.must_be("scoring_func", "softmax")
    config.must_be("norm_topk_prob", False)
    config.must_be("topk_method", "greedy", "group_limited_greedy")
    is_grouped = config.get("topk_method") == "group_limited_greedy"
    if not is_grouped:
        config.must_be("n_group", 1)
        config.must_be("topk_group", 1)
    router = replace(
        router_from_config(config, best_of_group=1),
        normalised=False,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    return latent_decoder(config, mixtures_above_dense_layers(config, router))


FAMILY = Family(
    models={"DeepseekV2ForCausalLM": "DeepSeek-V2, V2.5, V2-Lite, Coder-V2"},
    model_types=("deepseek_v2",),
    spec=spec,
    gguf=Gguf(
        name="deepseek2",
        keys=LATENT_KEYS,
        other_keys=(KEY_LENGTH, VALUE_LENGTH, YARN_LOG),
        gating=SOFTMAX,
        add_heads=add_latent_heads,
    ),
)
