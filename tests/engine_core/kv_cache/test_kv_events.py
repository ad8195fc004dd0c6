"""KV events of the block pool, and the cache content derived from them."""

import pytest

from engine_core.kv_cache.events import KVEventLog
from engine_core.kv_cache.pool import BlockPool
from proto.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.fakes.kv_events import CachedHashes, indexed
from tests.fakes.kv_requests import Requests, make_manager


class Setup:
    def __init__(self, num_blocks: int, *windows: int | None) -> None:
        self.log = KVEventLog()
        self.manager = make_manager(num_blocks, windows=windows or (None,), observers=[self.log])
        self.requests = Requests(self.manager)

    def run(self, tokens):
        request = self.requests.make(tokens)
        assert self.requests.schedule_groups(request) is not None
        return request


@pytest.mark.parametrize("num_blocks", [2, 3, 10])
def test_stored_removed_cleared(num_blocks):
    """BP-07."""
    kv = Setup(num_blocks + 1)
    first = kv.run(range(num_blocks * 16))
    assert kv.log.pop_events() == [
        BlockStored(first.block_hashes, None, list(range(num_blocks * 16)), 16)
    ]
    assert kv.log.pop_events() == []
    kv.manager.free(first)
    assert kv.log.pop_events() == []
    second = kv.run(range(1000, 1000 + num_blocks * 16))
    assert kv.log.pop_events() == [
        *(BlockRemoved(block_hash) for block_hash in reversed(first.block_hashes)),
        BlockStored(second.block_hashes, None, second.prompt_token_ids, 16),
    ]
    kv.manager.free(second)
    assert kv.manager.reset_prefix_cache()
    assert kv.log.pop_events() == [AllBlocksCleared()]


def test_a_later_block_names_its_parent():
    kv = Setup(11)
    request = kv.run(range(20))
    kv.log.pop_events()
    for token in range(20, 32):
        kv.requests.decode(request, token)
    assert kv.log.pop_events() == [
        BlockStored(request.block_hashes[1:], request.block_hashes[0], list(range(16, 32)), 16)
    ]


def test_content_is_removed_with_its_last_block():
    kv = Setup(5)
    twins = [kv.run(range(16)) for _ in range(2)]
    assert [type(event) for event in kv.log.pop_events()] == [BlockStored] * 2
    for request in twins:
        kv.manager.free(request)
    kv.run(range(100, 148))
    assert BlockRemoved(twins[0].block_hashes[0]) not in kv.log.pop_events()
    kv.run(range(200, 210))
    assert kv.log.pop_events() == [BlockRemoved(twins[0].block_hashes[0])]


def test_events_name_their_group():
    kv = Setup(21, None, 32)
    request = kv.run(range(40))
    stored = kv.log.pop_events()
    assert [(event.group, event.block_hashes) for event in stored] == [
        (0, request.block_hashes),
        (1, request.block_hashes),
    ]
    kv.manager.pool.uncache(kv.manager.block_ids(request.seq_id)[1][:1])
    assert kv.log.pop_events() == [BlockRemoved(request.block_hashes[0], 1)]


def test_uncached_blocks_are_removed():
    kv = Setup(21)
    request = kv.run(range(40))
    kv.log.pop_events()
    kv.manager.uncache_after(request, 16)
    assert kv.log.pop_events() == [BlockRemoved(request.block_hashes[1])]


def test_a_subscriber_ends_with_what_the_index_holds():
    kv = Setup(31, None, 32)
    known = CachedHashes()
    for number in range(40):
        request = kv.run([*range(32), *([number] * (number % 50))])
        kv.requests.decode(request, number)
        kv.manager.free(request)
        for event in kv.log.pop_events():
            known.apply(event)
        assert known.held == indexed(kv.manager.pool.index)
    assert known.held


def test_a_pool_without_observers_is_the_plain_class():
    assert type(make_manager(5).pool) is BlockPool
