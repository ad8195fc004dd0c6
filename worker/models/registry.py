"""Finds the family of a model, or lets transformers' code run it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proto.errors import ConfigError, ModelError
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ModelImpl, ServeConfig
from proto.settings.pooler_config import pooler_of
from worker.models.config_reader import ConfigReader
from worker.models.families import FAMILIES, family_of
from worker.models.spec import ModelSpec


def spec_from_config(config: Mapping[str, Any], max_model_len: int | None = None) -> ModelSpec:
    """Return the spec of a Hugging Face style configuration.

    max_model_len: see ConfigReader. Raises ModelError naming key and value for an architecture that
    is not supported and for every key that changes the arithmetic in an unsupported way.
    """
    reader = ConfigReader(config, max_model_len=max_model_len)
    architectures = reader.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not isinstance(architectures[0], str)
    ):
        raise reader.refusal("architectures", architectures, "one architecture is needed")
    family = family_of(architectures[0])
    reader.must_be("model_type", *family.model_types)
    spec = family.spec(reader)
    reader.refuse_unread_keys()
    return spec


def model_spec(
    prepared: PreparedModel, config: ServeConfig, head_dims: tuple[int, ...] = ()
) -> ModelSpec:
    """Return the spec of a prepared model, with what the settings change about it.

    head_dims: of the device, for transformers' code: see TransformersSpec. Raises ModelError as
    `spec_from_config` does, ConfigError for a setting that it cannot have.
    """
    pooler = pooler_of(config.model, prepared)
    if runs_on_transformers(prepared, config.model.model_impl):
        if pooler is not None:
            raise ConfigError(
                f"--runner pooling: {prepared.architecture} runs on transformers' code, which only "
                "generates here"
            )
        return _transformers_spec(prepared, config, head_dims)
    if config.model.model_impl == "tokend" and prepared.architecture not in FAMILIES:
        raise ConfigError(
            f"--model-impl tokend: {prepared.architecture} is not among tokend's own families; "
            "auto runs it on transformers' code"
        )
    spec = spec_from_config(read_config(prepared), config.model.max_model_len)
    if pooler is not None:
        spec = spec.for_pooling(pooler)
    return spec.with_expert_parallel() if config.parallel.enable_expert_parallel else spec


def runs_on_transformers(prepared: PreparedModel, model_impl: ModelImpl) -> bool:
    """Return whether a model runs on transformers' code instead of a family of tokend's."""
    return model_impl == "transformers" or (
        model_impl == "auto" and prepared.architecture not in FAMILIES
    )


def _transformers_spec(
    prepared: PreparedModel, config: ServeConfig, head_dims: tuple[int, ...]
) -> ModelSpec:
    if prepared.source.endswith(".gguf"):
        raise ConfigError(
            f"--model-impl {config.model.model_impl}: {prepared.source} is a GGUF file, which "
            "transformers' code cannot read here; use a Hugging Face folder"
        )
    if config.parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {config.parallel.tensor_parallel_size}: "
            f"{prepared.architecture} runs on transformers' code, which one worker computes"
        )
    if config.model.cpu_weights in ("packed", "int8", "packed+int8"):
        raise ConfigError(
            f"--cpu-weights {config.model.cpu_weights}: {prepared.architecture} runs on "
            "transformers' code, whose weights are bf16 or f32"
        )
    if config.model.enable_return_routed_experts:
        raise ConfigError(
            f"--enable-return-routed-experts: {prepared.architecture} runs on transformers' code, "
            "which reports no experts"
        )
    # transformers takes a second to import, and families of tokend's own do not need it
    from worker.models.transformers_model import spec_of_transformers

    spec: ModelSpec = spec_of_transformers(
        read_config(prepared), config.model.max_model_len, head_dims
    )
    return spec.with_expert_parallel() if config.parallel.enable_expert_parallel else spec


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
