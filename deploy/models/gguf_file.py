"""Reads a GGUF file: tensor index, configuration, tokenizer.

gguf_config.py converts the configuration, gguf_tokenizer.py the tokenizer, both from the header;
mmproj.py reads the file of a vision part beside the model.
"""

import math
import os
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import structs

from deploy.models import gguf_config, gguf_parts, gguf_tokenizer, mmproj
from deploy.models.gguf_header import GgufHeader
from deploy.models.prepared_folder import ModelContents, ProgressCallback
from proto.errors import ModelError, shown
from proto.messages.prepared_model import (
    ModelSetting,
    TensorEntry,
    TensorIndex,
    TensorPart,
    open_model_file,
)
from proto.settings.generation_config import model_settings
from proto.settings.turn_ends import END_TOKENS
from worker.models.families import FAMILIES

_ROPE_FACTORS: Final = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
"""Key of rope_parameters → name of the float32 tensor that holds its numbers."""

_MAX_FACTOR_BYTES: Final = 4096
"""Size of the largest tensor that is read into a list: factors of LongRoPE, scales of experts."""
_WEIGHT, _SCALE, _INPUT_SCALE = ".weight", ".scale", ".input_scale"
"""Endings of tensor names: a weight in NVFP4; its scale, one or one for each expert; the scale of
the product's input."""


def read(path: str, report: ProgressCallback, vision_file: str | None = None) -> ModelContents:
    """Read a GGUF file, or all parts of a split one, by the path of any part.

    vision_file: of its vision part, "" for none; None: the one beside it. Raises ModelError if it
    is damaged or not supported.
    """
    report("reading the GGUF header")
    header, paths = gguf_parts.read(path)
    _check(header, path)
    metadata = header.values
    report("converting configuration and tokenizer")
    config = gguf_config.convert(path, header)
    pooler = gguf_config.read_pooler(header, config)
    tensors = _without_rope_factors(paths, header, config)
    if vision_file is None:
        vision_file = gguf_parts.vision_file(paths[0])
    projector = vision_file if pooler is None else None
    vision = None
    if projector:
        report("reading the vision part")
        vision = mmproj.read(projector, header, config, file=len(paths))
    if projector and vision is not None:
        paths, tensors = [*paths, projector], (*tensors, *vision.tensors)
        config |= vision.settings
    tokenizer_json, tokenizer_config, templates = gguf_tokenizer.convert(path, metadata)
    return ModelContents(
        config=config,
        tokenizer_json=tokenizer_json,
        tokenizer_config=tokenizer_config,
        chat_templates=templates,
        tensors=TensorIndex(
            "gguf", tuple(map(os.path.realpath, paths)), _with_scales(paths, tensors)
        ),
        ends=_end_tokens(path, metadata),
        bos_token_id=gguf_tokenizer.token_id(path, metadata, "bos_token_id"),
        pooler=pooler,
        unloaded_parts=("vision",) if projector and vision is None else (),
        generation_settings=_generation_settings(metadata),
        vision=None if vision is None else vision.facts,
        files={} if vision is None else vision.files,
    )


def _check(header: GgufHeader, path: str) -> None:
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{path} has no general.architecture")
    supported = dict.fromkeys(name for family in FAMILIES.values() for name in family.gguf_names)
    if architecture not in supported:
        raise ModelError(
            f"GGUF architecture {shown(architecture)} is not supported; "
            f"supported: {', '.join(supported)}"
        )
    if not isinstance(header.values.get("tokenizer.ggml.model"), str):
        raise ModelError(f"{path} has no tokenizer (tokenizer.ggml.model)")
    if not header.tensors:
        raise ModelError(f"{path} has no tensors")


def _without_rope_factors(
    paths: Sequence[str], header: GgufHeader, config: dict[str, Any]
) -> tuple[TensorEntry, ...]:
    """Move the factors of LongRoPE from tensors to the configuration; return the other tensors."""
    found = {tensor.name: tensor for tensor in header.tensors}
    if config["model_type"] != "phi3" or not found.keys() >= set(_ROPE_FACTORS.values()):
        return header.tensors
    for key, name in _ROPE_FACTORS.items():
        config["rope_parameters"][key] = _few_floats(paths, found[name])
    config["rope_parameters"]["rope_type"] = "longrope"
    return tuple(tensor for tensor in header.tensors if tensor.name not in _ROPE_FACTORS.values())


def _few_floats(paths: Sequence[str], entry: TensorEntry) -> list[float]:
    """Return the numbers of a short tensor; raises ModelError naming it if it is none."""
    if entry.type != "F32" or entry.num_bytes > _MAX_FACTOR_BYTES:
        raise ModelError(f"tensor {entry.name} has type {entry.type}: a few F32 are needed")
    with open_model_file(paths[entry.file]) as file:
        file.seek(entry.offset)
        return array("f", file.read(entry.num_bytes)).tolist()


def _with_scales(paths: Sequence[str], tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """Return weights in NVFP4 together with their scales, as one tensor each.

    Raises ModelError naming a scale that does not fit or is no finite number.
    """
    named = {tensor.name: tensor for tensor in tensors}
    for name, weight in list(named.items()):
        if weight.type != "NVFP4" or not name.endswith(_WEIGHT):
            continue
        base = name.removesuffix(_WEIGHT)
        named.pop(base + _INPUT_SCALE, None)  # inputs are rounded by scales of their own
        if (scale := named.pop(base + _SCALE, None)) is None:
            continue
        numbers = _few_floats(paths, scale)
        if len(numbers) not in (1, *weight.shape[:-2]):
            raise ModelError(
                f"tensor {scale.name} has shape {list(scale.shape)}, and {name} has "
                f"{list(weight.shape)}: one scale, or one of each expert, is needed"
            )
        wrong = [number for number in numbers if not math.isfinite(number)]
        if wrong:
            raise ModelError(f"tensor {scale.name} holds {wrong[0]:g}, and scales weights")
        rows = math.prod(weight.shape[:-1])
        codes = (rows, weight.num_bytes // max(rows, 1))
        parts = {
            "codes": TensorPart("U8", codes, weight.file, weight.offset, weight.num_bytes),
            "factors": TensorPart("F32", scale.shape, scale.file, scale.offset, scale.num_bytes),
        }
        named[name] = structs.replace(
            weight,
            num_bytes=weight.num_bytes + scale.num_bytes,
            packing="gguf_nvfp4",
            parts=parts,
            options={"rows": rows // len(numbers)},
        )
    return tuple(named.values())


def _end_tokens(path: str, metadata: Mapping[str, Any]) -> list[tuple[int, str]]:
    found = (
        (gguf_tokenizer.token_id(path, metadata, f"{name}_id"), f"tokenizer's {name}")
        for name in END_TOKENS
    )
    return [(token_id, place) for token_id, place in found if token_id is not None]


def _generation_settings(metadata: Mapping[str, Any]) -> tuple[ModelSetting, ...]:
    """Return the settings of the sampling; 0.6 in float32 is 0.6 again, not 0.60000002."""
    return tuple(
        (key, float(f"{value:.7g}") if isinstance(value, float) else value)
        for key, value in model_settings(metadata)
    )
