"""GGUF models that are split over several files.

    NAME-00001-of-00003.gguf    all metadata, and the first tensors or none
    NAME-00002-of-00003.gguf    tensors
    NAME-00003-of-00003.gguf    tensors

split.no numbers the parts from 0; split.count and split.tensors.count are those of the whole model.
A vision part is a file of its own beside them (mmproj.py), with `mmproj` in its name; in a
repository it may be in a folder above.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Final

from msgspec import structs

from deploy.models import gguf_header
from deploy.models.gguf_header import GgufHeader
from proto.errors import ModelError, shown

_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_OWN_KEYS: Final = ("split.no", "general.alignment")
"""Keys that may differ between the parts of a model."""
_VISION_MARK: Final = "mmproj"
_PREFERRED: Final = ("f16", "bf16", "q8_0", "f32")
"""Types in the names of several files with a vision part: the first of these is read."""
_MAX_MISSING: Final = 3
"""Names of missing parts in an error."""


def model_name(path: str) -> str:
    """Return the name of a file without its number as a part and without `.gguf`."""
    name = os.path.basename(path)
    part = _PART.fullmatch(name)
    return part[1] if part else name.removesuffix(".gguf")


def models_among(paths: Iterable[str]) -> list[str]:
    """Return the path of each model: of its only file, or of the first part that is there."""
    models: dict[tuple[str, ...], str] = {}
    for path in sorted(paths):
        part = _PART.fullmatch(path)
        models.setdefault((part[1], part[3]) if part else (path,), path)
    return list(models.values())


def part_names(path: str) -> list[str]:
    """Return the paths of all parts of the model that a file belongs to; `path` if it is whole.

    Raises ModelError if the number of the part is wrong.
    """
    part = _PART.fullmatch(path)
    if part is None:
        return [path]
    prefix, number, count = part[1], int(part[2]), int(part[3])
    if not 0 < number <= count:
        raise ModelError(f"{path} is named part {number} of {count}")
    return [f"{prefix}-{each:05}-of-{count:05}.gguf" for each in range(1, count + 1)]


def part_paths(path: str) -> list[str]:
    """Return `part_names`; raises ModelError naming the parts that are not there."""
    paths = part_names(path)
    missing = [os.path.basename(each) for each in paths if not os.path.isfile(each)]
    if len(paths) > 1 and missing:
        names = ", ".join(missing[:_MAX_MISSING]) + (", …" if missing[_MAX_MISSING:] else "")
        raise ModelError(
            f"{path} is one of {len(paths)} parts of a model, and {len(missing)} of them "
            f"{'are' if missing[1:] else 'is'} not beside it: {names}"
        )
    return paths


def vision_file(path: str) -> str | None:
    """Return the file with a vision part that lies beside a model's; None without one."""
    beside = Path(path).parent.glob("*.gguf")
    return choose_vision_file(path, [str(each) for each in beside if each.is_file()])


def choose_vision_file(model: str, paths: Iterable[str]) -> str | None:
    """Return which of the paths is a model's vision part: in its folder, or else above it.

    model: path of its first file. None without a vision part.
    """

    def preference(path: str) -> tuple[int, int, str]:
        name = os.path.basename(path).lower()
        ranks = [
            rank
            for rank, kind in enumerate(_PREFERRED)
            if re.search(rf"(?:^|[-._]){kind}[-._]", name)
        ]
        return -len(os.path.dirname(path)), min(ranks, default=len(_PREFERRED)), path

    folders = {str(each) for each in PurePath(model).parents}
    found = [
        path for path in paths if is_vision_file(path) and (os.path.dirname(path) or ".") in folders
    ]
    return min(found, key=preference, default=None)


def is_vision_file(path: str) -> bool:
    """Return whether a file is the vision part of a model, by its name."""
    return path.endswith(".gguf") and _VISION_MARK in os.path.basename(path)


def read(path: str) -> tuple[GgufHeader, list[str]]:
    """Return the header of a whole model, and its files, which `TensorEntry.file` numbers.

    Raises ModelError naming the part that is invalid or belongs to another model.
    """
    paths = part_paths(path)
    headers = [gguf_header.read(each) for each in paths]
    first = headers[0].values
    count = first.get("split.count", 0)
    if len(paths) == 1:
        if count not in (0, 1):  # 0: a joined file
            raise ModelError(
                f"{path} sets split.count to {shown(count)}: a part of a model must have its name "
                "and number, as in NAME-00001-of-00003.gguf"
            )
        return headers[0], paths
    for number, (each, header) in enumerate(zip(paths, headers, strict=True)):
        expected = {"split.count": len(paths), "split.no": number}
        for key, value in expected.items():
            if header.values.get(key) != value:
                found = shown(header.values.get(key))
                raise ModelError(f"{each} sets {key} to {found}, and by its name it is {value}")
        for key, value in header.values.items():
            if key not in _OWN_KEYS and key in first and first[key] != value:
                raise ModelError(f"{each} belongs to another model: its {key} is not the first's")
    tensors = tuple(
        structs.replace(tensor, file=number)
        for number, header in enumerate(headers)
        for tensor in header.tensors
    )
    owners: dict[str, int] = {}
    for tensor in tensors:
        owner = owners.setdefault(tensor.name, tensor.file)
        if owner != tensor.file:
            raise ModelError(f"{tensor.name} is in {paths[owner]} and in {paths[tensor.file]}")
    total = first.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelError(
            f"{paths[0]} and its other parts have {len(tensors)} tensors, "
            f"and split.tensors.count is {shown(total)}"
        )
    return GgufHeader(first, tensors), paths
