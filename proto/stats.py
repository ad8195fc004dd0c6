"""Statistics that the engine sends to a front end: gauges and deltas, never totals.

A total would go back to 0 when the engine restarts.
"""

from typing import Final

import msgspec

METRIC_CELLS: Final = 2048
"""Numbers of one front end's metrics; those of all front ends are in one shared memory."""
METRIC_BYTES: Final = 8 * METRIC_CELLS


class KVEviction(msgspec.Struct, array_like=True, frozen=True):
    """Times of one sampled block whose content was overwritten, in seconds.

    lifetime: since it was allocated. idle: since a request last started to use it.
    reuse_gaps: between those starts, the allocation being the first.
    """

    lifetime: float
    idle: float
    reuse_gaps: list[float] = []


class KVMediumStats(msgspec.Struct, array_like=True, frozen=True):
    """Copies between the KV pool and one other medium, over all ranks.

    Deltas: finished copies, their bytes and seconds (of the slowest rank); blocks not stored
    because they were stored already or are not expected to be reused (num_skipped), or because
    the medium was full (num_unstored); failed copies. Gauge: usage, 0 to 1; 0 if unknown.
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
    num_waiting that wait for something other than KV blocks), num_queued_reqs, num_queued_tokens
    (choices that wait for their first step, and their prompt tokens).
    All others are deltas since the last message. Prefix cache figures are in tokens (external:
    lookups and hits of the KV connector); num_corrupted counts requests that ended because their
    logits were not finite.

    Agent sessions. Gauges: num_pinned_blocks (a shared one counts once), num_pinned_agent_sessions.
    Deltas: pins taken, used by a later turn of their session, expired, and released because the
    blocks were needed; agent_session_seconds: from the first arrival of a session to the end of its
    last step; tool_seconds: from the end of a turn to the next arrival of its session.

    num_discarded_tokens: tokens sampled for choices that had ended already.

    Speculative decoding: num_drafts verified, their tokens (num_draft_tokens), those of them that
    were accepted, in all and by position in the draft (accepted_per_pos), and tokens that a grammar
    refused before they were computed (num_invalid_draft_tokens). draft_tokens_by_source and
    accepted_by_source: those by the method of --speculative-config that drafted them.

    Estimates per worker, with --enable-mfu-metrics: FLOPs, bytes read and written; by step, their
    shares of the configured peak rates.
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
    num_pinned_agent_sessions: int = 0
    num_pins_taken: int = 0
    num_pins_hit: int = 0
    num_pins_expired: int = 0
    num_pins_given_up: int = 0
    agent_session_seconds: list[float] = []
    tool_seconds: list[float] = []
    num_discarded_tokens: int = 0
    estimated_flops: int = 0
    estimated_read_bytes: int = 0
    estimated_write_bytes: int = 0
    flops_shares: list[float] = []
    bandwidth_shares: list[float] = []
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = []
    num_invalid_draft_tokens: int = 0
    draft_tokens_by_source: dict[str, int] = {}
    accepted_by_source: dict[str, int] = {}

    @property
    def cpu_offload_usage(self) -> float:
        """Used share of the host memory for offloaded KV, 0 to 1; 0 without offloading."""
        return max((stats.usage for stats in self.kv_media if stats.medium == "CPU"), default=0.0)
