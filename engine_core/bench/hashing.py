"""How long the block hashes of a prompt take."""

from time import thread_time_ns

from engine_core.bench.recipes import prompt_of
from engine_core.bench.summary import timing
from engine_core.kv_cache.hashing import BlockHasher
from proto.benchmark import SchedulerTimings, SchedulerWorkload

_FINGERPRINT = bytes(32)


def time_hashing(workload: SchedulerWorkload) -> SchedulerTimings:
    """Hash the prompt of the first request `measured_steps` times."""
    hasher = BlockHasher(workload.block_size, _FINGERPRINT)
    tokens = prompt_of(workload.requests[0])
    samples = []
    for _ in range(workload.warm_up_steps + workload.measured_steps):
        started = thread_time_ns()
        hasher.extend([], tokens)
        samples.append((thread_time_ns() - started) / 1e3)
    counted = samples[workload.warm_up_steps :]
    return SchedulerTimings(workload=workload.name, num_steps=len(counted), hash=timing(counted))
