"""Recurrent states on a medium: which are stored, where a hit ends, and what is loaded for it.

The runner checks that each step begins with the state of the tokens before it.
"""

from typing import Any

import pytest

from engine_core.kv_cache.integrity import check
from engine_core.kv_connector.base import SchedulerContext, create_scheduler_connector
from engine_core.kv_connector.offload.planners import Extent, longest_hit_with_state
from engine_core.request import Request
from proto.errors import ConfigError
from proto.messages.kv_connector import TransferJob
from proto.messages.kv_events import BlockRemoved, BlockStored
from proto.messages.lifecycle import KVCacheGeometry
from proto.settings.config import CacheConfig, ServeConfig
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.fakes.kv_events import events_config
from tests.fakes.offload_rig import OffloadRig, groups_of
from tests.fakes.paged_runner import undisturbed

BLOCK = 4
PROMPT = list(range(1, 31))
NUM_OUTPUTS = 9


def make(**settings: Any) -> OffloadRig:
    return OffloadRig(size=BLOCK, **{"num_state_slots": 13, **settings})


def next_turn(rig: OffloadRig, request: Request) -> list[int]:
    return [*request.prompt_token_ids, *rig.tokens_of(request), 100, 101, 102]


def check_answer(rig: OffloadRig, request: Request) -> None:
    assert rig.tokens_of(request) == undisturbed(request.prompt_token_ids, NUM_OUTPUTS)
    rig.assert_idle()


def of_states(jobs: list[TransferJob]) -> list[bool]:
    return [job.is_of_states for job in jobs]


def stored_ends(rig: OffloadRig, *requests: Request) -> set[int]:
    """Return after how many tokens states of these requests are on the medium."""
    pages = rig.offloading._states
    assert pages is not None
    return {
        (index + 1) * BLOCK
        for request in requests
        for index, block_hash in enumerate(request.block_hashes)
        if pages.manager.contains(pages.layout.keys([block_hash], 1, 0, 1)) == [True]
    }


@pytest.mark.parametrize("is_async", [False, True])
def test_a_next_turn_goes_on_from_the_state_on_the_medium(is_async: bool) -> None:
    """Stored are the states at the last ends of a block of the prompt and of the answer."""
    rig = make(async_scheduling=is_async)
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    end = (len(PROMPT) + NUM_OUTPUTS - 1) // BLOCK * BLOCK
    assert stored_ends(rig, first) == {28, end}
    rig.reset_prefix_cache()
    second = rig.generate(next_turn(rig, first), NUM_OUTPUTS, ignore_eos=True)
    assert second.num_cached_tokens == end
    assert sorted(of_states(rig.loads)) == [False, True]
    check_answer(rig, second)


def test_kv_of_the_pool_goes_on_with_a_state_of_the_medium() -> None:
    rig = make()
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    for group in rig.kv_cache.state_groups:
        assert group.pool.reset_prefix_cache()
    second = rig.generate(next_turn(rig, first), NUM_OUTPUTS, ignore_eos=True)
    assert second.num_cached_tokens == 36
    assert of_states(rig.loads) == [True], "no KV is copied that the pool has"
    check_answer(rig, second)


def test_a_state_in_a_slot_goes_on_with_kv_of_the_medium() -> None:
    rig = make()
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    assert rig.kv_cache.pool.reset_prefix_cache()
    second = rig.generate(next_turn(rig, first), NUM_OUTPUTS, ignore_eos=True)
    assert second.num_cached_tokens == 36
    assert of_states(rig.loads) == [False]
    check_answer(rig, second)


def test_the_rest_of_a_prefix_is_loaded_after_what_is_cached() -> None:
    """The pool has KV of 20 tokens and a state after 20, the medium 36 and 36."""
    rig = make()
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    rig.reset_prefix_cache()
    rig.generate(PROMPT[:23], 1)
    assert not rig.loads, "the medium has no state after 20 tokens"
    second = rig.generate(next_turn(rig, first), NUM_OUTPUTS, ignore_eos=True)
    assert second.num_cached_tokens == 36
    (kv,) = (job for job in rig.loads if not job.is_of_states)
    assert len(kv.device[0].block_ids) == 4
    check_answer(rig, second)


def test_the_end_of_a_shared_prefix_is_stored_for_the_third() -> None:
    rig = make()
    shared = list(range(1, 21))
    requests = [
        rig.generate([*shared, 50 + number, *range(60, 70)], NUM_OUTPUTS, ignore_eos=True)
        for number in range(2)
    ]
    assert 20 in stored_ends(rig, *requests)
    rig.reset_prefix_cache()
    third = rig.generate([*shared, 90, 91, 92], NUM_OUTPUTS, ignore_eos=True)
    assert third.num_cached_tokens == 20
    check_answer(rig, third)


def test_two_requests_for_a_state_load_it_once() -> None:
    rig = make()
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    turn = next_turn(rig, first)
    rig.reset_prefix_cache()
    both = [rig.add_one(turn, NUM_OUTPUTS, ignore_eos=True) for _ in range(2)]
    rig.run_until_idle()
    assert [row.num_cached_tokens for row in both] == [36, 36]
    assert sorted(of_states(rig.loads)) == [False, True]
    for row in both:
        check_answer(rig, row)


@pytest.mark.parametrize("fails", ["states", "kv", "both"])
def test_a_failed_load_is_computed_and_stored_again(fails: str) -> None:
    broken = {"states": [True], "kv": [False], "both": [True, False]}[fails]
    rig = make(finishes=lambda job: not (job.is_load and job.is_of_states in broken))
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    turn = next_turn(rig, first)
    rig.reset_prefix_cache()
    second = rig.generate(turn, NUM_OUTPUTS, ignore_eos=True)
    assert len(rig.loads) == 2
    check_answer(rig, second)
    rig.finishes = lambda job: True
    rig.reset_prefix_cache()
    third = rig.generate(next_turn(rig, second), NUM_OUTPUTS, ignore_eos=True)
    assert third.num_cached_tokens == (len(turn) + NUM_OUTPUTS - 1) // BLOCK * BLOCK
    check_answer(rig, third)


def test_an_aborted_load_keeps_its_slot_until_the_copy_ends() -> None:
    is_slow = False
    rig = make(finishes=lambda job: None if is_slow else True)
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    turn = next_turn(rig, first)
    rig.reset_prefix_cache()
    is_slow = True
    loading = rig.add_one(turn, NUM_OUTPUTS, ignore_eos=True)
    rig.step()
    (job,) = (job for job in rig.half.under_way if job.is_of_states)
    ((slot,),) = (device.block_ids for device in job.device)
    rig.scheduler.abort_request(loading.request_id)
    (group,) = rig.kv_cache.state_groups
    assert group.pool.ref_counts[slot] > 0
    assert check(rig.kv_cache) == []
    is_slow = False
    rig.run_until_idle()
    assert group.pool.ref_counts[slot] == 0
    rig.assert_idle()


def test_without_a_slot_for_the_copy_a_prompt_is_computed() -> None:
    """A sequence takes two slots, and a load one more."""
    rig = make(num_state_slots=3)
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    assert stored_ends(rig, first), "a request that ends leaves a slot for its store"
    rig.reset_prefix_cache()
    second = rig.generate(next_turn(rig, first), NUM_OUTPUTS, ignore_eos=True)
    assert (second.num_cached_tokens, rig.loads) == (0, [])
    check_answer(rig, second)


def test_states_of_corrupt_requests_are_removed_from_the_medium() -> None:
    rig = make()
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    assert stored_ends(rig, first)
    rig.offloading.invalidate_request(first)
    assert not stored_ends(rig, first)


def test_workers_that_are_replaced_have_no_states() -> None:
    rig = make()
    first = rig.generate(PROMPT, NUM_OUTPUTS, ignore_eos=True)
    rig.lose_workers()
    assert not stored_ends(rig, first)
    second = rig.generate(next_turn(rig, first), NUM_OUTPUTS, ignore_eos=True)
    check_answer(rig, second)
    assert stored_ends(rig, second)


def test_events_name_states_on_the_medium() -> None:
    config = ServeConfig(cache=CacheConfig(kv_events_config=events_config()))
    rig = make(num_slots=20, serve_config=config)
    held: set[tuple[int | None, int]] = set()
    for number in range(12):
        rig.generate([number + 1, *PROMPT], NUM_OUTPUTS, ignore_eos=True)
        for event in rig.offloading.take_events():
            if isinstance(event, BlockStored):
                assert event.block_size == BLOCK == len(event.token_ids)
                assert event.kv_cache_spec_kind == (
                    "mamba" if event.group_idx else "full_attention"
                )
                held.add((event.group_idx, event.block_hashes[0]))
            elif isinstance(event, BlockRemoved):
                held.remove((event.group_idx, event.block_hashes[0]))
    pages = rig.offloading._states
    assert pages is not None
    assert len([group for group, _ in held if group]) == pages.manager.num_used == 20


def test_a_hit_ends_where_the_kv_and_a_state_are() -> None:
    extent = Extent(computed=8, limit=40, size=12)
    present = [(None, [True, True, False])]  # offloaded blocks of 12 tokens, from the first on
    find = longest_hit_with_state
    assert find(extent, present, 4, frozenset({4, 8, 20, 24, 28})) == 24
    assert find(extent, present, 4, frozenset({20, 36})) == 20
    assert find(extent, present, 4, frozenset({8, 36})) == 8, "the device has the KV"
    assert find(extent, present, 8, frozenset({8, 36})) == 8, "which has a state already"
    assert find(extent, present, 4, frozenset()) == 4
    window = [(None, [True] * 4), (9, [False, True, False, True])]
    assert find(extent, window, 8, frozenset({12, 24, 32})) == 24


def test_connectors_without_states_are_refused_by_name(tmp_path: Any) -> None:
    rig = make()
    geometry = KVCacheGeometry(1, 1, 8, "float32", 64, groups_of([None], 5), state_bytes=64)
    context = SchedulerContext(
        geometry,
        BLOCK,
        10,
        bytes(32),
        1,
        rig.kv_cache.transfer_refs,
        rig.kv_cache.block_ids,
        lambda request: None,
        state_slots=rig.kv_cache,
    )
    extra = {"shared_storage_path": str(tmp_path)}
    alone = KVTransferConfig(kv_connector="SharedStorageConnector", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match="SharedStorageConnector does not copy recurrent states"):
        create_scheduler_connector(alone, context)


def test_settings_that_states_cannot_have_are_refused_by_name() -> None:
    """A larger offloaded block ends where no state is held."""
    with pytest.raises(ConfigError, match=r"block_size must be --block-size 4 .*, got 12"):
        OffloadRig(size=3 * BLOCK, num_state_slots=9)
    for share in (0.0, 1.0, 2):
        with pytest.raises(ConfigError, match="state_share must be more than 0 and less than 1"):
            make(extra={"state_share": share})
    with pytest.raises(ConfigError, match="cpu_bytes_to_use holds no state: 0 bytes"):
        make(num_slots=1, extra={"state_share": 1e-9})
