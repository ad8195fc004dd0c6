"""OLMoE: small experts, and norms over all query heads and all key heads together."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import SOFTMAX, Family, Gguf, ModelSpec


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `norm_topk_prob` lets the weights of a token's experts sum to 1."""
    from worker.models.common import (
        attention_decoder,
        dense_and_sparse,
        llama_attention,
        moe_spec,
        router_from_config,
    )

    config.must_be("hidden_act", "silu", "swish")
    normalised = config.flag("norm_topk_prob", False)
    router = replace(router_from_config(config), normalised=normalised)
    experts = moe_spec(config, router, "intermediate_size")
    attention = replace(
        llama_attention(config, bias=config.flag("attention_bias", False)), joint_qk_norm=True
    )
    mlps = dense_and_sparse(config, experts, lambda layer: True)
    return attention_decoder(config, attention, mlps=mlps)


FAMILY = Family(
    models={"OlmoeForCausalLM": "OLMoE-1B-7B"},
    model_types=("olmoe",),
    spec=spec,
    gguf=Gguf(name="olmoe", gating=SOFTMAX),
)
