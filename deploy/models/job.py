"""How the preparing process is told what to do, and what it says meanwhile.

Arguments go in; lines of JSON come out on standard output, each a list
[kind, text, fraction].
"""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final, NamedTuple

QUIET: Final = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Keeps the libraries from talking, and from asking a hub about a local model."""


@dataclass(frozen=True)
class Job:
    """name, source, kind: as in `locate.Source`. target: folder to fill. final: its later path."""

    name: str
    source: str
    kind: str
    target: str
    final: str

    def to_arguments(self) -> list[str]:
        """For the command line of `python -m deploy.models.prepare`."""
        return list(astuple(self))

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> "Job":
        """The inverse of `to_arguments`."""
        return cls(*arguments)


class Event(NamedTuple):
    """kind: "progress", "error", or "noise" for a line that some library printed."""

    kind: str
    text: str
    fraction: float | None = None


def render(event: Event) -> str:
    """One line."""
    return json.dumps(event)


def parse(line: str) -> Event:
    """The event of a line."""
    try:
        kind, text, fraction = json.loads(line)
    except (ValueError, TypeError):
        return Event("noise", line.rstrip())
    return Event(kind, text, fraction)
