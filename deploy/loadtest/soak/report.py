"""What a soak found: what must not be, the figures as lines, and the curves as panels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.loadtest.limits import Limit, limits_table
from deploy.loadtest.plot import Panel, Points, page
from deploy.loadtest.soak.load import Load
from deploy.loadtest.soak.samples import MAX_DRIFT, MAX_MIB, Sample, drifts, growths, settled

_SHOWN_FAULTS: Final = 20


@dataclass(frozen=True)
class Report:
    """after: what was not as before when it was over. worker: what it ran against."""

    load: Load
    samples: Sequence[Sample]
    after: Sequence[str]
    worker: str

    @property
    def faults(self) -> list[str]:
        """Everything that must not be and can be shown, in words."""
        return [
            *(f"failed: {each}" for each in self.load.failures),
            *(f"afterwards: {each}" for each in self.after),
        ]

    @property
    def limits(self) -> list[Limit]:
        """What the run is judged by. A run too short for a drift of its latency has none."""
        return [
            Limit("failed requests", len(self.load.failures), "at most", 0),
            Limit("left over", len(self.after), "at most", 0),
            *(
                Limit(f"{each.name}: growth", each.judged_mib, "at most", MAX_MIB, "MiB")
                for each in growths(self.samples)
            ),
            *(
                Limit("p99, last quarter / first", each, "at most", MAX_DRIFT)
                for each in drifts(self.samples)
            ),
        ]

    @property
    def notes(self) -> list[str]:
        """The figures, a line each."""
        load, seconds = self.load, self.samples[-1].seconds
        first, last = settled(self.samples)[0], self.samples[-1]
        return [
            f"{load.num_requests:,} requests in {seconds:,.0f} s "
            f"({load.num_requests / seconds:,.0f} a second) against {self.worker}; "
            f"{load.num_left:,} were left by their clients, {len(load.failures):,} failed",
            f"p99 {first.p99_ms:.1f} ms after the warm-up, {last.p99_ms:.1f} ms at the end",
            *(each.describe() for each in growths(self.samples)),
        ]

    def show(self, console: Console) -> None:
        """Print everything."""
        table = Table(title="processes after the warm-up and at the end of the load")
        for name in ("process", "MiB", "descriptors", "sockets"):
            table.add_column(name, justify="left" if name == "process" else "right")
        first = settled(self.samples)[0].usage
        for title, now in sorted(self.samples[-1].usage.items()):
            was = first.get(title, now)
            table.add_row(
                title.removeprefix("tokend: "),
                f"{was.resident_mib:.1f} → {now.resident_mib:.1f}",
                f"{was.descriptors} → {now.descriptors}",
                f"{was.sockets} → {now.sockets}",
            )
        console.print(table)
        for line in [*self.notes, *self.faults[:_SHOWN_FAULTS]]:
            console.print(line, markup=False, highlight=False)
        console.print(limits_table(self.limits))

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "requests": self.load.num_requests,
            "left": self.load.num_left,
            "faults": self.faults,
            "samples": [each.plain() for each in self.samples],
        }

    def plot(self) -> str:
        """The curves, as an HTML file."""
        return page("tokend under short requests", self.notes, self._panels(), "requests")

    def _panels(self) -> list[Panel]:
        return [
            Panel("resident memory, MiB", self._of_processes("resident_mib")),
            Panel("open descriptors", self._of_processes("descriptors")),
            Panel("sockets", self._of_processes("sockets")),
            Panel("latency, ms", self._of_all(p50="p50_ms", p99="p99_ms")),
            Panel("requests a second", self._of_all(rate="requests_per_second")),
            Panel("part of the KV pool in use", self._of_all(blocks="blocks")),
        ]

    def _of_processes(self, field: str) -> dict[str, Points]:
        titles = sorted({title for each in self.samples for title in each.usage})
        return {
            title.removeprefix("tokend: "): [
                (each.requests, getattr(each.usage[title], field))
                for each in self.samples
                if title in each.usage
            ]
            for title in titles
        }

    def _of_all(self, **fields: str) -> dict[str, Points]:
        return {
            name: [(each.requests, getattr(each, field)) for each in self.samples]
            for name, field in fields.items()
        }
