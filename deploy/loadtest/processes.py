"""What the processes of a daemon take of the machine, from /proc.

A process that ends while it is looked at is left out, and so is one that has no title
yet: what it takes then says nothing.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
