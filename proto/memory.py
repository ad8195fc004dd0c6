"""What is known of the machine's memory, from /proc and the control group."""

import os
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping, within the limit of the control group.

    root: holds the `proc` and `sys` trees that describe the machine.
    """
    fields = dict(
        line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if line
    )
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = root / "sys/fs/cgroup"
    limit, used = _read_number(group / "memory.max"), _read_number(group / "memory.current")
    if limit is None or used is None:
        return free
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return max(0, min(free, limit - used + int(stat["inactive_file"])))


def resident_memory(pid: int, root: Path = Path("/")) -> int:
    """Bytes of a process that are in memory; 0 for one that is gone."""
    try:
        pages = int((root / f"proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _read_number(path: Path) -> int | None:
    """The number in a file; None where there is no such file or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
