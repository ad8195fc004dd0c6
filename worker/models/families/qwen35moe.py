"""The language model of Qwen 3.5 with a mixture of experts in every layer."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    DELTA_RULE_GGUF,
    IMAGE_SECTIONS,
    SOFTMAX,
    Family,
    ModelSpec,
    finish_delta_rule_of_images,
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the weights of a token's experts sum to 1."""
    from worker.models.common import dense_and_sparse, qwen_mixture
    from worker.models.hybrids import delta_rule_decoder

    mixture = qwen_mixture(config, normalised=True)
    return delta_rule_decoder(config, dense_and_sparse(config, mixture, lambda layer: True))


FAMILY = Family(
    models={"Qwen3_5MoeForCausalLM": "Qwen 3.5 with experts"},
    model_types=("qwen3_5_moe_text",),
    spec=spec,
    gguf=replace(
        DELTA_RULE_GGUF,
        name="qwen35moe",
        other_keys=(*DELTA_RULE_GGUF.other_keys, IMAGE_SECTIONS),
        finish=finish_delta_rule_of_images,
        gating=SOFTMAX,
        optional_keys=("feed_forward_length",),
    ),
)
