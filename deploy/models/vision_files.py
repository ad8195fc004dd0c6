"""The vision part of a folder whose language model is wrapped (wrapped_model.py).

It is read if worker/models/vision has its family, and the folder its tensors and the settings of
its image processor; else the model loads as its language model alone. Its tensors get other names,
the same for all versions of transformers that wrote the file:

    vision_tower.…, model.vision_model.…, visual.…, model.visual.…         vision.tower.…
    multi_modal_projector.…, model.connector.…                             vision.projector.…
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from proto.errors import shown
from proto.messages.prepared_model import TensorEntry, VisionFacts
from worker.models.vision import VISION_FAMILIES, vision_spec
from worker.models.vision.spec import SETTINGS_KEY, TOWER_KEY, VisionFamily

IMAGES_FILE: Final = "preprocessor_config.json"
PROCESSOR_FILE: Final = "processor_config.json"
_IMAGE_TOKENS: Final = ("image_token_id", "image_token_index")


@dataclass(frozen=True)
class VisionContents:
    """What is read of a vision part.

    facts: for the manifest. settings: further keys of config.json. tensors: renamed.
    files: of the prepared folder, by name.
    """

    facts: VisionFacts
    settings: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    files: Mapping[str, bytes]


def read_vision(
    architecture: str,
    outer: Mapping[str, Any],
    text: Mapping[str, Any],
    entries: Iterable[TensorEntry],
    images: Mapping[str, Any],
    processor: Mapping[str, Any],
) -> VisionContents | None:
    """Return the vision part of a model; None if it is not supported, or not whole.

    outer: the configuration of the whole model with all defaults, text: that of its language model.
    entries: all tensors of the folder. images, processor: IMAGES_FILE and PROCESSOR_FILE.
    Raises ModelError naming a setting that its family does not support.
    """
    family, tower = VISION_FAMILIES.get(architecture), outer.get(TOWER_KEY)
    if family is None or not isinstance(tower, Mapping):
        return None
    if family.tower_types and tower.get("model_type") not in family.tower_types:
        return None
    key = _token_key(outer)
    if key is None or lacks_token(architecture, outer, text):
        return None
    inner = processor.get("image_processor")
    images = inner if isinstance(inner, Mapping) else images
    tensors = tuple(_renamed(entries, family))
    if not tensors or not images:
        return None
    settings = {key: outer[key] for key in family.settings if outer.get(key) is not None}
    return vision_contents(
        architecture, outer[key], tower, settings, text, tensors, images, processor
    )


def lacks_token(architecture: str, outer: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return why the token of images has no embedding; "" if it has one, or none is named.

    Arguments as of `read_vision`.
    """
    key, size = _token_key(outer), text.get("vocab_size")
    if key is None or architecture not in VISION_FAMILIES:
        return ""
    token = outer[key]
    if type(token) is int and type(size) is int and 0 <= token < size:
        return ""
    return f"{key} {shown(token)} is not in the vocabulary of {shown(size)}"


def _token_key(outer: Mapping[str, Any]) -> str | None:
    return next((key for key in _IMAGE_TOKENS if outer.get(key) is not None), None)


def vision_contents(
    architecture: str,
    image_token_id: int,
    tower: Mapping[str, Any],
    settings: Mapping[str, Any],
    text: Mapping[str, Any],
    tensors: tuple[TensorEntry, ...],
    images: Mapping[str, Any],
    processor: Mapping[str, Any],
) -> VisionContents:
    """Return the vision part of a model with the facts that its family computes.

    tower, settings: the values of TOWER_KEY and SETTINGS_KEY. tensors: renamed. Other arguments as
    in `read_vision`.
    """
    added = {TOWER_KEY: dict(tower), SETTINGS_KEY: dict(settings)}
    spec = vision_spec(architecture, {**text, **added}, images)
    facts = VisionFacts(
        architecture=architecture,
        image_token_id=image_token_id,
        max_embeds=spec.max_embeds,
        is_bidirectional=spec.is_bidirectional,
        mrope_merge=spec.mrope_merge,
    )
    files = {IMAGES_FILE: images, PROCESSOR_FILE: processor}
    written = {name: json.dumps(each, indent=2).encode() for name, each in files.items() if each}
    return VisionContents(facts, added, tensors, written)


def _renamed(entries: Iterable[TensorEntry], family: VisionFamily) -> Iterable[TensorEntry]:
    """Yield the tensors of the vision part."""
    for entry in entries:
        if (name := family.prepared_name(entry.name)) is not None:
            yield msgspec.structs.replace(entry, name=name)
