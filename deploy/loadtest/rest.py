"""A daemon at rest, before and after a disturbance: nothing may be left of it.

Looks at what clients and operators can see: gauges, processes, descriptors.
"""

import time
from dataclasses import dataclass
from typing import Final, Protocol

from deploy.loadtest.processes import run_directory, usage_by_title

GAUGES: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
_SETTLE_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.1


class Observed(Protocol):
    """A daemon that can be looked at."""

    @property
    def pid(self) -> int:
        """Of its supervisor."""
        ...

    def metric(self, name: str) -> float:
        """Sum over the samples of a metric."""
        ...


@dataclass(frozen=True)
class Rest:
    """gauges: of requests and blocks, by metric. descriptors: open files of each process.

    num_paths: in the run directory, where each life of a process has sockets of its own.
    """

    gauges: dict[str, float]
    descriptors: dict[str, int]
    num_paths: int = 0

    @classmethod
    def of(cls, daemon: Observed) -> "Rest":
        gauges = {name: daemon.metric(name) for name in GAUGES}
        usage = usage_by_title(daemon.pid)
        descriptors = {title: each.descriptors for title, each in sorted(usage.items())}
        directory = run_directory(daemon.pid)
        return cls(gauges, descriptors, len(list(directory.iterdir())) if directory else 0)

    def left_over(self, after: "Rest") -> list[str]:
        """What is not as it was here, in words."""
        found = [
            f"{name} was {self.gauges[name]:g} and is {value:g}"
            for name, value in after.gauges.items()
            if value != self.gauges[name]
        ]
        if after.num_paths > self.num_paths:
            found.append(f"{after.num_paths} names in the run directory, not {self.num_paths}")
        for title in sorted(self.descriptors.keys() | after.descriptors.keys()):
            before, now = self.descriptors.get(title), after.descriptors.get(title)
            if before is None or now is None:
                found.append(f"{title}: {'new' if before is None else 'gone'}")
            elif now > before:
                found.append(f"{title}: {now} open descriptors instead of {before}")
        return found


def left_over(before: Rest, daemon: Observed) -> list[str]:
    """What is still not as it was when the daemon has had time to settle."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while found := before.left_over(Rest.of(daemon)):
        if time.monotonic() > deadline:
            return found
        time.sleep(_POLL_SECONDS)
    return []
