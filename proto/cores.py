"""How many threads this process can keep busy: affinity, hardware threads, control groups."""

import math
import os
from pathlib import Path

from proto.control_group import cpu_limit


def usable_cores(root: Path = Path("/")) -> int:
    """Cores of the affinity mask, or fewer where a control group grants less time; at least 1.

    Two hardware threads of a core count once: they share what multiplies. root: holds the
    `proc` and `sys` trees that describe the machine.
    """
    cores = {_core(root, cpu) for cpu in os.sched_getaffinity(0)}
    limit = cpu_limit(root)
    return len(cores) if limit is None else max(1, min(len(cores), math.ceil(limit)))


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
