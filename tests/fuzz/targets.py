"""Fuzz targets by name; a target is imported on first use."""

from collections.abc import Callable
from typing import Final

from tests.fuzz.campaign import Target


def _decoders() -> Target:
    from tests.fuzz.decoders import Decoders

    return Decoders()


def _gguf() -> Target:
    from tests.fuzz.gguf_files import GgufFiles

    return GgufFiles()


def _safetensors() -> Target:
    from tests.fuzz.safetensors_folders import SafetensorsFolders

    return SafetensorsFolders()


def _bodies() -> Target:
    from tests.fuzz.bodies import Bodies

    return Bodies()


def _harmony() -> Target:
    from tests.fuzz.harmony_answers import HarmonyAnswers

    return HarmonyAnswers()


def _answers() -> Target:
    from tests.fuzz.answers import Answers

    return Answers()


TARGETS: Final[dict[str, Callable[[], Target]]] = {
    "decoders": _decoders,
    "gguf": _gguf,
    "safetensors": _safetensors,
    "bodies": _bodies,
    "answers": _answers,
    "harmony": _harmony,
}
