"""The count of cached blocks, compared with the pool."""

import random

from engine_core.kv_cache.events import ReusableBlockCounter
from tests.fakes.kv_requests import Requests, make_manager


def truth(manager):
    pool = manager.pool
    return sum(
        pool.hashes[block] is not None and not pool.ref_counts[block]
        for block in range(1, pool.num_blocks)
    )


def test_block_counts_match_the_pool_after_random_operations() -> None:
    """Allocate, find, free, withdraw, forget and reset, with full layers and with windows."""
    for seed in range(6):
        rng = random.Random(seed)
        census = ReusableBlockCounter()
        windows = (None,) if seed % 2 else (None, 32)
        manager = make_manager(24, 16, windows=windows, observers=(census,))
        requests, live, most = Requests(manager), [], 0
        for _ in range(300):
            draw = rng.random()
            if draw < 0.5:
                length = rng.choice([16, 20, 48, 100])
                request = requests.make([rng.randrange(2)] * 16 + [7] * length)
                if requests.schedule(request) is not None:
                    live.append(request)
            elif draw < 0.9 and live:
                manager.free(live.pop(rng.randrange(len(live))))
            elif draw < 0.95 and live:
                manager.uncache_after(rng.choice(live), 16)
            elif live:
                manager.uncache_content(rng.choice(live))
            elif manager.reset_prefix_cache():
                assert census.num_cached == 0
            assert census.num_cached == truth(manager)
            most = max(most, census.num_cached)
        assert most > 3


def test_cache_hits_count_as_blocks_in_use_again() -> None:
    census = ReusableBlockCounter()
    manager = make_manager(10, 16, observers=(census,))
    requests = Requests(manager)
    first = requests.make([1] * 40)
    requests.schedule(first)
    manager.free(first)
    assert census.num_cached == 2
    second = requests.make([1] * 40)
    requests.schedule(second)
    assert census.num_cached == 0
