"""What is known of the machine's memory, from /proc and the control group."""

import os
from pathlib import Path

from proto.control_group import memory_left


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping, within the limits of the control groups.

    root: holds the `proc` and `sys` trees that describe the machine.
    """
    fields = dict(
        line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if line
    )
    free = int(fields["MemAvailable"].split()[0]) * 1024
    left = memory_left(root)
    return free if left is None else min(free, left)


def resident_memory(pid: int, root: Path = Path("/")) -> int:
    """Bytes of a process that are in memory; 0 for one that is gone."""
    try:
        pages = int((root / f"proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
