"""The deciding half between a real scheduler and workers that copy when the test says so.

Device blocks of 4 tokens, offloaded blocks of 12 (behaviours OFC-01 to OFC-10, and what the
issue adds to them).
"""

import msgspec
import pytest

from engine_core.kv_connector.offload.keys import parts
from engine_core.request import RequestStatus
from proto.errors import ConfigError
from proto.kv_events import BlockRemoved, BlockStored
from proto.kv_offload import DeviceBlocks, FinishedJob, OffloadReport, TransferJob
from proto.kv_transfer import KVConnectorOutput, pack
from tests.fakes.offload_rig import OffloadRig
from tests.fakes.paged_runner import undisturbed

PROMPT = list(range(37))
LATER = 10_000


def device_of(job: TransferJob) -> list[int]:
    return [block for each in job.device for block in each.block_ids]


def test_stores_are_planned_for_full_offloaded_blocks_only() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    (store,) = rig.stores
    assert not store.is_load
    assert store.medium == "CPU"
    assert store.device == [DeviceBlocks(0, list(range(1, 10)))]
    assert store.slots == [[0, 1, 2]]
    rig.assert_at_rest()


def test_only_what_prepare_store_wants_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = OffloadRig()
    manager = rig.deciding._manager
    prepare = manager.prepare_store
    monkeypatch.setattr(manager, "prepare_store", lambda keys: prepare(keys[1:2]))
    rig.generate(PROMPT)
    assert [device_of(store) for store in rig.stores] == [[4, 5, 6]]


def test_a_growing_request_stores_each_block_once_it_is_full() -> None:
    rig = OffloadRig()
    request = rig.add_one(PROMPT[:12], 26)
    rig.step()
    assert [device_of(store) for store in rig.stores] == [[1, 2, 3]]
    while request.num_computed_tokens < 23:
        rig.step()
    assert len(rig.stores) == 1
    rig.step()
    assert [device_of(store) for store in rig.stores] == [[1, 2, 3], [4, 5, 6]]
    rig.settle()
    assert [device_of(store) for store in rig.stores] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_no_room_is_tolerated_and_tried_again_with_new_blocks_only() -> None:
    rig = OffloadRig(num_slots=2, finishes=lambda job: None)
    rig.add_one(PROMPT[:36], 5)
    rig.step()
    assert not rig.stores
    (stats,) = rig.deciding.take_stats()
    assert (stats.num_unstored, stats.num_stores, stats.usage) == (3, 0, 0.0)
    rig.finishes = lambda job: True
    rig.settle()
    rig.add_one(PROMPT[:24], 13)
    rig.step()
    assert [device_of(store) for store in rig.stores] != []


def test_touch_keeps_all_blocks_of_a_growing_request_recent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = OffloadRig()
    touched: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        rig.deciding._manager,
        "touch",
        lambda keys, *, is_new_use=True: touched.append((len(keys), is_new_use)),
    )
    request = rig.add_one(PROMPT[:24], 50)
    while request.num_computed_tokens < 72:
        rig.step()
    assert touched == [(2, True), (2, False), (3, False), (4, False), (5, False), (6, False)]
    assert device_of(rig.stores[-1]) == [16, 17, 18]


def test_a_long_request_is_touched_as_it_grows_by_an_eighth_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = OffloadRig()
    manager, touched = rig.deciding._manager, list[int]()
    monkeypatch.setattr(
        manager, "touch", lambda keys, *, is_new_use=True: touched.append(len(keys))
    )
    rig.generate([each % 900 for each in range(12 * 24)], 12 * 5 + 1)
    assert touched == [24, 24, 28, 29]


def test_stores_begin_with_the_step_that_follows() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    rig.add_one(PROMPT, 5)
    rig.step()
    assert rig.half.put_off
    assert not rig.half.under_way
    assert rig.deciding.wants_step()
    rig.step()
    assert rig.half.under_way
    assert not rig.half.put_off
    assert not rig.deciding.wants_step()


def test_lookup_is_left_out_where_less_than_an_offloaded_block_is_uncomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = OffloadRig()
    asked: list[int] = []
    lookup = rig.deciding._manager.lookup
    monkeypatch.setattr(
        rig.deciding._manager,
        "lookup",
        lambda keys, *, is_new_use: (asked.append(len(keys)), lookup(keys))[1],
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
    rig.forget_device()
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
    rig.settle()
    assert request.num_cached_tokens == 36
    assert rig.tokens_of(request) == undisturbed(PROMPT, 16)
    rig.assert_at_rest()


def test_update_state_after_alloc_loads_what_follows_the_devices_blocks() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.forget_device()
    rig.generate(PROMPT[:13])
    rig.loads.clear()
    request = rig.generate(PROMPT[:25])
    (load,) = rig.loads
    assert load.slots == [[1]]
    assert len(device_of(load)) == 3
    assert request.num_cached_tokens == 24


def test_a_misaligned_first_block_is_loaded_from_its_middle_on() -> None:
    """Of 24 tokens the device has 16: the second offloaded block is needed from its part 1 on."""
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.forget_device()
    rig.deciding._loads_any = False
    rig.generate(PROMPT[:17])
    rig.deciding._loads_any = True
    request = rig.generate(PROMPT)
    (load,) = rig.loads
    assert load.device == [DeviceBlocks(0, device_of(load), skip=1)]
    assert load.slots == [[1, 2]]
    assert len(device_of(load)) == 5
    assert rig.tokens_of(request) == undisturbed(PROMPT, 1)


def test_a_load_may_end_inside_an_offloaded_block() -> None:
    """At least one token is computed: of a prompt of 24 tokens 20 are loaded."""
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.forget_device()
    request = rig.generate(PROMPT[:24])
    (load,) = rig.loads
    assert len(device_of(load)) == 5
    assert load.slots == [[0, 1]]
    assert request.num_cached_tokens == 20
    assert rig.tokens_of(request) == undisturbed(PROMPT[:24], 1)


def test_two_requests_for_the_same_prefix_load_it_once() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.forget_device()
    rig.finishes = lambda job: None
    first, second = rig.add_one(PROMPT, 1), rig.add_one([*PROMPT, 5], 1)
    other = rig.add_one([7] * 20, 1)
    rig.step()
    rig.step()
    assert len(rig.loads) == 1
    assert rig.reason_of(other) is not None, "nobody waits for them"
    assert rig.reason_of(second) is None
    rig.finishes = lambda job: True
    rig.settle()
    assert len(rig.loads) == 1
    assert (first.num_cached_tokens, second.num_cached_tokens) == (36, 36)
    rig.assert_at_rest()


def test_who_waited_for_a_load_that_failed_computes() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.forget_device()
    rig.finishes = lambda job: None if job.is_load else True
    first, second = rig.add_one(PROMPT, 3), rig.add_one([*PROMPT, 5], 3)
    rig.step()
    rig.finish(rig.loads[0], succeeds=False)
    rig.finishes = lambda job: True
    rig.settle()
    assert rig.tokens_of(first) == undisturbed(PROMPT, 3)
    assert rig.tokens_of(second) == undisturbed([*PROMPT, 5], 3)
    assert len(rig.loads) == 1, "what could not be read is forgotten"
    (stats,) = rig.deciding.take_stats()
    assert stats.num_failed == 1
    rig.forget_device()
    again = rig.generate(PROMPT)
    assert len(rig.loads) == 2, "and stored anew once it was computed"
    assert again.num_cached_tokens == 36
    rig.assert_at_rest()


def test_abort_while_loading_keeps_blocks_until_the_copy_ends() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.forget_device()
    rig.finishes = lambda job: None
    request = rig.add_one(PROMPT)
    rig.step()
    (load,) = rig.loads
    rig.scheduler.abort(request.request_id)
    assert rig.kv_cache.usage > 0
    held = set(rig.kv_cache.pool.free_queue)
    assert held.isdisjoint(device_of(load))
    rig.finishes = lambda job: True
    rig.settle()
    rig.assert_at_rest()


def test_abort_while_storing_keeps_blocks_until_the_copy_ends() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    request = rig.add_one(PROMPT)
    rig.step()
    rig.scheduler.abort(request.request_id)
    (store,) = rig.stores
    assert not set(device_of(store)) & set(rig.kv_cache.pool.free_queue)
    rig.finishes = lambda job: True
    rig.settle()
    rig.assert_at_rest()
    rig.forget_device()
    assert rig.generate(PROMPT).num_cached_tokens == 36


def test_request_finished_stores_the_last_full_block() -> None:
    """The last token is drawn with the step that fills the block, so nobody computes after it."""
    rig = OffloadRig()
    rig.generate(PROMPT[:12], max_tokens=13)
    assert [device_of(store) for store in rig.stores] == [[1, 2, 3], [4, 5, 6]]


def test_a_preempted_request_finds_its_blocks_on_the_medium() -> None:
    rig = OffloadRig(num_blocks=14, enable_chunked_prefill=True)
    first, second = rig.add_one(PROMPT[:13], 20), rig.add_one([*range(200, 213)], 20)
    rig.settle()
    assert first.num_preemptions + second.num_preemptions > 0
    assert rig.loads
    assert rig.tokens_of(first) == undisturbed(PROMPT[:13], 20)
    assert rig.tokens_of(second) == undisturbed([*range(200, 213)], 20)
    rig.assert_at_rest()


def test_handle_preemptions_flushes_the_stores_of_the_victims() -> None:
    rig = OffloadRig(num_blocks=14, finishes=lambda job: None)
    rig.add_one(PROMPT[:13], 20)
    rig.add_one([*range(200, 213)], 20)
    for _ in range(LATER):
        if rig.half.flushed:
            break
        rig.step()
    victims = {store.job_id for store in rig.stores}
    assert set(rig.half.flushed) <= victims
    rig.finishes = lambda job: True
    rig.settle()
    rig.assert_at_rest()


def test_a_job_is_over_when_all_ranks_have_reported() -> None:
    rig = OffloadRig(num_ranks=3, finishes=lambda job: None)
    rig.add_one(PROMPT, 5)
    rig.step()
    rig.step()
    (store,) = rig.half.under_way
    reports = rig.half.finish(store, rig.runner)
    for report in reports:
        assert rig.deciding._manager.usage > 0
        assert rig.deciding._manager.lookup(store.keys[0]) == 0
        rig.scheduler.update_from_connector(report)
    assert rig.deciding._manager.lookup(store.keys[0]) == 3
    (stats,) = rig.deciding.take_stats()
    assert (stats.num_stores, stats.store_bytes, stats.store_seconds) == (1, 300, 0.5)
    rig.finishes = lambda job: True
    rig.settle()
    rig.assert_at_rest()


def test_a_store_that_failed_on_one_rank_is_forgotten_on_all() -> None:
    rig = OffloadRig(num_ranks=2, finishes=lambda job: False)
    rig.generate(PROMPT)
    assert rig.deciding._manager.usage == 0.0
    rig.forget_device()
    rig.finishes = lambda job: True
    rig.generate(PROMPT)
    assert not rig.loads


def test_window_groups_load_only_what_the_next_token_sees() -> None:
    """A window of 14 tokens: of 36 loaded tokens the last 13, from block 5 of 9 on."""
    rig = OffloadRig(windows=(None, 14))
    rig.generate(PROMPT)
    rig.forget_device()
    request = rig.generate(PROMPT)
    (load,) = rig.loads
    full, window = load.device
    assert (full.group, len(full.block_ids), full.skip) == (0, 9, 0)
    assert (window.group, len(window.block_ids), window.skip) == (1, 4, 2)
    assert len(load.slots[0]) == 3
    assert len(load.slots[1]) == 2
    assert rig.tokens_of(request) == undisturbed(PROMPT, 1)
    rig.assert_at_rest()


def test_take_events_have_their_medium() -> None:
    rig = OffloadRig(num_slots=2)
    rig.generate(PROMPT[:24])
    rig.generate([*range(100, 124)])
    stored, removed = [], []
    for event in rig.deciding.take_events():
        assert isinstance(event, BlockStored | BlockRemoved)
        (stored if isinstance(event, BlockStored) else removed).append(event)
    (first_store,) = rig.stores[:1]
    hashes = [parts(key)[0] for key in first_store.keys[0]]
    assert stored[0] == BlockStored(hashes[:1], None, [], 12, 0, "CPU")
    assert removed == [BlockRemoved(each, 0, "CPU") for each in hashes[::-1]], "the end first"
    assert list(rig.deciding.take_events()) == []


def test_a_reuse_threshold_keeps_scans_out() -> None:
    rig = OffloadRig(extra={"store_threshold": 2})
    rig.generate(PROMPT)
    assert rig.stores == []
    (stats,) = rig.deciding.take_stats()
    assert stats.num_skipped == 3
    rig.forget_device()
    rig.generate(PROMPT)
    assert len(rig.stores) == 1


def test_who_waits_for_room_is_one_who_looks_for_its_blocks() -> None:
    """However often it is asked for."""
    rig = OffloadRig(num_blocks=12, extra={"store_threshold": 2})
    blocker = rig.add_one([7] * 30, 10)
    rig.step()
    rig.add_one(PROMPT, 1)
    while rig.reason_of(blocker) is None:
        rig.step()
    rig.settle()
    assert rig.stores == []


def test_kv_producer_loads_nothing_and_kv_consumer_stores_nothing() -> None:
    producer = OffloadRig(role="kv_producer")
    producer.generate(PROMPT)
    producer.forget_device()
    producer.generate(PROMPT)
    assert producer.stores
    assert not producer.loads
    consumer = OffloadRig(role="kv_consumer")
    consumer.generate(PROMPT)
    assert not consumer.stores


def test_prompt_logprobs_are_computed_not_loaded() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.forget_device()
    rig.generate(PROMPT, prompt_logprobs=0)
    assert rig.loads == []


def test_another_salt_is_another_prefix() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT, cache_salt="a")
    rig.forget_device()
    rig.generate(PROMPT, cache_salt="b")
    assert rig.loads == []
    rig.forget_device()
    rig.generate(PROMPT, cache_salt="a")
    assert len(rig.loads) == 1


def test_start_over_forgets_the_workers_memory() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    rig.add_one(PROMPT, 10)
    rig.step()
    rig.step()
    assert rig.half.under_way
    rig.lose_workers()
    rig.finishes = lambda job: True
    rig.settle()
    rig.assert_at_rest()
    rig.forget_device()
    rig.generate(PROMPT)
    assert len(rig.loads) == 1, "stored anew by the workers that came"


def test_reset_cache_refuses_while_something_is_copied() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    rig.add_one(PROMPT, 1)
    rig.step()
    rig.step()
    assert not rig.deciding.reset_cache()
    rig.finishes = lambda job: True
    rig.settle()
    assert rig.deciding.reset_cache()
    rig.forget_device()
    rig.generate(PROMPT)
    assert rig.loads == []


def test_a_request_whose_scores_are_no_numbers_leaves_nothing_to_be_found() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    request = rig.add_one(PROMPT, 10)
    rig.step()
    rig.step()
    (store,) = rig.half.under_way
    output = rig.scheduler.schedule()
    result = msgspec.structs.replace(
        rig.runner.execute(output), failed_handles=[request.handle], sampled_token_ids=[[]]
    )
    rig.note(rig.scheduler.update_from_output(output, result))
    assert request.status is RequestStatus.FINISHED_ERROR
    rig.finish(store)
    assert rig.deciding._manager.usage == 0.0


def test_a_load_that_fails_takes_no_prefix_from_others_by_policy_fail() -> None:
    """What could be read of the sequence stays; nothing more of it is stored."""
    rig = OffloadRig(load_failure_policy="fail")
    rig.generate(PROMPT[:24])
    rig.generate(PROMPT)
    assert rig.deciding._manager.usage == 3 / 1000
    rig.forget_device()
    rig.generate(PROMPT[:25])
    rig.finishes = lambda job: not job.is_load
    request = rig.add_one(PROMPT, 1)
    rig.settle()
    assert request.status is RequestStatus.FINISHED_ERROR
    assert rig.deciding._manager.usage == 2 / 1000
    rig.finishes = lambda job: True
    rig.forget_device()
    rig.loads.clear()
    rig.generate(PROMPT)
    assert [len(device_of(load)) for load in rig.loads] == [6]
    rig.assert_at_rest()


def test_nothing_is_stored_that_rests_on_a_load_of_somebody_else() -> None:
    """It may have failed; the cursor stays where it is until that is known."""
    rig = OffloadRig()
    rig.trusts = False
    rig.add_one(PROMPT, 20)
    rig.step()
    rig.step()
    assert rig.stores == []
    rig.trusts = True
    rig.step()
    assert [len(device_of(store)) for store in rig.stores] == [9]
    rig.settle()
    rig.trusts = False
    rig.generate([*range(300, 337)])
    assert len(rig.stores) == 2, "nor when it ends"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"block_size": 10}, "block_size must be a multiple of --block-size 4, got 10"),
        ({"block_size": "x"}, "block_size is wrong"),
        ({"cpu_bytes_to_use": 10}, "cpu_bytes_to_use holds no block"),
        ({"cpu_bytes_to_use": "1G"}, "cpu_bytes_to_use is wrong"),
        ({"eviction_policy": "fifo"}, "eviction_policy is wrong"),
        ({"store_threshold": -1}, "store_threshold must be 0 or more"),
        ({"max_tracker_size": 0}, "max_tracker_size must be 1 or more"),
        ({"cpu_bytes": 1}, "cpu_bytes is not known"),
        ({"spec_name": "TapeOffloadingSpec"}, "TapeOffloadingSpec is not registered"),
        ({"spec_module_path": "no.such.module"}, "no.such.module cannot be imported"),
    ],
)
def test_wrong_extra_config_names_the_key(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadRig(extra=extra)


def test_an_offloaded_block_is_smaller_than_the_window() -> None:
    with pytest.raises(ConfigError, match="less than the model's window of 12 tokens, got 12"):
        OffloadRig(windows=(None, 12))
    OffloadRig(windows=(None, 2), size=4)


@pytest.mark.parametrize("given_up", [[True, True], [True, False]])
def test_a_store_that_every_rank_gave_up_or_finished_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, given_up: list[bool]
) -> None:
    rig = OffloadRig(num_ranks=3, finishes=lambda job: None)
    rig.add_one(PROMPT, 10)
    rig.step()
    (store,) = rig.stores
    told: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        rig.deciding._manager,
        "complete_store",
        lambda keys, *, success, given_up: told.append((success, given_up)),
    )
    done = [FinishedJob(store.job_id, False, given_up=each) for each in given_up]
    for each in [FinishedJob(store.job_id, True), *done]:
        report = pack(OffloadReport([each]))
        rig.deciding.update_connector_output(KVConnectorOutput(worker_metadata=report))
    assert told == [(False, all(given_up))]
