"""Qwen 3.5 with a mixture of experts in every layer, text only."""

from worker.models.common import delta_rule_decoder, dense_and_sparse, qwen_mixture
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "qwen3_5_moe_text"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the weights of a token's experts sum to 1."""
    mixture = qwen_mixture(config, normalised=True)
    return delta_rule_decoder(
        config,
        architecture="Qwen3_5MoeForCausalLM",
        mlps=dense_and_sparse(config, mixture, lambda layer: True),
    )
