"""Vision parts of models: one file a family, found by its architecture in double quotes.

spec.py describes the arithmetic and encoder.py computes it; tile_spec.py and tiles.py have one kind
of towers, grid_spec.py, grids.py and grid_gguf.py the other one. docs/extending.md says how to add
a family.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from proto.errors import ModelError, shown
from worker.models.vision.spec import VisionConfig, VisionFamily, VisionSpec

_FOLDER: Final = Path(__file__).parent
_OTHER_FILES: Final = (
    *("spec", "encoder", "tile_spec", "tiles", "grid_spec", "grids", "grid_gguf"),
)


@cache
def _families() -> dict[str, VisionFamily]:
    """Return the families by architecture."""
    names = sorted(path.stem for path in _FOLDER.glob("[a-z]*.py"))
    modules = (import_module(f"{__name__}.{each}") for each in names if each not in _OTHER_FILES)
    return {name: module.FAMILY for module in modules for name in module.FAMILY.models}


class _Families(Mapping[str, VisionFamily]):
    """Families of vision parts by architecture."""

    def __getitem__(self, architecture: str) -> VisionFamily:
        return _families()[architecture]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(_families()))

    def __len__(self) -> int:
        return len(_families())


VISION_FAMILIES: Final = _Families()


def vision_spec(
    architecture: str, config: Mapping[str, Any], images: Mapping[str, Any]
) -> VisionSpec:
    """Return the vision part of a model.

    architecture: of the whole model. config: of a prepared config.json. images: settings of its
    preprocessor_config.json. Raises ModelError naming a key that is not supported.
    """
    family = VISION_FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"the vision part of {shown(architecture)} is not supported")
    return family.spec(VisionConfig.of(architecture, config, images))
