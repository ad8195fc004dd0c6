"""What a daemon did in a turn, beside what the machine allowed just before it.

Knows loads and figures by their names; how limits are measured is in hardware.py, and what
they come to in ceiling.py.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from deploy.loadtest.ceiling import TARGET_SHARE, ClosedLoad, Hardware
from deploy.loadtest.comparison import Figure, Turn
from deploy.loadtest.hardware import Limits
from proto.codec import to_json_line

ALONE: Final = "alone"
"""The load of one request after the other."""


def ceiling_figures(load: str, title: str) -> list[Figure]:
    """The rows of one load; alone also how near a token is to reading the weights once."""
    found = [
        Figure(f"{load}_ceiling_output_tokens_per_s", f"ceiling, output tokens/s, {title}"),
        Figure(f"{load}_share_of_ceiling", f"share of the ceiling, {title} (>= {TARGET_SHARE})", 3),
    ]
    if load == ALONE:
        found += [
            Figure(f"{load}_weights_read_ms", "reading the weights once, ms"),
            Figure(f"{load}_tpot_of_weights_read", "time per token alone / reading the weights"),
        ]
    return found


class Bound(Protocol):
    """What held at the beginning of a turn."""

    def beside(self, turn: Turn) -> Turn:
        """The turn, and what is made of both."""
        ...


class Bounds(Protocol):
    """Of one server."""

    def figures(self, load: str, title: str) -> Sequence[Figure]:
        """The rows of a load that `beside` has values for."""
        ...

    def measure(self) -> Bound:
        """Now, before a turn of the server; all servers are idle."""
        ...

    def describe(self) -> Sequence[str]:
        """Lines for people, of what was measured last."""
        ...


class NoBounds:
    """Of a server whose weights and arithmetic nobody here knows."""

    def figures(self, load: str, title: str) -> Sequence[Figure]:
        return ()

    def measure(self) -> Bound:
        return self

    def describe(self) -> Sequence[str]:
        return ()

    def beside(self, turn: Turn) -> Turn:
        return turn


class DaemonBounds:
    """Of a daemon. loads: that a turn has, by name."""

    def __init__(self, limits: Limits, loads: Mapping[str, ClosedLoad]) -> None:
        self._limits = limits
        self._loads = loads
        self._lines: list[str] = []

    def figures(self, load: str, title: str) -> Sequence[Figure]:
        return ceiling_figures(load, title)

    def measure(self) -> Bound:
        hardware = self._limits.measure()
        ceilings = {
            name: hardware.ceiling(load, self._limits.budget) for name, load in self._loads.items()
        }
        self._lines = [f"{self._limits.name}, last measured: {hardware.describe()}"]
        self._lines += [
            f"  {name.replace('_', ' ')}: {each.describe()}" for name, each in ceilings.items()
        ]
        rates = {name: each.output_tokens_per_s for name, each in ceilings.items()}
        return _DaemonBound(hardware, rates)

    def describe(self) -> Sequence[str]:
        return self._lines


@dataclass(frozen=True)
class _DaemonBound:
    """rates: output tokens a second that each load allows."""

    hardware: Hardware
    rates: Mapping[str, float]

    def beside(self, turn: Turn) -> Turn:
        found = {**turn, "limits": json.loads(to_json_line(self.hardware.timings))}
        for load, rate in self.rates.items():
            found[f"{load}_ceiling_output_tokens_per_s"] = rate
            found[f"{load}_share_of_ceiling"] = turn[f"{load}_output_tokens_per_s"] / rate
        weights_ms = self.hardware.weights_ms
        found[f"{ALONE}_weights_read_ms"] = weights_ms
        if f"{ALONE}_tpot_ms_p50" in turn:  # not where every request failed
            found[f"{ALONE}_tpot_of_weights_read"] = turn[f"{ALONE}_tpot_ms_p50"] / weights_ms
        return found
