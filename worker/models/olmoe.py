"""OLMoE: small experts, and norms over all query heads and all key heads together."""

from worker.models.common import dense_and_sparse, llama_like, router_from_config
from worker.models.config_reader import ConfigReader
from worker.models.moe import MoeSpec
from worker.models.spec import ModelSpec

MODEL_TYPE = "olmoe"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `norm_topk_prob` lets the weights of a token's experts sum to 1."""
    config.must_be("hidden_act", "silu", "swish")
    mixture = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        router=router_from_config(config, normalised=config.flag("norm_topk_prob", False)),
    )
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        architecture="OlmoeForCausalLM",
        attention={"qkv_bias": bias, "output_bias": bias, "joint_qk_norm": True},
        mlps=dense_and_sparse(config, mixture, lambda layer: True),
    )
