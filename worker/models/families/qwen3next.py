"""Qwen3-Next: three of four layers are gated delta-rule layers; a mixture of experts as MLP."""

from typing import TYPE_CHECKING

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    DELTA_RULE_KEYS,
    EXPERT_KEYS,
    GATING,
    GROUPED_INPUTS,
    RECURRENT_LAYERS,
    SOFTMAX,
    VALUES_OF_ALL_HEADS,
    Family,
    Gguf,
    add_partially_rotated_heads,
    finish_delta_rule,
)

if TYPE_CHECKING:
    from worker.models.spec import ModelSpec


def spec(config: ConfigReader) -> "ModelSpec":
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
    gguf=Gguf(
        name="qwen3next",
        keys={**EXPERT_KEYS, **DELTA_RULE_KEYS},
        other_keys=(VALUES_OF_ALL_HEADS, RECURRENT_LAYERS),
        values={GATING: SOFTMAX},
        optional_keys=("feed_forward_length",),
        flags={GROUPED_INPUTS: "blk.0.ssm_in.weight"},
        add_heads=add_partially_rotated_heads,
        finish=finish_delta_rule,
    ),
)
