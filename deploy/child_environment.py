"""The environment variables that each role's process gets: the one place that sets them."""

import os
from collections.abc import Mapping
from typing import Final

from proto.config import DeviceConfig
from proto.host_resources import allowed_cores, cores_of_worker
from proto.lifecycle import Role

_THREADS: Final = "OMP_NUM_THREADS"
_SPIN: Final = {"GOMP_SPINCOUNT": "4000"}
"""Some 80 microseconds: what lies between two operations, far less than a scheduler tick."""
_BIND: Final = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
_PLACING: Final = frozenset({*_BIND, "GOMP_CPU_AFFINITY"})
_NVIDIA_DRIVER: Final = "/dev/nvidiactl"


def child_environment(
    variables: Mapping[str, str], role: Role, device: DeviceConfig, num_workers: int = 1
) -> dict[str, str]:
    """What the process of a role inherits.

    OpenMP reads its thread count when its library loads, so a worker must be born
    with it: --cpu-threads, or else what the user's environment says, or else its share of the
    cores that this process may use by its affinity and its control groups. Its idle
    threads spin for a moment and then sleep: those that spin on win milliseconds a
    step on an idle machine, and lose tenfold as soon as anybody else wants the same
    cores; docs/benchmarks/threads-and-start.md has the figures. Where there is one for
    each core, each is bound to its own: two on one core would wait for each other at every
    barrier until the scheduler parts them. The user's environment goes before that.
    Elsewhere numpy needs no threads of its own.
    """
    if role != "worker":
        return {**variables, _THREADS: "1", "OPENBLAS_NUM_THREADS": "1"}
    spin = {} if "OMP_WAIT_POLICY" in variables else _SPIN
    given = {_THREADS: str(cores_of_worker(num_workers)), **spin, **variables}
    if device.cpu_threads is not None:
        given[_THREADS] = str(device.cpu_threads)
    if _computes_on_cpu(device) and given[_THREADS] == str(allowed_cores()):
        return given if _PLACING & variables.keys() else {**given, **_BIND}
    return given


def _computes_on_cpu(device: DeviceConfig) -> bool:
    """Of a worker that has a GPU no thread is worth a core of its own."""
    return device.device == "cpu" or (
        device.device == "auto" and not os.path.exists(_NVIDIA_DRIVER)
    )
