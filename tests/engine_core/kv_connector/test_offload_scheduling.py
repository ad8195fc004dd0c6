"""The scheduler's half between a real scheduler and workers that copy when the test decides.

Device blocks of 4 tokens, offloaded blocks of 12 (behaviours OFC-01 to OFC-10).
"""

from typing import Any

import msgspec
import pytest

from engine_core.kv_connector.offload.tracking import parse_key
from engine_core.request import RequestStatus
from engine_core.trace.recorder import TraceRecorder
from proto.errors import ConfigError
from proto.messages.kv_events import BlockRemoved, BlockStored
from proto.messages.sched_trace import Step, read_line
from proto.messages.stats import KVTier
from proto.settings.config import CacheConfig, ServeConfig
from tests.fakes.kv_events import events_config, names
from tests.fakes.offload_rig import OffloadRig

PROMPT = list(range(37))
LATER = 10_000


def test_take_events_have_their_medium() -> None:
    rig = OffloadRig(num_slots=2)
    rig.generate(PROMPT[:24])
    rig.generate([*range(100, 124)])
    stored, removed = [], []
    for event in rig.offloading.take_events():
        assert isinstance(event, BlockStored | BlockRemoved)
        (stored if isinstance(event, BlockStored) else removed).append(event)
    (first_store,) = rig.stores[:1]
    hashes = [parse_key(key)[0] for key in first_store.keys[0]]
    assert stored[0] == BlockStored(names(hashes[:1]), None, [], 12, None, "CPU", None, group_idx=0)
    assert removed == [BlockRemoved([each], "CPU", 0) for each in names(hashes[::-1])], (
        "the suffix is evicted first"
    )
    assert list(rig.offloading.take_events()) == []


def test_events_of_stored_blocks_have_their_tokens_also_after_the_end_of_the_request() -> None:
    cache = CacheConfig(kv_events_config=events_config())
    rig = OffloadRig(finishes=lambda job: None, serve_config=ServeConfig(cache=cache))
    request = rig.add_one(PROMPT, 1, cache_salt="team")
    while rig.scheduler.num_unfinished:
        rig.step()
    assert not list(rig.offloading.take_events())
    rig.finishes = lambda job: True
    rig.run_until_idle()
    stored = list(rig.offloading.take_events())
    hashes = request.block_hashes[2::3]
    assert [each.block_hashes for each in stored] == [[name] for name in names(hashes)]
    assert [each.parent_block_hash for each in stored] == [None, *names(hashes)[:-1]]
    assert [each.token_ids for each in stored] == [PROMPT[:12], PROMPT[12:24], PROMPT[24:36]]
    assert {(each.block_size, each.medium, each.group_idx) for each in stored} == {(12, "CPU", 0)}
    assert stored[0].extra_keys == [["team"]]
    assert {each.kv_cache_spec_kind for each in stored} == {"full_attention"}


def test_lookups_are_timed_also_of_requests_that_wait() -> None:
    rig = OffloadRig(num_blocks=12)
    rig.add_one([7] * 30, 10)
    rig.step()
    assert len(rig.offloading.drain_stats()[0].lookup_seconds) == 1
    waiting = rig.add_one(PROMPT)
    for _ in range(3):
        rig.step()
    assert waiting.status is RequestStatus.WAITING
    (stats,) = rig.offloading.drain_stats()
    assert len(stats.lookup_seconds) == 3
    assert stats.lookup_wait_seconds == []


@pytest.mark.parametrize("ends", [False, True])
def test_the_wait_for_another_load_is_timed_until_the_answer_or_the_end(ends: bool) -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    rig.offloading.drain_stats()
    rig.finishes = lambda job: None if job.is_load else True
    rig.add_one(PROMPT, 3)
    second = rig.add_one([*PROMPT, 5], 3)
    rig.step()
    (stats,) = rig.offloading.drain_stats()
    assert (len(stats.lookup_seconds), stats.lookup_wait_seconds) == (2, [])
    if ends:
        rig.scheduler.abort_request(second.request_id)
    rig.finishes = lambda job: True
    rig.run_until_idle()
    (stats,) = rig.offloading.drain_stats()
    (waited,) = stats.lookup_wait_seconds
    assert waited > 0.0


def test_a_trace_has_every_lookup_and_the_fill_of_the_medium() -> None:
    lines: list[Any] = []
    recorder = TraceRecorder(lines.append, started_at=0.0, num_seats=8)
    rig = OffloadRig(num_slots=50, observer=recorder, num_blocks=14)
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    lines.clear()
    rig.finishes = lambda job: None if job.is_load else True
    first = rig.add_one(PROMPT, 3)
    second = rig.add_one([*PROMPT, 5], 3)
    third = rig.add_one([*range(500, 530)], 3)
    rig.step()
    (step,) = [line for line in lines if isinstance(line, Step)]
    assert step.snapshot.tiers == [KVTier("CPU", 50, 3)]
    assert step.decision.new == []
    found = {
        each.seq_id: (each.local_tokens, each.external_tokens, each.asynchronous, each.waits_for)
        for each in step.decision.lookups
    }
    assert found == {
        first.seq_id: (0, 36, True, "remote_kvs"),
        second.seq_id: (0, 0, False, "remote_kvs"),
        third.seq_id: (0, 0, False, "room"),
    }
    assert step.decision.lookups[0].connector == "OffloadingScheduler"
    assert read_line(msgspec.json.encode(step)) == step


def test_a_reuse_threshold_keeps_scans_out() -> None:
    rig = OffloadRig(extra={"store_threshold": 2})
    rig.generate(PROMPT)
    assert rig.stores == []
    (stats,) = rig.offloading.drain_stats()
    assert stats.num_skipped == 3
    rig.reset_prefix_cache()
    rig.generate(PROMPT)
    (store,) = rig.stores
    assert [len(keys) for keys in store.keys] == [3], "also those after the first miss"


def test_a_request_waiting_for_blocks_repeats_its_lookup() -> None:
    """A repeated lookup does not count as another use."""
    rig = OffloadRig(num_blocks=12, extra={"store_threshold": 2})
    blocker = rig.add_one([7] * 30, 10)
    rig.step()
    rig.add_one(PROMPT, 1)
    while rig.finish_reason_of(blocker) is None:
        rig.step()
    rig.run_until_idle()
    assert rig.stores == []


def test_kv_producer_loads_nothing_and_kv_consumer_stores_nothing() -> None:
    producer = OffloadRig(role="kv_producer")
    producer.generate(PROMPT)
    producer.reset_prefix_cache()
    producer.generate(PROMPT)
    assert producer.stores
    assert not producer.loads
    consumer = OffloadRig(role="kv_consumer")
    consumer.generate(PROMPT)
    assert not consumer.stores


def test_start_over_forgets_the_workers_memory() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    rig.add_one(PROMPT, 10)
    rig.step()
    rig.step()
    assert rig.half.under_way
    rig.lose_workers()
    rig.finishes = lambda job: True
    rig.run_until_idle()
    rig.assert_idle()
    rig.reset_prefix_cache()
    rig.generate(PROMPT)
    assert len(rig.loads) == 1, "stored again by the new workers"


def test_reset_cache_refuses_while_something_is_copied() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    rig.add_one(PROMPT, 1)
    rig.step()
    rig.step()
    assert not rig.offloading.reset_cache()
    rig.finishes = lambda job: True
    rig.run_until_idle()
    assert rig.offloading.reset_cache()
    rig.reset_prefix_cache()
    rig.generate(PROMPT)
    assert rig.loads == []


def test_nonfinite_logits_leave_no_stored_blocks() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    request = rig.add_one(PROMPT, 10)
    rig.step()
    rig.step()
    (store,) = rig.half.under_way
    output = rig.scheduler.schedule()
    result = msgspec.structs.replace(
        rig.runner.execute(output), failed_seq_ids=[request.seq_id], sampled_token_ids=[[]]
    )
    rig.record_outputs(rig.scheduler.update_from_output(output, result))
    assert request.status is RequestStatus.FINISHED_ERROR
    rig.finish(store)
    assert rig.offloading._manager.num_used == 0


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
