"""OLMoE: small experts, and norms over all query heads and all key heads together."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import EXPERT_KEYS, GATING, SOFTMAX, Family, Gguf, ModelSpec


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `norm_topk_prob` lets the weights of a token's experts sum to 1."""
    from worker.models.common import (
        attention_layers,
        decoder,
        dense_and_sparse,
        llama_attention,
        router_from_config,
    )
    from worker.models.moe import MoeSpec

    config.must_be("hidden_act", "silu", "swish")
    normalised = config.flag("norm_topk_prob", False)
    mixture = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        router=replace(router_from_config(config), normalised=normalised),
    )
    attention = replace(
        llama_attention(config, bias=config.flag("attention_bias", False)), joint_qk_norm=True
    )
    return decoder(
        config,
        attention_layers(config, attention),
        dense_and_sparse(config, mixture, lambda layer: True),
    )


FAMILY = Family(
    models={"OlmoeForCausalLM": "OLMoE-1B-7B"},
    model_types=("olmoe",),
    spec=spec,
    gguf=Gguf(name="olmoe", keys=EXPERT_KEYS, values={GATING: SOFTMAX}),
)
