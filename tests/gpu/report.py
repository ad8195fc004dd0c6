"""The report of a phase, written and printed at once, so that an ended phase keeps it."""

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

STATE: Final = "TOKEND_GPU_STATE"
"""Names the folder of a check in the environment of its phases."""


class Failed(Exception):
    """A condition of a phase does not hold; the message has the numbers."""


def demand(holds: bool, what: str) -> None:
    """Raise Failed(what) if a condition does not hold."""
    if not holds:
        raise Failed(what)


class Report:
    """Figures, missed targets and errors of a phase, in `file` as JSON.

    Entries are written before they are printed, because a phase may be ended at any time.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.figures: dict[str, Any] = {}
        self.missed: list[str] = []
        self.errors: list[str] = []
        self._write()

    def figure(self, name: str, value: Any) -> None:
        """Record and print a figure."""
        self.figures[name] = value
        self._write()
        print(f"    {name:32} {shown(value)}", flush=True)

    def miss(self, what: str) -> None:
        """Record a missed target; the phase continues."""
        self.missed.append(what)
        self._write()
        print(f"    target missed: {what}", flush=True)

    def error(self, what: str) -> None:
        """Record an error; the phase may continue."""
        self.errors.append(what)
        self._write()
        print(f"    FAILED: {what}", flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A block whose failure does not end the phase."""
        try:
            yield
        except Failed as failure:
            self.error(f"{name}: {failure}")
        except Exception:
            self.error(f"{name}: {traceback.format_exc()}")

    def kept(self, name: str) -> Path:
        """A file or folder that later phases of the same check find; else removed with this one."""
        folder = os.environ.get(STATE)
        # A folder of its own, because reports are named after phases.
        kept = (Path(folder) if folder else self._file.parent) / "kept"
        kept.mkdir(exist_ok=True)
        return kept / name

    def beside(self, name: str) -> Path:
        """A file in the folder of this report, which is removed with the phase."""
        return self._file.with_name(name)

    @staticmethod
    def read(file: Path) -> dict[str, Any]:
        """Read a report's file."""
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def _write(self) -> None:
        content = {"figures": self.figures, "missed": self.missed, "errors": self.errors}
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(content))
        os.replace(new, self._file)


def shown(value: Any) -> str:
    """Format a figure for the table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "nothing"
    return str(value)
