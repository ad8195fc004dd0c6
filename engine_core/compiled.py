"""Loads the compiled scheduler in place of its sources, where it was built from just these.

Owns nothing but the import hook. Without extensions, or after an edit, the sources are
interpreted: the same behaviour, twice the time.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from engine_core.build_compiled import SUFFIX, folder_of_sources


class CompiledFinder:
    """Finds a module as the extension of its name in a folder; all others are left to Python."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._folder / (name.replace(".", "/") + SUFFIX)
        return importlib.util.spec_from_file_location(name, file) if file.exists() else None


def use_compiled() -> bool:
    """Have modules imported from now on in their compiled form; False if there is none.

    To be called before the first of them is imported.
    """
    folder = folder_of_sources()
    if not folder.is_dir():
        return False
    sys.meta_path.insert(0, CompiledFinder(folder))
    return True
