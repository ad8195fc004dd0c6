"""Statistics on the wire: gauges and deltas, never totals.

A total would jump back when the engine restarts; a delta only stops.
"""

from typing import Final

import msgspec

METRIC_CELLS: Final = 512
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


class SchedulerStats(msgspec.Struct, array_like=True, frozen=True):
    """The state of the scheduler after a step, and what the step added.

    Gauges: num_running, num_waiting, kv_cache_usage (0 to 1), num_deferred (those of
    num_waiting that wait for something else than room), num_queued_reqs, num_queued_tokens (choices
    that wait for their first step, and the tokens of their prompts).
    Deltas since the last message: the rest. Prefix cache figures are in tokens
    (external: of what the KV connector was asked for, and had);
    num_corrupted are requests that ended because their scores were not numbers.
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
