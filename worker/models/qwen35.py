"""Qwen 3.5, text only: three of four layers are gated delta-rule layers."""

from worker.models.common import delta_rule_decoder
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = "qwen3_5_text"


def spec(config: ConfigReader) -> ModelSpec:
    return delta_rule_decoder(config, architecture="Qwen3_5ForCausalLM")
