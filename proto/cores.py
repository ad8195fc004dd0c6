"""How many threads this process can keep busy: affinity, hardware threads, control groups."""

import math
import os
from pathlib import Path
from typing import Final

from proto.control_group import cpu_limit

ALLOWED_CPUS: Final = frozenset(os.sched_getaffinity(0))
"""What this process may run on. OpenMP may bind the thread that loads its library to one of
them, so whoever loads it imports this first."""


def usable_cores(root: Path = Path("/")) -> int:
    """Cores of the affinity mask, or fewer where a control group grants less time; at least 1.

    root: holds the `proc` and `sys` trees that describe the machine.
    """
    cores, limit = allowed_cores(root), cpu_limit(root)
    return cores if limit is None else max(1, min(cores, math.ceil(limit)))


def allowed_cores(root: Path = Path("/")) -> int:
    """Cores of the affinity mask, whatever time is granted on them.

    Two hardware threads of a core count once: they share what multiplies.
    """
    return len({_core(root, cpu) for cpu in ALLOWED_CPUS})


def cores_of_worker(num_workers: int, root: Path = Path("/")) -> int:
    """Cores for each of so many workers of this machine; at least 1."""
    return max(1, usable_cores(root) // num_workers)


def _core(root: Path, cpu: int) -> str:
    """A name that the hardware threads of a core share."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)
