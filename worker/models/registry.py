"""The table of model families.

To add one: a file with MODEL_TYPE and `spec(ConfigReader) -> ModelSpec`, and a line here.
"""

import json
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from proto.errors import ModelError
from proto.prepared_model import PreparedModel
from worker.models import gemma3, llama, mistral, qwen2, qwen3
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

_FAMILIES: Final[Mapping[str, ModuleType]] = {
    "Gemma3ForCausalLM": gemma3,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Hugging Face style configuration.

    Raises ModelError naming key and value for an architecture that is not supported and for every
    key that changes the arithmetic in an unsupported way.
    """
    reader = ConfigReader(config)
    architectures = reader.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not isinstance(architectures[0], str)
    ):
        raise reader.refusal("architectures", architectures, "one architecture is needed")
    family = _FAMILIES.get(architectures[0])
    if family is None:
        raise reader.refusal(
            "architectures", architectures[0], f"supported: {', '.join(_FAMILIES)}"
        )
    reader.must_be("model_type", family.MODEL_TYPE)
    spec: ModelSpec = family.spec(reader)
    return spec


def spec_of(prepared: PreparedModel) -> ModelSpec:
    """Return the spec of a prepared model, from the config.json in its folder."""
    path = os.path.join(prepared.folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object")
    return spec_from_config(config)
