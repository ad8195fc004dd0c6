"""Finds the family of a model.

To add one: a file here with MODEL_TYPE and `spec(ConfigReader) -> ModelSpec`, and a line in
`proto.prepared_model.FAMILIES`.
"""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from proto.errors import ModelError
from proto.prepared_model import PreparedModel, family_of
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec


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
    family = import_module(f"worker.models.{family_of(architectures[0])}")
    reader.must_be("model_type", family.MODEL_TYPE)
    spec: ModelSpec = family.spec(reader)
    return spec


def read_config(prepared: PreparedModel) -> dict[str, Any]:
    """Return the model's config.json; raises ModelError naming the file."""
    path = Path(prepared.folder, "config.json")
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object")
    return config
