"""The language model of Qwen 3.5: three of four layers are gated delta-rule layers."""

from typing import TYPE_CHECKING

from worker.models.config_reader import ConfigReader
from worker.models.families.base import (
    DELTA_RULE_KEYS,
    IMAGE_SECTIONS,
    RECURRENT_LAYERS,
    VALUES_OF_ALL_HEADS,
    Family,
    Gguf,
    add_partially_rotated_heads,
    finish_delta_rule,
)

if TYPE_CHECKING:
    from worker.models.spec import ModelSpec


def spec(config: ConfigReader) -> "ModelSpec":
    from worker.models.hybrids import delta_rule_decoder

    return delta_rule_decoder(config)


FAMILY = Family(
    models={"Qwen3_5ForCausalLM": "Qwen 3.5"},
    model_types=("qwen3_5_text",),
    spec=spec,
    gguf=Gguf(
        name="qwen35",
        keys=DELTA_RULE_KEYS,
        other_keys=(VALUES_OF_ALL_HEADS, RECURRENT_LAYERS, IMAGE_SECTIONS),
        add_heads=add_partially_rotated_heads,
        finish=finish_delta_rule,
    ),
)
