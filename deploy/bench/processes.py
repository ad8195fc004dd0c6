"""What the processes of a daemon take of the machine, from /proc.

A process that ends while it is looked at is left out, and so is one that has no title
yet: what it takes then says nothing.
"""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_PREFIX: Final = "tokend: "
_LOCK: Final = "/lock"
SUPERVISOR: Final = _PREFIX + "supervisor"


@dataclass(frozen=True)
class Usage:
    """cpu_seconds: user and system since the start. resident_mib: memory now.

    descriptors: open files, sockets among them.
    """

    pid: int
    cpu_seconds: float
    resident_mib: float
    descriptors: int
    sockets: int


def usage_by_title(pid: int, prefix: str = _PREFIX) -> dict[str, Usage]:
    """Each process of the daemon whose supervisor is `pid`, by what it calls itself.

    prefix: of the titles of processes that count. Whatever `pid` is, it is called SUPERVISOR.
    """
    found = {}
    for title, each in _processes(pid, prefix):
        with contextlib.suppress(OSError):
            found[title] = _usage(each)
    return found


def pids_by_title(pid: int) -> dict[str, int]:
    """The same without what they take."""
    return dict(_processes(pid))


def run_directory(pid: int) -> Path | None:
    """Where the sockets of the daemon are, told by the lock that its supervisor holds."""
    for target in _targets(pid):
        if target.endswith(_LOCK):
            return Path(target).parent
    return None


def _processes(pid: int, prefix: str = _PREFIX) -> Iterator[tuple[str, int]]:
    yield SUPERVISOR, pid
    for each in _descendants(pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
            title = b" ".join(words).decode(errors="replace").strip()
            if title.startswith(prefix):
                yield title, each


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def _usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])  # utime, stime
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    targets = list(_targets(pid))
    return Usage(
        pid,
        ticks / _TICKS,
        pages * _PAGE / (1 << 20),
        len(targets),
        sum(target.startswith("socket:") for target in targets),
    )


def _targets(pid: int) -> Iterator[str]:
    """What the open descriptors of a process are."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


# Whether memory stays flat: the resident size of each process, second by second.


MAX_MIB: Final = 8.0
"""Most growth of a process under a flood: less than half a KiB of each that is refused."""


class Memory:
    """pid: of the supervisor. Sizes in MiB, by process title."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.sizes: defaultdict[str, list[float]] = defaultdict(list)

    def look(self) -> None:
        """Note what each process has now."""
        for title, usage in usage_by_title(self._pid).items():
            self.sizes[title].append(usage.resident_mib)

    def growth(self, title: str) -> float:
        """MiB from the end of the first tenth of the time, when buffers have their sizes."""
        sizes = self.sizes[title]
        return sizes[-1] - sizes[len(sizes) // 10]


# A daemon at rest, before and after a disturbance: nothing may be left of it.
#
# Looks at what clients and operators can see: gauges, processes, descriptors.


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
