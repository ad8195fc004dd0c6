"""Requests under way by the id of their answers, for operators who end some of them.

Owns that index. Clients may choose ids, so several requests can have one, of different keys.
"""

from collections.abc import Collection
from typing import Protocol


class Abortable(Protocol):
    """What is under way. label: the answer's id. owner: name of the key it came with."""

    @property
    def label(self) -> str: ...

    @property
    def owner(self) -> str: ...

    def abort(self) -> None:
        """End it as one that an operator has ended."""
        ...


class OpenGenerations:
    """Of one front end."""

    def __init__(self) -> None:
        self._by_label: dict[str, list[Abortable]] = {}

    def enter(self, generation: Abortable) -> None:
        self._by_label.setdefault(generation.label, []).append(generation)

    def leave(self, generation: Abortable) -> None:
        """It is over; nothing for one that is not here."""
        namesakes = self._by_label.get(generation.label, [])
        if generation in namesakes:
            namesakes.remove(generation)
            if not namesakes:
                del self._by_label[generation.label]

    def abort(self, labels: Collection[str], owner: str | None) -> None:
        """End those with exactly these ids; owner: those of this key only, None for any."""
        for label in labels:
            for generation in list(self._by_label.get(label, ())):
                if owner is None or generation.owner == owner:
                    generation.abort()
