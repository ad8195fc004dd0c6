"""KV events of the block pool, and the cache content derived from them."""

import struct
from typing import Any

import pytest

from engine_core.block_hashing import ExtraKeys
from engine_core.kv_cache.events import KVEventLog
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import BlockPool
from proto.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from proto.messages.lifecycle import RECURRENT_STATE, KVCacheGeometry, KVGroup
from tests.fakes.images import with_pictures
from tests.fakes.kv_events import CachedHashes, event_log, indexed, names
from tests.fakes.kv_requests import FINGERPRINT, Requests, make_manager
from tests.fakes.lora import lora_request


def stored(
    block_hashes: list[bytes], parent: bytes | None, token_ids: list[int], **fields: Any
) -> KVEvent:
    """Return the event of blocks of 16 tokens of the only group."""
    return BlockStored(
        block_hashes=names(block_hashes),
        parent_block_hash=None if parent is None else names([parent])[0],
        token_ids=token_ids,
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        **fields,
    )


def removed(*block_hashes: bytes, group: int = 0) -> KVEvent:
    return BlockRemoved(names(list(block_hashes)), "GPU", group)


class Setup:
    def __init__(self, num_blocks: int, *windows: int | None) -> None:
        self.log = event_log(*windows)
        self.manager = make_manager(num_blocks, windows=windows or (None,), observers=[self.log])
        self.requests = Requests(self.manager)

    def run(self, tokens, **fields):
        request = self.requests.make(tokens, **fields)
        assert self.requests.schedule_groups(request) is not None
        return request


@pytest.mark.parametrize("num_blocks", [2, 3, 10])
def test_stored_removed_cleared(num_blocks):
    """BP-07."""
    kv = Setup(num_blocks + 1)
    first = kv.run(range(num_blocks * 16))
    assert kv.log.pop_events() == [stored(first.block_hashes, None, list(range(num_blocks * 16)))]
    assert kv.log.pop_events() == []
    kv.manager.free(first)
    assert kv.log.pop_events() == []
    second = kv.run(range(1000, 1000 + num_blocks * 16))
    assert kv.log.pop_events() == [
        removed(*reversed(first.block_hashes)),
        stored(second.block_hashes, None, second.prompt_token_ids),
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
        stored(request.block_hashes[1:], request.block_hashes[0], list(range(16, 32)))
    ]


def test_content_is_removed_with_its_last_block():
    kv = Setup(5)
    twins = [kv.run(range(16)) for _ in range(2)]
    assert [type(event) for event in kv.log.pop_events()] == [BlockStored] * 2
    for request in twins:
        kv.manager.free(request)
    kv.run(range(100, 148))
    assert removed(twins[0].block_hashes[0]) not in kv.log.pop_events()
    kv.run(range(200, 210))
    assert kv.log.pop_events() == [removed(twins[0].block_hashes[0])]


def test_events_name_their_group():
    kv = Setup(21, None, 32)
    request = kv.run(range(40))
    events = kv.log.pop_events()
    hashes = names(request.block_hashes)
    assert [(event.group_idx, event.block_hashes) for event in events] == [(0, hashes), (1, hashes)]
    kinds = [(each.kv_cache_spec_kind, each.kv_cache_spec_sliding_window) for each in events]
    assert kinds == [("full_attention", None), ("sliding_window", 32)]
    kv.manager.pool.uncache(kv.manager.block_ids(request.seq_id)[1][:1])
    assert kv.log.pop_events() == [removed(request.block_hashes[0], group=1)]


def test_uncached_blocks_are_removed():
    kv = Setup(21)
    request = kv.run(range(40))
    kv.log.pop_events()
    kv.manager.uncache_after(request, 16)
    assert kv.log.pop_events() == [removed(request.block_hashes[1])]


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


def test_extra_keys_are_listed_by_block():
    kv = Setup(11)
    kv.run(range(40), cache_salt="sält")
    (event,) = kv.log.pop_events()
    assert event.extra_keys == [["sält"], None]


def test_events_name_the_adapter():
    """By its id and name; its digest is among the extra keys, before a salt."""
    kv = Setup(11)
    lora = lora_request(3)
    kv.run(range(40), extra_keys=ExtraKeys("s", lora_request=lora))
    (event,) = kv.log.pop_events()
    assert (event.lora_id, event.lora_name) == (3, "adapter-3")
    assert event.extra_keys == [[lora.digest.hex(), "s"], None]


def test_latents_are_named_as_such():
    kv = Setup(11)
    kv.log = event_log(latent=True)
    kv.manager = make_manager(11, observers=[kv.log])
    kv.requests = Requests(kv.manager)
    kv.run(range(16))
    assert kv.log.pop_events()[0].kv_cache_spec_kind == "mla_attention"


def test_states_are_blocks_of_a_group_of_their_own():
    """Of each block the state at its end; a subscriber ends with what both indices hold."""
    groups = (KVGroup(), KVGroup(kind=RECURRENT_STATE))
    log = KVEventLog(KVCacheGeometry(1, 1, 8, "float32", 64, groups, state_bytes=64))
    manager = KVCacheManager(
        41,
        16,
        True,
        FINGERPRINT,
        groups=groups,
        num_state_slots=9,
        observers=[log],
        state_observers=[log],
    )
    requests, known = Requests(manager), CachedHashes()
    (states,) = manager.state_groups
    kinds = set()
    for number in range(60):
        manager.begin_step()
        request = requests.make([*range(32), *([number] * (number % 50))])
        assert requests.schedule_groups(request) is not None
        for token in range(number % 20):
            requests.decode(request, token)
        manager.free(request)
        for event in log.pop_events():
            known.apply(event)
            if isinstance(event, BlockStored):
                kinds.add((event.group_idx, event.kv_cache_spec_kind))
                assert event.group_idx == 0 or len(event.block_hashes) == 1
        assert known.held == indexed(manager.pool.index) | indexed(states.pool.index)
    assert kinds == {(0, "full_attention"), (1, "mamba")}
    assert {group for group, _ in known.held} == {0, 1}
    assert manager.reset_prefix_cache()
    assert log.pop_events() == [AllBlocksCleared()]


def test_a_pool_without_observers_is_the_plain_class():
    assert type(make_manager(5).pool) is BlockPool


def test_events_name_images():
    """In each block that an image is in, by its hash and where it begins; not after it."""
    kv = Setup(11)
    prompt, (image,) = with_pictures([list(range(10)), (1, 16), list(range(20))])
    kv.run(prompt, extra_keys=ExtraKeys("s", mm_features=[image]))
    (event,) = kv.log.pop_events()
    keys = [[(image.mm_hash + struct.pack("<i", place)).hex()] for place in (10, -6)]
    assert event.extra_keys == [["s", *keys[0]], keys[1], None]
