"""CPU cores and memory that this process may use: affinity, control groups, /proc, limits."""

import contextlib
import ctypes
import math
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

_MOUNT: Final = "sys/fs/cgroup"
_HYBRID: Final = "sys/fs/cgroup/unified"
_OWN: Final = "proc/self/cgroup"


def cpu_limit(root: Path) -> float | None:
    """Return the CPU limit of the control groups, in CPU seconds per second; None for no limit.

    A process is bound by the limits of its own group and of all groups around it; versions 1 and 2:

        /proc/self/cgroup   4:memory:/system/tokend          0::/system/tokend
        limits in           sys/fs/cgroup/memory/system/…    sys/fs/cgroup/system/…

    In a container the first folders may be missing, because the mount starts further down.

    root: holds the `proc` and `sys` trees that describe the machine.
    """
    limits = [
        limit
        for folder in _folders(root, "cpu")
        for limit in (_quota(folder / "cpu.max"), _old_quota(folder))
        if limit is not None
    ]
    return min(limits, default=None)


def memory_left(root: Path) -> int | None:
    """Return the bytes that control groups still allow (page cache is free); None for no limit."""
    left = [
        _left(folder, *names)
        for folder in _folders(root, "memory")
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
    ]
    return min((size for size in left if size is not None), default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders that may hold limits of a controller, of both versions."""
    for name, group in _own_groups(root):
        if name == "":
            mounts = [root / _MOUNT, root / _HYBRID]
        elif controller in name.split(","):
            mounts = [root / _MOUNT / name, root / _MOUNT / controller]
        else:
            continue
        inside = PurePosixPath(group.lstrip("/"))
        for mount in mounts:
            yield from (mount / folder for folder in (inside, *inside.parents))


def _own_groups(root: Path) -> list[tuple[str, str]]:
    """Pairs of controllers ("" for version 2) and group; the root of version 2 if unknown."""
    try:
        lines = (root / _OWN).read_text().splitlines()
    except OSError:
        return [("", "/")]
    fields = [line.split(":", 2) for line in lines]
    return [(field[1], field[2]) for field in fields if len(field) == 3]


def _quota(file: Path) -> float | None:
    """CPU limit in a cpu.max file: quota in microseconds, or "max", and period."""
    match _words(file):
        case [quota, period] if quota.isdigit() and period.isdigit() and int(period):
            return int(quota) / int(period)
    return None


def _old_quota(folder: Path) -> float | None:
    """CPU limit of version 1, where -1 is no limit."""
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _left(folder: Path, limit_name: str, used_name: str, cached_name: str) -> int | None:
    limit, used = _number(folder / limit_name), _number(folder / used_name)
    if limit is None or used is None:
        return None
    words = _words(folder / "memory.stat")
    stat = dict(zip(words[::2], words[1::2], strict=False))
    return max(0, limit - used + int(stat.get(cached_name, "0")))


def _number(file: Path) -> int | None:
    """The number in a file; None if the file is missing or holds something else."""
    words = _words(file)
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


# ---- CPU cores ----


ALLOWED_CPUS: Final = frozenset(os.sched_getaffinity(0))
"""CPUs of the affinity mask at import. Import this module before loading OpenMP, which may bind the
loading thread to a single CPU."""


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores of the affinity mask, or fewer if control groups allow less; at least 1.

    root: holds the `proc` and `sys` trees that describe the machine.
    """
    cores, limit = allowed_cores(root), cpu_limit(root)
    return cores if limit is None else max(1, min(cores, math.ceil(limit)))


def allowed_cores(root: Path = Path("/")) -> int:
    """Return the cores of the affinity mask, without limits of control groups.

    Hardware threads of one core count once: they share its arithmetic units.
    """
    return len({_core(root, cpu) for cpu in ALLOWED_CPUS})


def cores_of_worker(num_workers: int, root: Path = Path("/")) -> int:
    """Return the cores for each of `num_workers` workers on this machine; at least 1."""
    return max(1, usable_cores(root) // num_workers)


def cores_by_node(root: Path = Path("/")) -> dict[int, list[list[int]]]:
    """Return the cores of the affinity mask by memory node; a core is its CPUs, lowest first.

    Nodes without such a core are left out. Empty if the system does not describe its nodes.
    """
    nodes: dict[int, list[list[int]]] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cores: dict[str, list[int]] = {}
        for cpu in sorted(_cpu_list(folder / "cpulist") & ALLOWED_CPUS):
            cores.setdefault(_core(root, cpu), []).append(cpu)
        if cores:
            nodes[int(folder.name.removeprefix("node"))] = list(cores.values())
    return dict(sorted(nodes.items()))


def node_of_worker(
    index: int, num_workers: int, num_threads: int, root: Path = Path("/")
) -> int | None:
    """Return the memory node on which all threads of a worker have a core.

    Workers are dealt to the node with the most cores left. None on a machine with one node, or if
    no node has enough cores left for this worker.
    """
    cores_left = {node: len(cores) for node, cores in cores_by_node(root).items()}
    if len(cores_left) < 2 or num_workers * num_threads > sum(cores_left.values()):
        return None
    node = None
    for _ in range(index + 1):
        node = max(cores_left, key=cores_left.__getitem__)
        if cores_left[node] < num_threads:
            return None
        cores_left[node] -= num_threads
    return node


def _cpu_list(file: Path) -> frozenset[int]:
    """The CPUs in a file like "0-3,8-11"."""
    cpus: set[int] = set()
    for part in ",".join(_words(file)).split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _core(root: Path, cpu: int) -> str:
    """An identifier that is the same for all hardware threads of a core."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


# ---- Memory ----


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping, within control group limits.

    root: holds the `proc` and `sys` trees that describe the machine.
    """
    free, left = _free_memory(root), memory_left(root)
    return free if left is None else min(free, left)


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory of the machine, or fewer if control groups allow less."""
    limits = [
        limit
        for folder in _folders(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _number(folder / name)) is not None
    ]
    return min([_meminfo(root, "MemTotal"), *limits])


def is_memory_limited(root: Path = Path("/")) -> bool:
    """Return whether control groups, and not the machine, limit what can be allocated now."""
    left = memory_left(root)
    return left is not None and left < _free_memory(root)


def _free_memory(root: Path) -> int:
    """Return the bytes that the machine can provide without swapping."""
    return _meminfo(root, "MemAvailable")


def _meminfo(root: Path, name: str) -> int:
    """Return a number of /proc/meminfo in bytes."""
    fields = dict(
        line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if line
    )
    return int(fields[name].split()[0]) * 1024


def resident_memory(pid: int, root: Path = Path("/")) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    try:
        pages = int((root / f"proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def process_limits(seconds: float, num_bytes: int) -> Iterator[None]:
    """Limit this process within a block, for work on data that is not trusted.

    seconds: of processor time, after which the process is ended by SIGPROF. num_bytes: of address
    space in addition to what it has, beyond which allocations fail. A crash leaves no core file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    cores = resource.getrlimit(resource.RLIMIT_CORE)
    with open("/proc/self/statm", "rb") as file:
        num_mapped = int(file.read().split()[0]) * resource.getpagesize()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, cores[1]))
    most = num_mapped + num_bytes
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, cores)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_PR_SET_NO_NEW_PRIVS: Final = 38
"""Of Linux's prctl.h."""


def confine_process(num_bytes: int, file_bytes: int, num_files: int) -> None:
    """Limit this process for the rest of its life, as `process_limits` does within a block.

    It can start no process or thread (as root it can), gain no privileges and leave no core file.
    num_bytes: of address space in addition to what it has. file_bytes: of a file that it writes.
    num_files: file descriptors; those with higher numbers that are open stay so.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    with open("/proc/self/statm", "rb") as file:
        num_mapped = int(file.read().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_AS, num_mapped + num_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, num_files),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
