"""What a window of streaming cost: figures of one server, limits beside another, the table.

Knows nothing of how they were taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from rich.table import Table

from deploy.loadtest.frontend.streams import Window
from deploy.loadtest.frontend.subjects import API, ENGINE
from deploy.loadtest.limits import Limit
from deploy.loadtest.summary import quantile

LEAST_SHARE: Final = 0.8
"""What the stream that gets least must have of what the middle one has."""
API_RATIO: Final = 0.5
"""CPU time of our front end for a token, as part of the peer's."""
ENGINE_RATIO: Final = 1.0
"""CPU time of our engine for a token, as part of the peer's."""


@dataclass(frozen=True)
class Reading:
    """Of a server, at one moment. cpu_seconds: since its start, by process. events: that its
    streams have had when the tokens and steps were counted."""

    seconds: float
    cpu_seconds: Mapping[str, float]
    tokens: float
    steps: float
    events: int


@dataclass(frozen=True)
class Figures:
    """Of one window, or medians of several.

    tokens_per_event: 1 where every token had an event of its own. least, middle: events of the
    stream that got least and of the middle one. cpu_ms: by process, for 1,000 streamed tokens.
    client_share: of one core, that the client took.
    """

    streams: float
    tokens_per_s: float
    tokens_per_step: float
    tokens_per_event: float
    gap_ms_p50: float
    gap_ms_p99: float
    gap_ms_max: float
    least_events: float
    middle_events: float
    engine_ms_per_step: float
    client_share: float
    cpu_ms: Mapping[str, float]

    @property
    def least_share(self) -> float:
        return self.least_events / self.middle_events

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def figures_of(
    before: Reading, after: Reading, window: Window, client_cpu_seconds: float
) -> Figures:
    """Of a window in which every stream had something."""
    seconds, tokens = after.seconds - before.seconds, after.tokens - before.tokens
    steps = after.steps - before.steps
    used = {
        name: now - before.cpu_seconds[name]
        for name, now in after.cpu_seconds.items()
        if name in before.cpu_seconds
    }
    gaps = window.gaps or [float("nan")]
    return Figures(
        streams=len(window.events),
        tokens_per_s=tokens / seconds,
        tokens_per_step=tokens / steps,
        tokens_per_event=tokens / max(1, after.events - before.events),
        gap_ms_p50=1e3 * quantile(gaps, 0.5),
        gap_ms_p99=1e3 * quantile(gaps, 0.99),
        gap_ms_max=1e3 * max(gaps),
        least_events=min(window.events),
        middle_events=median(window.events),
        engine_ms_per_step=1e3 * used[ENGINE] / steps,
        client_share=client_cpu_seconds / seconds,
        cpu_ms={name: 1e6 * each / tokens for name, each in sorted(used.items())},
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure by itself."""
    plain = [each.plain() for each in rounds]
    found = {name: median(each[name] for each in plain) for name in plain[0] if name != "cpu_ms"}
    cpu_ms = {
        name: median(each.cpu_ms[name] for each in rounds)
        for name in rounds[0].cpu_ms
        if all(name in each.cpu_ms for each in rounds)
    }
    return Figures(**found, cpu_ms=cpu_ms)


def limits(ours: Sequence[Figures], peer: Sequence[Figures]) -> list[Limit]:
    """What is judged; beside a peer the medians of the rounds' ratios."""
    least = min(each.least_share for each in ours)
    found = [
        Limit("events of the least stream / of the middle one", least, "at least", LEAST_SHARE)
    ]
    for name, bound in ((API, API_RATIO), (ENGINE, ENGINE_RATIO)) if peer else ():
        ratio = median(
            mine.cpu_ms[name] / theirs.cpu_ms[name] for mine, theirs in zip(ours, peer, strict=True)
        )
        found.append(Limit(f"{name}: CPU for a token / the peer's", ratio, "at most", bound))
    return found


def table(title: str, columns: Mapping[str, Figures]) -> Table:
    """A column each."""
    made = Table(title=title)
    made.add_column("")
    for name in columns:
        made.add_column(name, justify="right")
    for label, text in _ROWS:
        made.add_row(label, *(text(each) for each in columns.values()))
    names = dict.fromkeys(name for each in columns.values() for name in each.cpu_ms)
    for name in sorted(names, key=lambda each: (each not in (API, ENGINE), each)):
        made.add_row(
            f"CPU ms / 1,000 tokens: {name}",
            *(
                f"{each.cpu_ms[name]:.2f}" if name in each.cpu_ms else ""
                for each in columns.values()
            ),
        )
    return made


_ROWS: Final = (
    ("streams", lambda each: f"{each.streams:.0f}"),
    ("tokens/s", lambda each: f"{each.tokens_per_s:,.0f}"),
    ("tokens a step", lambda each: f"{each.tokens_per_step:.0f}"),
    ("tokens an event", lambda each: f"{each.tokens_per_event:.3f}"),
    ("gap p50, ms", lambda each: f"{each.gap_ms_p50:.0f}"),
    ("gap p99, ms", lambda each: f"{each.gap_ms_p99:.0f}"),
    ("longest gap, ms", lambda each: f"{each.gap_ms_max:.0f}"),
    ("events a stream, least", lambda each: f"{each.least_events:.0f}"),
    ("events a stream, middle", lambda each: f"{each.middle_events:.0f}"),
    ("engine CPU ms a step", lambda each: f"{each.engine_ms_per_step:.2f}"),
    ("client's part of a core", lambda each: f"{each.client_share:.2f}"),
)
