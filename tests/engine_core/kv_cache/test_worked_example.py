"""The published prefix caching example: ten blocks of four tokens, three requests.

req0  ABCD|EFGH|IJKL|MNO…    decodes into block 5, ends first
req1  ABCD|EFGH|IJkl|mn      shares two blocks
req2  ABCD|EFGH|IJKL|0123|…  finds three blocks in the free queue
"""

from engine_core.kv_cache import integrity
from tests.fakes.kv_requests import Requests, make_manager


def test_three_requests_share_and_evict_as_published():
    manager = make_manager(11, block_size=4)
    pool, requests = manager.pool, Requests(manager)

    req0 = requests.make("ABCD|EFGH|IJKL|MNO")
    assert requests.schedule(req0) == [1, 2, 3, 4]
    assert pool.hashes[4] is None
    assert requests.decode(req0, "P") == []
    hash_of_block_4 = pool.hashes[4]
    assert hash_of_block_4 == req0.block_hashes[3]
    assert requests.decode(req0, "Q") == [5]
    assert requests.decode(req0, "R") == []

    req1 = requests.make("ABCD|EFGH|IJkl|mn")
    assert requests.computed(req1).block_ids == ([1, 2],)
    assert requests.schedule(req1) == [6, 7]
    assert requests.table(req1) == [1, 2, 6, 7]
    assert [pool.ref_counts[block] for block in (1, 2, 3, 6)] == [2, 2, 1, 1]

    manager.free(req0)
    assert list(pool.free_queue) == [8, 9, 10, 5, 4, 3]
    manager.free(req1)
    assert list(pool.free_queue) == [8, 9, 10, 5, 4, 3, 7, 6, 2, 1]
    assert pool.index.get(hash_of_block_4) == 4

    req2 = requests.make("ABCD|EFGH|IJKL|0123|4567|89ab|cdef|g")
    assert requests.computed(req2).block_ids == ([1, 2, 3],)
    assert requests.schedule(req2) == [8, 9, 10, 5, 4]
    assert requests.table(req2) == [1, 2, 3, 8, 9, 10, 5, 4]
    assert pool.index.get(hash_of_block_4) is None
    assert pool.hashes[4] is None
    assert list(pool.free_queue) == [7, 6]
    assert integrity.check(manager) == []
