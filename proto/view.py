"""The live view: what the engine tells of itself while somebody watches.

    front end ──Watch──▶ engine ──EngineView, at most 4 times a second──▶ front end ──▶ its watchers

Nobody watches: nothing is counted, made or sent. The engine's numbers for requests mean nothing
outside the view; whose a request is, is for the front ends, which tell a watcher no more than
that one may know.
"""

from typing import Final

import msgspec

VIEW_SECONDS: Final = 0.25
"""Least time between two views of one engine."""
MAX_CELLS: Final = 16_384
"""A larger pool is shown several blocks a cell."""
MAX_SHOWN_REQUESTS: Final = 256
"""More are only counted."""

FREE: Final = 0
CACHED: Final = 1
"""Nobody's, but its KV can be found."""
HELD: Final = 2
"""By one request, or for a copy."""
SHARED: Final = 3
"""By several requests."""
PINNED: Final = 4
"""Kept for a job's next turn, whoever else has it."""
RESERVED: Final = 5
"""Never handed out: block 0."""

WAITING: Final = 0
RUNNING: Final = 1
PREEMPTED: Final = 2
WAITING_FOR_KV: Final = 3
REQUEST_STATES: Final = ("waiting", "running", "preempted", "waiting_for_kv")


def blocks_per_cell(num_blocks: int) -> int:
    """The smallest power of two with which a pool has at most MAX_CELLS cells."""
    number = 1
    while num_blocks > MAX_CELLS * number:
        number *= 2
    return number


class Watch(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """Somebody watches at this front end, or nobody does any more. It ends with the front end."""

    epoch: int
    wanted: bool


class RequestView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One choice of a request.

    owner: the view's own number for it, from 1 on; that of a request which is over is given again.
    reader, label: as in EngineCoreRequest. state: an index into REQUEST_STATES.
    cached_tokens: prompt tokens whose KV was found. num_blocks: of all KV groups.
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


class BlockMap(msgspec.Struct, array_like=True, frozen=True):
    """The whole pool from block 0 on, in runs of equal cells; three arrays of [num_runs].

    lengths: cells, int32 little-endian. states: FREE to RESERVED, uint8. owners: int32
    little-endian, 0 for nobody's. A cell of several blocks shows the highest state among them.
    """

    lengths: bytes
    states: bytes
    owners: bytes


class EngineView(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """An engine at one moment, and what it did since the view before.

    timestamp: seconds of the machine's monotonic clock. seconds: since the view before, or since
    anybody watches. step: the last one scheduled. Counts over those seconds: prompt_tokens
    computed (again, after a preemption), generation_tokens, queried_tokens and found_tokens of the
    prefix cache, preemptions. requests: running ones first, at most MAX_SHOWN_REQUESTS;
    more_requests: beyond those.
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
