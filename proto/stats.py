"""Statistics on the wire: gauges and deltas, never totals.

A total would jump back when the engine restarts; a delta only stops.
"""

from typing import Final

import msgspec

METRIC_CELLS: Final = 2048
"""Numbers that a front end counts in; those of all front ends lie in one shared memory."""
METRIC_BYTES: Final = 8 * METRIC_CELLS


class KVEviction(msgspec.Struct, array_like=True, frozen=True):
    """The life of one sampled block whose content was overwritten, in seconds.

    lifetime: since it was allocated. idle: since a request last started to use it.
    reuse_gaps: between those starts, the allocation being the first.
    """

    lifetime: float
    idle: float
    reuse_gaps: list[float] = []


class KVMediumStats(msgspec.Struct, array_like=True, frozen=True):
    """Copies between the KV pool and one other medium, over all ranks, and what it holds.

    Deltas: copies that are over, their bytes and seconds (the slowest rank's); blocks that were
    left out because they were there or nobody is known to want them again (num_skipped), or
    because there was no room (num_unstored); copies that failed. Gauge: usage, 0 to 1, or 0 of
    a medium that does not say.
    """

    medium: str
    num_loads: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    num_stores: int = 0
    store_bytes: int = 0
    store_seconds: float = 0.0
    num_skipped: int = 0
    num_unstored: int = 0
    num_failed: int = 0
    usage: float = 0.0


class SchedulerStats(msgspec.Struct, array_like=True, frozen=True):
    """The state of the scheduler after a step, and what the step added.

    Gauges: num_running, num_waiting, kv_cache_usage (0 to 1), num_deferred (those of
    num_waiting that wait for something else than room), num_queued_reqs, num_queued_tokens (choices
    that wait for their first step, and the tokens of their prompts).
    Deltas since the last message: the rest. Prefix cache figures are in tokens
    (external: of what the KV connector was asked for, and had);
    num_corrupted are requests that ended because their scores were not numbers.

    Of agents (agents.py). Gauges: num_pinned_blocks (a shared one counts once), num_pinned_jobs.
    Deltas: pins that were taken, that a later turn of their job found, whose time was over,
    and that were given up because somebody needed the room; seconds from the first arrival of
    each job that is over to the end of its last step (job_seconds), and from the end of each
    turn to the next arrival of its job (tool_seconds).

    num_discarded_tokens: that were drawn and that nobody gets, because their choice was over.
    request_preemptions: how often each choice that is over was preempted, if it was computed.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_scheduled_tokens: int = 0
    kv_evictions: list[KVEviction] = []
    num_deferred: int = 0
    num_corrupted: int = 0
    num_queued_reqs: int = 0
    num_queued_tokens: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    kv_media: list[KVMediumStats] = []
    num_pinned_blocks: int = 0
    num_pinned_jobs: int = 0
    num_pins_taken: int = 0
    num_pins_hit: int = 0
    num_pins_expired: int = 0
    num_pins_given_up: int = 0
    job_seconds: list[float] = []
    tool_seconds: list[float] = []
    num_discarded_tokens: int = 0
    request_preemptions: list[int] = []

    @property
    def cpu_offload_usage(self) -> float:
        """How full the host memory is that KV is offloaded to, 0 to 1; 0 where there is none."""
        return max((each.usage for each in self.kv_media if each.medium == "CPU"), default=0.0)
