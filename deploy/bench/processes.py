"""Memory and open descriptors of the processes of a daemon, from /proc.

Processes that end meanwhile, or have no title yet, are omitted.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.bench.servers import MeasuredDaemon

_PREFIX: Final = "tokend: "
_LOCK: Final = "/lock"
SUPERVISOR: Final = _PREFIX + "supervisor"


def memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; shared pages count once (PSS)."""
    total = 0
    for process in (pid, *_descendants(pid)):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += 1024 * int(text.partition("\nPss:")[2].split()[0])
    return total


def pids_by_title(pid: int, prefix: str = _PREFIX) -> dict[str, int]:
    """Return the ids of a supervisor, as SUPERVISOR, and its descendants, by process title.

    prefix: other titles are omitted.
    """
    found = {SUPERVISOR: pid}
    for process in _descendants(pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            title = b" ".join(words).decode(errors="replace").strip()
            if title.startswith(prefix):
                found[title] = process
    return found


def run_directory(pid: int) -> Path | None:
    """Return the run directory of a daemon, found by the lock that its supervisor holds."""
    for target in open_targets(pid):
        if target.endswith(_LOCK):
            return Path(target).parent
    return None


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def open_targets(pid: int) -> Iterator[str]:
    """Yield the targets of the open descriptors of a process."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


GAUGES: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
_GRAMMARS: Final = "tokend grammar sandbox"
_SETTLE_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class IdleState:
    """State of an idle daemon, to compare before and after a disturbance.

    gauges: of requests and blocks, by metric. descriptors: open descriptors by process title.
    num_paths: files in the run directory, which contains sockets of each incarnation.
    """

    gauges: dict[str, float]
    descriptors: dict[str, int]
    num_paths: int = 0

    @classmethod
    def settled(cls, daemon: MeasuredDaemon) -> "IdleState":
        """Return the state once the engine has its process for grammars, or after 15 s.

        That process starts in the engine's first idle second.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while len(pids_by_title(daemon.pid, _GRAMMARS)) == 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return cls.of(daemon)

    @classmethod
    def of(cls, daemon: MeasuredDaemon) -> "IdleState":
        gauges = {name: daemon.metric(name) for name in GAUGES}
        descriptors = {}
        for title, pid in sorted(pids_by_title(daemon.pid).items()):
            with contextlib.suppress(OSError):
                descriptors[title] = len(list(open_targets(pid)))
        directory = run_directory(daemon.pid)
        return cls(gauges, descriptors, len(list(directory.iterdir())) if directory else 0)

    def find_leftovers(self, after: "IdleState") -> list[str]:
        """Return descriptions of resources that have grown since this state."""
        found = [
            f"{name} was {self.gauges[name]:g} and is {value:g}"
            for name, value in after.gauges.items()
            if value != self.gauges[name]
        ]
        if after.num_paths > self.num_paths:
            found.append(f"{after.num_paths} files in the run directory, not {self.num_paths}")
        for title in sorted(self.descriptors.keys() | after.descriptors.keys()):
            before, now = self.descriptors.get(title), after.descriptors.get(title)
            if before is None or now is None:
                found.append(f"{title}: {'new' if before is None else 'gone'}")
            elif now > before:
                found.append(f"{title}: {now} open descriptors instead of {before}")
        return found


def find_leftovers(before: IdleState, daemon: MeasuredDaemon) -> list[str]:
    """Return what has grown since `before` and does not shrink again within 15 s."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while found := before.find_leftovers(IdleState.of(daemon)):
        if time.monotonic() > deadline:
            return found
        time.sleep(_POLL_SECONDS)
    return []
