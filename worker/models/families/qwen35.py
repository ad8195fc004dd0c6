"""The language model of Qwen 3.5: three of four layers are gated delta-rule layers."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    DELTA_RULE_GGUF,
    IMAGE_SECTIONS,
    Family,
    ModelSpec,
    finish_delta_rule_of_images,
)


def spec(config: ConfigReader) -> ModelSpec:
    from worker.models.hybrids import delta_rule_decoder

    return delta_rule_decoder(config)


FAMILY = Family(
    models={"Qwen3_5ForCausalLM": "Qwen 3.5"},
    model_types=("qwen3_5_text",),
    spec=spec,
    gguf=replace(
        DELTA_RULE_GGUF,
        name="qwen35",
        other_keys=(*DELTA_RULE_GGUF.other_keys, IMAGE_SECTIONS),
        finish=finish_delta_rule_of_images,
    ),
)
