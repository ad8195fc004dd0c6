"""The environment variables that each role's process gets: the one place that sets them."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from proto.config import DeviceConfig
from proto.lifecycle import Role

_THREADS: Final = "OMP_NUM_THREADS"
_SPIN: Final = {"GOMP_SPINCOUNT": "1000"}
"""Some 20 microseconds: the pause between two operations, far less than a scheduler tick."""
_CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def child_environment(
    variables: Mapping[str, str], role: Role, device: DeviceConfig
) -> dict[str, str]:
    """What the process of a role inherits.

    OpenMP reads its thread count when its library loads, so a worker must be born
    with it: --cpu-threads, or else what the user's environment says, or else the
    cores that this process may use. Its idle threads spin for a moment and then
    sleep: those that spin on win milliseconds a step on an idle machine, and lose
    tenfold as soon as anybody else wants the same cores; docs/benchmarks.md has the
    figures. The user's environment goes before that. Elsewhere numpy needs no
    threads of its own.
    """
    if role != "worker":
        return {**variables, _THREADS: "1", "OPENBLAS_NUM_THREADS": "1"}
    spin = {} if "OMP_WAIT_POLICY" in variables else _SPIN
    given = {_THREADS: str(usable_cores()), **spin, **variables}
    if device.cpu_threads is not None:
        given[_THREADS] = str(device.cpu_threads)
    return given


def usable_cores(quota_file: Path = _CPU_QUOTA) -> int:
    """Cores of the affinity mask, or fewer when a control group grants less time."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text().split()
        granted = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return cores  # no control group, or the word "max"
    return max(1, min(cores, granted))
