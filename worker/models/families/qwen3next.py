"""Qwen3-Next: three of four layers are gated delta-rule layers; a mixture of experts as MLP."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import DELTA_RULE_GGUF, GROUPED_INPUTS, SOFTMAX, Family, ModelSpec


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `norm_topk_prob` lets the weights of a token's experts sum to 1."""
    from worker.models.common import dense_and_sparse, qwen_mixture, qwen_sparse_layers
    from worker.models.hybrids import delta_rule_decoder

    mixture = qwen_mixture(config, normalised=config.flag("norm_topk_prob", True))
    mlps = dense_and_sparse(config, mixture, qwen_sparse_layers(config))
    return delta_rule_decoder(config, mlps, grouped=True)


FAMILY = Family(
    models={"Qwen3NextForCausalLM": "Qwen3-Next-80B-A3B"},
    model_types=("qwen3_next",),
    spec=spec,
    gguf=replace(
        DELTA_RULE_GGUF,
        name="qwen3next",
        gating=SOFTMAX,
        optional_keys=("feed_forward_length",),
        flags={GROUPED_INPUTS: "blk.0.ssm_in.weight"},
    ),
)
