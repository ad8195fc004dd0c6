"""Which requests a view shows, and what of each.

Owns nothing; reads the scheduler between two of its steps.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.scheduler import Scheduler
from proto.view import (
    MAX_SHOWN_REQUESTS,
    PREEMPTED,
    RUNNING,
    WAITING,
    WAITING_FOR_KV,
    RequestView,
)

_STATES: Final = {
    RequestStatus.RUNNING: RUNNING,
    RequestStatus.PREEMPTED: PREEMPTED,
    RequestStatus.WAITING_FOR_REMOTE_KVS: WAITING_FOR_KV,
}


def shown_requests(scheduler: Scheduler) -> list[Request]:
    """Who runs, then who came first of the others: at most MAX_SHOWN_REQUESTS."""
    shown = scheduler.running[:MAX_SHOWN_REQUESTS]
    return shown + list(islice(_others(scheduler), MAX_SHOWN_REQUESTS - len(shown)))


def _others(scheduler: Scheduler) -> Iterator[Request]:
    for request in scheduler.requests:
        if request.status is not RequestStatus.RUNNING:
            yield request


def request_view(request: Request, owner: int, num_blocks: int) -> RequestView:
    """owner: its number. num_blocks: that it holds."""
    return RequestView(
        owner,
        request.reader,
        request.label,
        _STATES.get(request.status, WAITING),
        request.num_prompt_tokens,
        request.num_output_tokens,
        request.num_computed_tokens,
        request.num_cached_tokens,
        num_blocks,
    )


def blocks_held(kv_cache: KVCacheManager) -> Mapping[int, int]:
    """Blocks in the tables of each request that has some, by seq_id, without the null block."""
    held: dict[int, int] = {}
    has_windows = not kv_cache.is_downward_closed
    for group in kv_cache.groups:
        for seq_id, table in group.block_tables().items():
            number = len(table) - (table.count(NULL_BLOCK) if has_windows else 0)
            held[seq_id] = held.get(seq_id, 0) + number
    return held
