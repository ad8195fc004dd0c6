"""CPU time and memory of a daemon's processes, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """cpu_seconds: user and system since the start. resident_mib: memory now."""

    cpu_seconds: float
    resident_mib: float


def usage_by_title(pid: int) -> dict[str, Usage]:
    """Each process of the tree under `pid`, by what it calls itself."""
    return {_title(each): _usage(each) for each in _tree(pid)}


def _tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found.extend(_tree(int(child)))
    return found


def _title(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    title = b" ".join(words).decode(errors="replace").strip()
    return title if title.startswith("tokend: ") else "tokend: supervisor"


def _usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])  # utime, stime
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(ticks / _TICKS, pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20))
