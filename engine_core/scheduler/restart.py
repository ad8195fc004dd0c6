"""Starting over after the workers have lost everything.

Owns nothing. What a worker holds follows from token ids, and those are all here: so
every request stands in the queue again, in its order, and nothing of it is computed.
"""

from collections.abc import Iterable

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.preemption import Preemption


def start_over(
    requests: Iterable[Request], preemption: Preemption, kv_cache: KVCacheManager, now: float
) -> None:
    """Take all blocks back, forget their contents, and what was to come of steps in flight.

    requests: all that are not over. now: monotonic seconds.
    """
    preemption.evict_all(now)
    for request in requests:
        request.num_output_placeholders = 0
        request.spec_token_ids.clear()
    kv_cache.take_block_copies()  # of steps that will not be computed
    forgotten = kv_cache.reset_prefix_cache()
    assert forgotten, "somebody who neither runs nor rests holds blocks"
