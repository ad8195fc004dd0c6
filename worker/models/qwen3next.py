"""Qwen3-Next: three of four layers are gated delta-rule layers; a mixture of experts as MLP."""

from worker.models.common import (
    delta_rule_decoder,
    dense_and_sparse,
    qwen_mixture,
    qwen_sparse_layers,
)
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "qwen3_next"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `norm_topk_prob` lets the weights of a token's experts sum to 1."""
    mixture = qwen_mixture(config, normalised=config.flag("norm_topk_prob", True))
    return delta_rule_decoder(
        config,
        architecture="Qwen3NextForCausalLM",
        mlps=dense_and_sparse(config, mixture, qwen_sparse_layers(config)),
        grouped_inputs=True,
    )
