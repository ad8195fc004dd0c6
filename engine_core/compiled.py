"""Imports the compiled scheduler instead of its sources, if it was built from exactly these.

Without compiled extensions, or after an edit, Python interprets the sources: the same behaviour,
in twice the time.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from engine_core.build_compiled import SUFFIX, folder_of_sources


class CompiledFinder:
    """Finds modules that have a compiled extension in a folder; Python finds all others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._folder / (name.replace(".", "/") + SUFFIX)
        return importlib.util.spec_from_file_location(name, file) if file.exists() else None


def use_compiled() -> bool:
    """Import compiled modules from now on; return False if there are none for these sources.

    A wheel has those of the Python that built it; another Python interprets the sources.

    Call it before the first of the modules is imported.
    """
    folder = folder_of_sources()
    if not any(folder.rglob(f"*{SUFFIX}")):
        return False
    sys.meta_path.insert(0, CompiledFinder(folder))
    return True
