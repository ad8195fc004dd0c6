"""What an overload run came to: its parts as a table, and the limits that it is judged by.

Knows no daemon; the outcomes come from offers.py.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.table import Table

from deploy.loadtest.limits import Limit
from deploy.loadtest.overload.memory import MAX_MIB, Memory
from deploy.loadtest.overload.offers import Outcome
from deploy.loadtest.summary import quantile

MIN_SHARE: Final = 0.9
"""Of their throughput that clients keep while others come and leave."""
MAX_WAIT_RATIO: Final = 1.25
"""Whoever is let in waits as with every place taken; the rest is the scatter of short runs."""
REFUSAL_SECONDS: Final = 1.0
"""What "at once" is: no step and no queue is between a request and its refusal."""
_NOTHING: Final = Outcome((), 0.0)


@dataclass
class Record:
    """What each part of the run came to, in order.

    full: with every place taken. flood: beyond that. alone, beside: a few clients without
    and with those who leave. control: with those who leave another server. beside_stays: with
    those who stay for a moment, and are served like the others meanwhile. A part that was not run
    has no offers and no limits.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    full: Outcome = _NOTHING
    flood: Outcome = _NOTHING
    alone: Outcome = _NOTHING
    beside: Outcome = _NOTHING
    control: Outcome = _NOTHING
    beside_stays: Outcome = _NOTHING

    def note(self, name: str, outcome: Outcome) -> Outcome:
        """One more part."""
        self.outcomes[name] = outcome
        return outcome

    def limits(self, memory: Memory, left: Sequence[str]) -> list[Limit]:
        """What the run is judged by. left: gauges that did not return to 0."""
        num_failed = sum(len(each.failed) for each in self.outcomes.values())
        limits = [
            Limit("failed requests", num_failed, "at most", 0),
            Limit("left behind", len(left), "at most", 0),
        ]
        if self.flood.offers:
            limits += self._flood_limits(memory)
        if self.beside.offers:
            share = _ratio(self.beside.tokens_per_second, self.alone.tokens_per_second)
            limits.append(Limit("throughput beside those who leave", share, "at least", MIN_SHARE))
        return limits

    def _flood_limits(self, memory: Memory) -> list[Limit]:
        waits = [each.first_token for each in self.flood.accepted]
        usual = [each.first_token for each in self.full.accepted]
        refusals = [each.answered for each in self.flood.refused] or [math.nan]
        hints = sum(1 for each in self.flood.refused if not each.retry_after.isdigit())
        return [
            Limit(
                "first token of the accepted, flood / full",
                _ratio(_median(waits), _median(usual)),
                "at most",
                MAX_WAIT_RATIO,
            ),
            Limit(
                "answer to the refused, p99",
                1e3 * quantile(refusals, 0.99),
                "at most",
                1e3 * REFUSAL_SECONDS,
                "ms",
            ),
            Limit("refused without Retry-After", hints, "at most", 0),
            *(
                Limit(
                    f"{title.removeprefix('tokend: ')}: growth",
                    memory.growth(title),
                    "at most",
                    MAX_MIB,
                    "MiB",
                )
                for title in memory.sizes
            ),
        ]

    def _share_of_alone(self, outcome: Outcome) -> float | None:
        """Throughput beside the part without those who leave; None for parts of other clients."""
        beside = (self.control, self.beside, self.beside_stays)
        if not outcome.offers or all(outcome is not each for each in beside):
            return None
        return _ratio(outcome.tokens_per_second, self.alone.tokens_per_second)

    def plain(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        return {
            "parts": [
                {
                    "name": name,
                    "seconds": outcome.seconds,
                    "answered": len(outcome.accepted),
                    "refused": len(outcome.refused),
                    "failed": len(outcome.failed),
                    "tokens_per_second": outcome.tokens_per_second,
                    "share_of_alone": self._share_of_alone(outcome),
                    "first_token": _quantiles([each.first_token for each in outcome.accepted]),
                    "refusal": _quantiles([each.answered for each in outcome.refused]),
                }
                for name, outcome in self.outcomes.items()
            ]
        }

    def problems(self) -> list[str]:
        """Of requests that were neither answered nor refused, some."""
        return [
            f"{name}: {len(outcome.failed)} failed, such as: "
            f"{outcome.failed[0].status} {outcome.failed[0].error}"
            for name, outcome in self.outcomes.items()
            if outcome.failed
        ]

    def table(self) -> Table:
        table = Table(title="times in ms, p50 / p99")
        for column in (
            "load",
            "answered",
            "per s",
            "tokens/s",
            "of alone",
            "refused",
            "first token of the accepted",
            "answer to the refused",
            "Retry-After, s",
        ):
            table.add_column(column, justify="left" if column == "load" else "right")
        for name, outcome in self.outcomes.items():
            accepted, refused = outcome.accepted, outcome.refused
            share = self._share_of_alone(outcome)
            table.add_row(
                name,
                str(len(accepted)),
                f"{outcome.requests_per_second:.1f}",
                f"{outcome.tokens_per_second:.0f}",
                "-" if share is None else f"{share:.2f}",
                str(len(refused)),
                _milliseconds([each.first_token for each in accepted]),
                _milliseconds([each.answered for each in refused]),
                _range([int(each.retry_after) for each in refused]),
            )
        return table


def _milliseconds(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "-"
    p99 = statistics.quantiles(seconds, n=100)[98]
    return f"{1e3 * statistics.median(seconds):.0f} / {1e3 * p99:.0f}"


def _range(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if numbers else "-"


def _quantiles(seconds: list[float]) -> dict[str, float]:
    """Empty where there were none."""
    return {f"p{part}": quantile(seconds, part / 100) for part in (50, 99)} if seconds else {}


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds) if seconds else math.nan


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.nan
