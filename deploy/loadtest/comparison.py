"""What servers did in the rounds of a comparison, and what is made of it.

Knows nothing of how it was measured. The first server is the one that is compared with each
other one, round by round.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.loadtest.serving.answers import Answers
from deploy.loadtest.serving.play import Played

Turn = dict[str, Any]
"""Figures of one server in one round, by name."""
_SHOWN: Final = 5


@dataclass(frozen=True)
class Figure:
    """A row. key: its name in a turn, with the unit. title: for people. digits: after the point."""

    key: str
    title: str
    digits: int = 2

    def show(self, value: float) -> str:
        """A value for people; a dash where there is none."""
        return "-" if math.isnan(value) else f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Ratios:
    """Of the first server to another one, one a round."""

    values: Sequence[float]

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Ratios":
        """Rounds in which one of them has no figure are left out."""
        pairs = zip(ours, theirs, strict=True)
        return cls([a / b for a, b in pairs if not (math.isnan(a) or math.isnan(b)) and b])

    def describe(self) -> str:
        """Median (lowest to highest)."""
        if not self.values:
            return "-"
        low, high = min(self.values), max(self.values)
        return f"{statistics.median(self.values):.3f} ({low:.3f} to {high:.3f})"

    def plain(self) -> dict[str, float]:
        if not self.values:
            return {}
        return {
            "median": statistics.median(self.values),
            "min": min(self.values),
            "max": max(self.values),
        }


@dataclass
class Share:
    """What one server had over all rounds: time, the client's CPU, failures, answers."""

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    answers: Answers = field(default_factory=Answers)

    def note(self, played: Played) -> None:
        self.seconds += played.seconds
        self.cpu_seconds += played.cpu_seconds
        self.num_requests += len(played.exchanges)
        self.errors.update(each.error for each in played.exchanges if each.error)
        for ask, exchange in played.checked:
            self.answers.note(ask, exchange.text)

    @property
    def cpu_share(self) -> float:
        return self.cpu_seconds / self.seconds if self.seconds else 0.0


class Comparison:
    """names: of the servers. figures: the rows."""

    def __init__(self, names: Sequence[str], figures: Sequence[Figure]) -> None:
        self._names = list(names)
        self._figures = list(figures)
        self._shares = {name: Share(name) for name in names}
        self._rounds: list[dict[str, Turn]] = []

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    def share(self, name: str) -> Share:
        return self._shares[name]

    def note(self, number: int, name: str, turn: Turn) -> None:
        """A server's turn in a round, counted from 0."""
        if number == len(self._rounds):
            self._rounds.append({})
        self._rounds[number][name] = turn

    def values(self, name: str, figure: Figure) -> list[float]:
        """One a round; not a number where every request failed."""
        return [float(each[name].get(figure.key, math.nan)) for each in self._rounds]

    def median(self, name: str, figure: Figure) -> float:
        values = [each for each in self.values(name, figure) if not math.isnan(each)]
        return statistics.median(values) if values else math.nan

    def ratios(self, figure: Figure, other: str) -> Ratios:
        """Of the first server to another one."""
        return Ratios.of(self.values(self._names[0], figure), self.values(other, figure))

    def show(self, console: Console, title: str) -> None:
        """Print everything."""
        first, *others = self._names
        table = Table(title=title)
        table.add_column("figure")
        for column in (*self._names, *(f"{first} / {other}" for other in others)):
            table.add_column(column, justify="right")
        for figure in self._figures:
            medians = [figure.show(self.median(name, figure)) for name in self._names]
            ratios = [self.ratios(figure, other).describe() for other in others]
            table.add_row(figure.title, *medians, *ratios)
        console.print(table)
        for name in self._names:
            for line in self._notes(self._shares[name]):
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    def plain(self) -> Mapping[str, object]:
        """For JSON."""
        first, *others = self._names
        return {
            "servers": {name: self._plain_share(self._shares[name]) for name in self._names},
            "figures": {
                figure.key: {
                    "medians": {name: self._plain_median(name, figure) for name in self._names},
                    "ratios": {
                        f"{first} / {other}": self.ratios(figure, other).plain() for other in others
                    },
                }
                for figure in self._figures
            },
            "rounds": self._rounds,
        }

    def _plain_median(self, name: str, figure: Figure) -> float | None:
        median = self.median(name, figure)
        return None if math.isnan(median) else median

    def _plain_share(self, share: Share) -> dict[str, object]:
        return {
            "client_cpu_share": share.cpu_share,
            "num_requests": share.num_requests,
            "num_failed": share.errors.total(),
            "errors": dict(share.errors),
            "answers_compared": share.answers.num_compared,
            "answers_different": len(share.answers.different),
        }

    def _notes(self, share: Share) -> list[str]:
        answers = share.answers
        found = [
            f"{share.name}: {share.num_requests} requests, {share.errors.total()} failed; answers "
            f"to the same request: {answers.num_compared} compared, {len(answers.different)} "
            f"different; the client took {share.cpu_share:.1%} of one core"
        ]
        found += [f"  failed: {error}" for error, _ in share.errors.most_common(_SHOWN)]
        return found + [f"  different: {each}" for each in answers.different[:_SHOWN]]
