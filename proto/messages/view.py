"""Messages of the live view of the engine.

    front end ──Watch──▶ engine ──EngineView, at most 4 times a second──▶ front end ──▶ viewers

Without viewers nothing is counted or sent. Request numbers in the view have no meaning elsewhere.
The front ends decide which requests a viewer may see.
"""

from typing import Final

import msgspec

from proto.messages.stats import KVTier

VIEW_SECONDS: Final = 0.25
"""Least time between two views of one engine."""
MAX_CELLS: Final = 16_384
"""A larger pool is shown with several blocks per cell."""
MAX_SHOWN_REQUESTS: Final = 256
"""Further requests are only counted."""

FREE: Final = 0
CACHED: Final = 1
"""Used by no request; its KV is in the prefix cache."""
HELD: Final = 2
"""Used by one request, or by a copy in progress."""
SHARED: Final = 3
"""Used by several requests."""
RETAINED: Final = 4
"""Retained for an agent session's next turn, whether or not requests use it too."""
RESERVED: Final = 5
"""Never allocated: the null block 0."""

WAITING: Final = 0
RUNNING: Final = 1
PREEMPTED: Final = 2
WAITING_FOR_KV: Final = 3
REQUEST_STATES: Final = ("waiting", "running", "preempted", "waiting_for_kv")


ADAPTER_RESIDENT: Final = 0
ADAPTER_LOADING: Final = 1
ADAPTER_NOT_RESIDENT: Final = 2
ADAPTER_STATES: Final = ("resident", "loading", "not resident")


def blocks_per_cell(num_blocks: int) -> int:
    """Return the smallest power of two with which a pool has at most MAX_CELLS cells."""
    number = 1
    while num_blocks > MAX_CELLS * number:
        number *= 2
    return number


class Watch(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """This front end has viewers (`wanted`), or has none any more."""

    epoch: int
    wanted: bool


class RequestView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One choice of a request.

    owner: number of the choice in the view, from 1; numbers of finished choices are reused.
    reader, label: as in EngineCoreRequest. state: an index into REQUEST_STATES.
    cached_tokens: prompt tokens found in the prefix cache. num_blocks: of all KV groups.
    adapter: its name; "" for none. num_images: of the prompt.
    """

    owner: int
    reader: int
    label: str
    state: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_tokens: int
    num_blocks: int
    adapter: str = ""
    num_images: int = 0


class AdapterView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An adapter that requests can name.

    state: an index into ADAPTER_STATES. num_running, num_unfinished: requests with its content, of
    all names. num_bytes: in the memory of all workers; 0 if it is not known yet.
    """

    name: str
    state: int
    num_running: int
    num_unfinished: int
    num_bytes: int


class BlockMap(msgspec.Struct, array_like=True, frozen=True):
    """A pool from its first block on, in runs of equal cells; three arrays of [num_runs].

    lengths: cells, int32 little-endian. states: FREE to RESERVED, uint8. owners: int32
    little-endian, 0 for none. A cell of several blocks shows the highest state among them.
    """

    lengths: bytes
    states: bytes
    owners: bytes


class EngineView(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """State of an engine, and what it did since its last view.

    timestamp: seconds of the machine's monotonic clock. seconds: since the last view, or since
    the first viewer came. step: the last one scheduled. Counts over those seconds: prompt_tokens
    computed (including recomputed ones), generation_tokens, queried_tokens and found_tokens of the
    prefix cache, preemptions, num_drafts verified, their draft_tokens, and accepted_tokens among
    those. num_state_slots: for recurrent states, 0 of a model without such layers; requests hold
    num_held_states of them. states: these slots, without the null slot. requests: running ones
    first, at most MAX_SHOWN_REQUESTS; more_requests: beyond those. step_limit: what made the last
    step shorter than its token budget; "" if it is full. tiers: how full the pool and the media of
    the connector are. adapters: those of requests, then other resident ones, at most a few.
    """

    epoch: int
    timestamp: float
    seconds: float
    step: int
    num_running: int
    num_waiting: int
    prompt_tokens: int
    generation_tokens: int
    queried_tokens: int
    found_tokens: int
    preemptions: int
    requests: list[RequestView]
    more_requests: int
    blocks: BlockMap
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_state_slots: int = 0
    num_held_states: int = 0
    states: BlockMap = BlockMap(b"", b"", b"")
    step_limit: str = ""
    tiers: list[KVTier] = []
    adapters: list[AdapterView] = []
