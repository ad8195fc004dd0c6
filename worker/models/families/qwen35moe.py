"""The language model of Qwen 3.5 with a mixture of experts in every layer."""

from typing import TYPE_CHECKING

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    DELTA_RULE_KEYS,
    EXPERT_KEYS,
    GATING,
    IMAGE_SECTIONS,
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
    """Return the spec; the weights of a token's experts sum to 1."""
    from worker.models.common import dense_and_sparse, qwen_mixture
    from worker.models.hybrids import delta_rule_decoder

    mixture = qwen_mixture(config, normalised=True)
    return delta_rule_decoder(config, dense_and_sparse(config, mixture, lambda layer: True))


FAMILY = Family(
    models={"Qwen3_5MoeForCausalLM": "Qwen 3.5 with experts"},
    model_types=("qwen3_5_moe_text",),
    spec=spec,
    gguf=Gguf(
        name="qwen35moe",
        keys={**EXPERT_KEYS, **DELTA_RULE_KEYS},
        other_keys=(VALUES_OF_ALL_HEADS, RECURRENT_LAYERS, IMAGE_SECTIONS),
        values={GATING: SOFTMAX},
        optional_keys=("feed_forward_length",),
        add_heads=add_partially_rotated_heads,
        finish=finish_delta_rule,
    ),
)
