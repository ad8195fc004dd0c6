"""Statistics that the engine sends to a front end: gauges and deltas, never totals.

A total would go back to 0 when the engine restarts.
"""

from typing import Final

import msgspec

METRIC_CELLS: Final = 2048
"""Numbers of one front end's metrics, with those of one engine."""
ENGINE_METRIC_CELLS: Final = 1536
"""Numbers of one front end's metrics of each further engine."""


def metric_bytes(num_engines: int) -> int:
    """Return the bytes of one front end's metrics; those of all are in one shared memory."""
    return 8 * (METRIC_CELLS + (num_engines - 1) * ENGINE_METRIC_CELLS)


class KVEviction(msgspec.Struct, array_like=True, frozen=True):
    """Times of one sampled block whose content was overwritten, in seconds.

    lifetime: since it was allocated. idle: since a request last started to use it.
    reuse_gaps: between those starts, the allocation being the first.
    """

    lifetime: float
    idle: float
    reuse_gaps: list[float] = []


class KVTier(msgspec.Struct, frozen=True, gc=False):
    """How full a medium for KV is: the pool of the device, or one that a connector copies to.

    medium: its name, in KV events and metrics, too; with " states" behind it the part that has
    recurrent states, each of which is a block. num_blocks: its size in blocks of its own
    size; 0 if unknown. num_used: in the pool, blocks of requests, copies and retained prefixes; on
    other media, blocks with KV.
    """

    medium: str
    num_blocks: int
    num_used: int


class KVCopy(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A finished copy. num_bytes: of all ranks. seconds: of the slowest rank."""

    num_bytes: int
    seconds: float


class KVMediumStats(msgspec.Struct, array_like=True, frozen=True):
    """Copies between the KV pool and one other medium, and lookups there, since the last message.

    loads, stores: copies that have succeeded. num_failed: those that have not. num_skipped: blocks
    not stored because they were stored already or are not expected to be reused. num_unstored:
    because the medium was full.
    lookup_seconds: of each lookup of a request, whether or not it was admitted afterwards.
    lookup_wait_seconds: from the first lookup of a request without an answer until it had one.
    """

    medium: str
    loads: list[KVCopy] = []
    stores: list[KVCopy] = []
    num_skipped: int = 0
    num_unstored: int = 0
    num_failed: int = 0
    lookup_seconds: list[float] = []
    lookup_wait_seconds: list[float] = []


class LoRAStats(msgspec.Struct, array_like=True, frozen=True):
    """Adapters in the workers' memory: evictions and seconds of loads since the last message."""

    num_evicted: int
    load_seconds: list[float]


class EncoderStats(msgspec.Struct, array_like=True, frozen=True):
    """Encoder outputs of images.

    usage: share of the rows that workers may keep, 0 to 1. Since the last message: num_queries,
    images that requests needed; num_hits, those of them that had been begun for another request;
    num_rows encoded, in `seconds`.
    """

    usage: float
    num_queries: int = 0
    num_hits: int = 0
    num_rows: float = 0.0
    seconds: float = 0.0


class SchedulerStats(msgspec.Struct, array_like=True, frozen=True):
    """The state of the scheduler after a step, and what the step added.

    Gauges: num_running, num_waiting, kv_cache_usage (0 to 1), num_deferred (those of
    num_waiting that wait for something other than KV blocks), num_queued_reqs, num_queued_tokens
    (choices that wait for their first step, and their prompt tokens), kv_tiers (the pool first).
    All others are deltas since the last message. Prefix cache figures are in tokens (external:
    lookups and hits of the KV connector); num_corrupted counts requests that ended because their
    logits were not finite.

    Agent sessions. Gauges: num_pinned_blocks (a shared one counts once), num_pinned_agent_sessions.
    Deltas, in retained prefixes: taken; used by a later turn of their session; expired, or not
    worth it; given up, because all or a part of the blocks were needed (each counts once).
    agent_session_seconds: from the first arrival of a session to the end of its last step.
    tool_seconds: from the end of a turn to the next arrival of its session.

    num_discarded_tokens: tokens sampled for choices that had ended already.

    Speculative decoding: num_drafts verified, their tokens (num_draft_tokens), those of them that
    were accepted, in all and by position in the draft (accepted_per_pos), and tokens that a grammar
    refused before they were computed (num_invalid_draft_tokens). draft_tokens_by_source and
    accepted_by_source: those by the method of --speculative-config that drafted them.

    Estimates per worker, with --enable-mfu-metrics: FLOPs, bytes read and written; by step, their
    shares of the configured peak rates.

    lora: None if no adapters are served. encoder: None for a model that reads no images.
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
    kv_tiers: list[KVTier] = []
    lora: LoRAStats | None = None
    encoder: EncoderStats | None = None

    @property
    def encoder_cache_usage(self) -> float:
        """Used share of the rows of encoder output, 0 to 1; 0 without images."""
        return 0.0 if self.encoder is None else self.encoder.usage

    @property
    def cpu_offload_usage(self) -> float:
        """Used share of the host memory for offloaded KV, 0 to 1; 0 without offloading."""
        shares = [tier.num_used / tier.num_blocks for tier in self.kv_tiers if tier.medium == "CPU"]
        return max(shares, default=0.0)
