"""The families of models: one file each, which says all that tokend knows of the family.

A file here has a FAMILY (base.py) and is found by its architecture in double quotes. Families of
other packages are found by entry points (proto/runtime/plugins.py) and --model-families.
docs/extending.md says how to add one.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final

from proto.errors import ConfigError, ModelError, shown
from proto.runtime.plugins import installed_names, load_part
from worker.models.families.base import Family
from worker.models.vision import VISION_FAMILIES

_FOLDER: Final = Path(__file__).parent


@cache
def _families_with(text: str) -> dict[str, Family]:
    """Return the families, by architecture, whose files contain a text; others are not imported."""
    files = [path for path in sorted(_FOLDER.glob("[a-z]*.py")) if path.stem != "base"]
    found = [path.stem for path in files if text in path.read_text("utf-8")]
    families = [import_module(f"{__name__}.{name}").FAMILY for name in found]
    return {architecture: family for family in families for architecture in family.models}


_named: Final[list[Family]] = []
"""Families of --model-families."""


def use_families(names: Sequence[str]) -> None:
    """Let models of these families from outside be found, too; raises ConfigError."""
    _named[:] = map(_outside_family, names)
    _outside.cache_clear()


def _outside_family(name: str) -> Family:
    field = "model_families"
    family = load_part("model_family", name, field)
    if not isinstance(family, Family):
        raise ConfigError(f"{field}: {name} is no Family", field)
    return family


@cache
def _outside() -> dict[str, Family]:
    """Return the families of other packages, by architecture; raises ConfigError."""
    installed = map(_outside_family, installed_names("model_family"))
    return {name: family for family in (*installed, *_named) for name in family.models}


class _Families(Mapping[str, Family]):
    """Families by architecture, in the order of these names."""

    def __getitem__(self, architecture: str) -> Family:
        families = _families_with(f'"{architecture}"')
        return families[architecture] if architecture in families else _outside()[architecture]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*_families_with(""), *_outside()}))

    def __len__(self) -> int:
        return len({*_families_with(""), *_outside()})


FAMILIES: Final = _Families()
"""The supported architectures of config.json."""


def family_of(architecture: str) -> Family:
    """Return the family of an architecture; raises ModelError for one that is not supported."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"{shown(architecture)} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return family


def supported_models() -> list[str]:
    """Return the tables of supported architectures in Markdown, and what they omit, a line each."""
    language = [
        (family.models[architecture], architecture, ", ".join(family.gguf_names) or "–")
        for architecture, family in FAMILIES.items()
    ]
    vision = []
    for architecture, part in VISION_FAMILIES.items():
        own = [each for each in part.gguf if each.architecture == architecture] or part.gguf
        texts = ", ".join(dict.fromkeys(text for kind in own for text in kind.texts))
        files = f"{texts} and mmproj" if texts else "–"
        vision.append((part.models[architecture], architecture, files))
    columns = ("Architecture in config.json", "In GGUF files")
    return [
        *_table(("Models", *columns), language),
        "",
        *_VISION.splitlines(),
        "",
        *_table(("Models that read images", *columns), vision),
        "",
        *_WRAPPED.splitlines(),
    ]


def _table(head: tuple[str, ...], rows: list[tuple[str, str, str]]) -> list[str]:
    """Return a table in Markdown, sorted by its first column."""
    rows.sort(key=lambda row: row[0].lower())
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = (head, tuple("-" * width for width in widths), *rows)
    return [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines]


_VISION: Final = """\
These read images, too, from Hugging Face folders, and most from a GGUF file with one beside it that
has `mmproj` in its name:"""
_WRAPPED: Final = """\
Other folders in which one of these language models stands beside a vision or an audio part load as
the language model alone, for text (`...ForConditionalGeneration` with a `text_config`: InternVL,
GLM-4.5V, Kimi K2.5 and others)."""
"""Below the tables."""
