"""CPU time, memory and descriptors of the processes of a daemon, from /proc."""

import contextlib
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.bench.processes import open_targets, pids_by_title

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_PREFIX: Final = "tokend: "


@dataclass(frozen=True)
class ProcessUsage:
    """Resources of one process.

    cpu_seconds: user and system time since its start. resident_mib: resident memory.
    descriptors: open descriptors, including sockets.
    """

    pid: int
    cpu_seconds: float
    resident_mib: float
    descriptors: int
    sockets: int


def usage_by_title(pid: int, prefix: str = _PREFIX) -> dict[str, ProcessUsage]:
    """Return the resources of a process and its descendants, by process title.

    pid: of the supervisor, which gets the title SUPERVISOR. prefix: omit other titles. Processes
    that end meanwhile are omitted.
    """
    found = {}
    for title, process in pids_by_title(pid, prefix).items():
        with contextlib.suppress(OSError):
            found[title] = _usage(process)
    return found


def _usage(pid: int) -> ProcessUsage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])  # utime, stime
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    targets = list(open_targets(pid))
    return ProcessUsage(
        pid,
        ticks / _TICKS,
        pages * _PAGE / (1 << 20),
        len(targets),
        sum(target.startswith("socket:") for target in targets),
    )


class MemoryLog:
    """Resident memory of each process over time. sizes: in MiB, by process title."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.sizes: defaultdict[str, list[float]] = defaultdict(list)

    def sample(self) -> None:
        for title, usage in usage_by_title(self._pid).items():
            self.sizes[title].append(usage.resident_mib)

    def growth(self, title: str) -> float:
        """Return the growth in MiB since the first tenth of the time, which allocates buffers."""
        sizes = self.sizes[title]
        return sizes[-1] - sizes[len(sizes) // 10]
