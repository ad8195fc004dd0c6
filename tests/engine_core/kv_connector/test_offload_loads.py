"""Loads: lookups on the medium, copies, and requests that wait for them.

Device blocks of 4 tokens, offloaded blocks of 12.
"""

import pytest

from engine_core.request import RequestStatus
from proto.messages.kv_connector import DeviceBlocks
from tests.fakes.offload_rig import OffloadRig, device_of
from tests.fakes.paged_runner import undisturbed

PROMPT = list(range(37))
LATER = 10_000


def test_lookup_is_skipped_below_one_uncomputed_offloaded_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = OffloadRig()
    asked: list[int] = []
    lookup = rig.offloading._manager.lookup
    monkeypatch.setattr(
        rig.offloading._manager,
        "lookup",
        lambda keys: (asked.append(len(keys)), lookup(keys))[1],
    )
    rig.generate(PROMPT[:4])
    assert asked == []
    rig.generate(PROMPT[:12])
    assert asked == []
    rig.generate([*range(100, 112)])
    assert asked == [1]


def test_get_num_new_matched_tokens_zero_on_a_miss() -> None:
    rig = OffloadRig()
    request = rig.generate(PROMPT)
    assert rig.loads == []
    assert rig.tokens_of(request) == undisturbed(PROMPT, 1)


def test_get_num_new_matched_tokens_is_async_on_a_hit() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    rig.finishes = lambda job: None
    request = rig.add_one(PROMPT)
    rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    (load,) = rig.loads
    assert load.is_load
    assert load.device == [DeviceBlocks(0, device_of(load))]
    assert len(device_of(load)) == 9
    assert load.slots == [[0, 1, 2]]
    rig.finishes = lambda job: True
    rig.run_until_idle()
    assert request.num_cached_tokens == 36
    assert rig.tokens_of(request) == undisturbed(PROMPT, 16)
    rig.assert_idle()


def test_update_state_after_alloc_loads_what_follows_the_devices_blocks() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    rig.generate(PROMPT[:13])
    rig.loads.clear()
    request = rig.generate(PROMPT[:25])
    (load,) = rig.loads
    assert load.slots == [[1]]
    assert len(device_of(load)) == 3
    assert request.num_cached_tokens == 24


def test_a_misaligned_first_block_is_loaded_from_its_middle_on() -> None:
    """The device has 16 of 24 tokens: the second offloaded block loads from part 1 on."""
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    rig.offloading._may_load = False
    rig.generate(PROMPT[:17])
    rig.offloading._may_load = True
    request = rig.generate(PROMPT)
    (load,) = rig.loads
    assert load.device == [DeviceBlocks(0, device_of(load), skip=1)]
    assert load.slots == [[1, 2]]
    assert len(device_of(load)) == 5
    assert rig.tokens_of(request) == undisturbed(PROMPT, 1)


def test_a_load_may_end_inside_an_offloaded_block() -> None:
    """At least one token is computed: 20 of a prompt's 24 tokens are loaded."""
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    request = rig.generate(PROMPT[:24])
    (load,) = rig.loads
    assert len(device_of(load)) == 5
    assert load.slots == [[0, 1]]
    assert request.num_cached_tokens == 20
    assert rig.tokens_of(request) == undisturbed(PROMPT[:24], 1)


def test_two_requests_for_the_same_prefix_load_it_once() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    rig.finishes = lambda job: None
    first, second = rig.add_one(PROMPT, 1), rig.add_one([*PROMPT, 5], 1)
    other = rig.add_one([7] * 20, 1)
    rig.step()
    rig.step()
    assert len(rig.loads) == 1
    assert rig.finish_reason_of(other) is not None, "no request waits for the loads"
    assert rig.finish_reason_of(second) is None
    rig.finishes = lambda job: True
    rig.run_until_idle()
    assert len(rig.loads) == 1
    assert (first.num_cached_tokens, second.num_cached_tokens) == (36, 36)
    rig.assert_idle()


def test_a_request_whose_awaited_load_failed_recomputes() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    rig.finishes = lambda job: None if job.is_load else True
    first, second = rig.add_one(PROMPT, 3), rig.add_one([*PROMPT, 5], 3)
    rig.step()
    rig.finish(rig.loads[0], succeeds=False)
    rig.finishes = lambda job: True
    rig.run_until_idle()
    assert rig.tokens_of(first) == undisturbed(PROMPT, 3)
    assert rig.tokens_of(second) == undisturbed([*PROMPT, 5], 3)
    assert len(rig.loads) == 1, "the unreadable block is forgotten"
    (stats,) = rig.offloading.drain_stats()
    assert stats.num_failed == 1
    rig.reset_prefix_cache()
    again = rig.generate(PROMPT)
    assert len(rig.loads) == 2, "it is stored again after the computation"
    assert again.num_cached_tokens == 36
    rig.assert_idle()


def test_abort_while_loading_keeps_blocks_until_the_copy_ends() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    rig.finishes = lambda job: None
    request = rig.add_one(PROMPT)
    rig.step()
    (load,) = rig.loads
    rig.scheduler.abort_request(request.request_id)
    assert rig.kv_cache.usage > 0
    held = set(rig.kv_cache.pool.free_queue)
    assert held.isdisjoint(device_of(load))
    rig.finishes = lambda job: True
    rig.run_until_idle()
    rig.assert_idle()


def test_a_preempted_request_finds_its_blocks_on_the_medium() -> None:
    rig = OffloadRig(num_blocks=14, enable_chunked_prefill=True)
    first, second = rig.add_one(PROMPT[:13], 20), rig.add_one([*range(200, 213)], 20)
    rig.run_until_idle()
    assert first.num_preemptions + second.num_preemptions > 0
    assert rig.loads
    assert rig.tokens_of(first) == undisturbed(PROMPT[:13], 20)
    assert rig.tokens_of(second) == undisturbed([*range(200, 213)], 20)
    rig.assert_idle()


def test_window_groups_load_only_what_the_next_token_sees() -> None:
    """With a window of 14, only the last 13 of 36 tokens are loaded, from block 5 of 9 on."""
    rig = OffloadRig(windows=(None, 14))
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    request = rig.generate(PROMPT)
    (load,) = rig.loads
    full, window = load.device
    assert (full.group, len(full.block_ids), full.skip) == (0, 9, 0)
    assert (window.group, len(window.block_ids), window.skip) == (1, 4, 2)
    assert len(load.slots[0]) == 3
    assert len(load.slots[1]) == 2
    assert rig.tokens_of(request) == undisturbed(PROMPT, 1)
    rig.assert_idle()


def test_prompt_logprobs_are_computed_not_loaded() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    rig.generate(PROMPT, prompt_logprobs=0)
    assert rig.loads == []


def test_another_salt_is_another_prefix() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT, cache_salt="a")
    rig.reset_prefix_cache()
    rig.generate(PROMPT, cache_salt="b")
    assert rig.loads == []
    rig.reset_prefix_cache()
    rig.generate(PROMPT, cache_salt="a")
    assert len(rig.loads) == 1


def test_with_policy_fail_a_failed_load_leaves_the_prefixes_of_others() -> None:
    """Readable blocks of the sequence stay; no more of its blocks are stored."""
    rig = OffloadRig(load_failure_policy="fail")
    rig.generate(PROMPT[:24])
    rig.generate(PROMPT)
    assert rig.offloading._manager.num_used == 3
    rig.reset_prefix_cache()
    rig.generate(PROMPT[:25])
    rig.finishes = lambda job: not job.is_load
    request = rig.add_one(PROMPT, 1)
    rig.run_until_idle()
    assert request.status is RequestStatus.FINISHED_ERROR
    assert rig.offloading._manager.num_used == 2
    rig.finishes = lambda job: True
    rig.reset_prefix_cache()
    rig.loads.clear()
    rig.generate(PROMPT)
    assert [len(device_of(load)) for load in rig.loads] == [6]
    rig.assert_idle()
