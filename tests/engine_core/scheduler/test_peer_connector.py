"""Prefill and decode apart: what both schedulers plan, keep and free."""

from dataclasses import replace

import msgspec
import pytest

from engine_core.kv_cache.integrity import check
from engine_core.kv_connector.base import SchedulerContext, create_scheduler_connector
from engine_core.kv_connector.multi import MultiScheduler
from engine_core.kv_connector.peer import PeerScheduler
from engine_core.request import RequestStatus
from proto.errors import ConfigError
from proto.messages.engine_io import FinishReason
from proto.messages.kv_connector import (
    NO_PAYLOAD,
    KVConnectorOutput,
    MultiReport,
    MultiStep,
    pack,
    unpack,
)
from proto.messages.kv_peer import PeerReport, PeerStep, PeerWorkerAddress
from proto.messages.lifecycle import KVCacheGeometry, KVGroup
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.engine_core.kv_connector.test_connector_registry import context as plain_context
from tests.engine_core.scheduler.external_kv import WAITS, prompt
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.paged_runner import undisturbed

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vllm-router sends to the prefill."""
ADDRESSES = [PeerWorkerAddress(f"{rank}" * 32, 7000 + rank) for rank in range(2)]

EXTRA = {"key_file": "read by workers alone"}


class Engine(EngineHarness):
    """An engine with a PeerConnector, whose workers' half is the test. role: of the connector."""

    def __init__(self, role="kv_both", num_ranks=1, multi=False, addresses=True, **options):
        self.role, self.num_ranks, self.multi = role, num_ranks, multi
        self.windows = options.get("windows", (None,))
        self.steps: list[PeerStep] = []
        super().__init__(**options)
        if addresses:
            for rank in range(num_ranks):
                self.report_rank(rank)

    def _connect(self, holds, unblock, is_storable):
        groups = tuple(map(KVGroup, self.windows))
        context = SchedulerContext(
            geometry=KVCacheGeometry(1, 1, 4, "float32", 32, groups),
            block_size=16,
            num_blocks=1000,
            fingerprint=b"f" * 32,
            num_ranks=self.num_ranks,
            transfer_refs=holds,
            block_ids=lambda seq_id: self.kv_cache.block_ids(seq_id),
            unblock=unblock,
            is_storable=is_storable,
        )
        config = KVTransferConfig(
            kv_connector="PeerConnector", kv_role=self.role, kv_connector_extra_config=EXTRA
        )
        if not self.multi:
            return PeerScheduler(config, context)
        child = {
            "kv_connector": "PeerConnector",
            "kv_role": self.role,
            "kv_connector_extra_config": EXTRA,
        }
        return MultiScheduler(
            KVTransferConfig(
                kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [child]}
            ),
            context,
        )

    def report_rank(self, rank=0, **transfers):
        metadata = pack(PeerReport(rank, ADDRESSES[rank]))
        sending = transfers.pop("finished_sending", [])
        if self.multi:
            metadata = pack(MultiReport([metadata], [sending]))
        self.report(
            KVConnectorOutput(worker_metadata=metadata, finished_sending=sending, **transfers)
        )

    def step(self):
        output = super().step()
        if metadata := output.connector_metadata:
            if self.multi:
                (metadata,) = unpack(metadata, MultiStep).parts
            if metadata != NO_PAYLOAD:
                self.steps.append(unpack(metadata, PeerStep))
        return output

    def planned(self, name):
        return [entry for step in self.steps for entry in getattr(step, name)]

    def ask(self, tokens, params=None, max_tokens=1, **fields):
        if params is not None:
            fields["kv_transfer_request"] = msgspec.json.encode(params)
        return self.add(tokens, max_tokens, **fields)

    def answer(self, request):
        """Run a request to its end; return the `kv_transfer_params` of the answer."""
        self.run_until_finished(request)
        output = self.outputs[request.request_id, request.choice][-1]
        return msgspec.json.decode(output.kv_transfer_params or b"{}")

    def copy_blocks(self, load, hold, source):
        """Fetch as the workers do: by key. source: the producer's engine."""
        blocks = dict(zip(hold.keys, hold.block_ids, strict=True))
        for device, keys in zip(load.job.device, load.job.keys, strict=True):
            for block, key in zip(device.block_ids, keys, strict=True):
                for offset in range(16):
                    held = source.runner.slots[blocks[key], offset]
                    self.runner.slots[block, offset] = held


@pytest.fixture
def pair():
    return Engine("kv_producer"), Engine("kv_consumer")


def settle(engine):
    """Send the messages to the workers that are planned."""
    while engine.scheduler.has_work:
        engine.step()


TOKENS = prompt(70)


def prefilled(engine, tokens=TOKENS, **fields):
    (request, *_) = engine.ask(tokens, PREFILL, **fields)
    params = engine.answer(request)
    settle(engine)
    return request, params


def test_the_answer_of_a_prefill_has_the_fields_of_vllm():
    engine = Engine()
    request, params = prefilled(engine)
    (hold,) = engine.planned("holds")
    assert params["remote_block_ids"] == [hold.block_ids]
    assert len(hold.block_ids) == len(set(hold.block_ids)) == 4, "the full ones of 70 tokens"
    assert params["remote_request_id"] == hold.request_id
    assert {name: params[name] for name in params if not name.startswith("remote_")} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "tp_size": 1,
    }
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 7000)
    assert params["remote_workers"] == [{"id": "0" * 32, "port": 7000}]
    assert engine.finish_reason_of(request) is FinishReason.LENGTH


@pytest.mark.parametrize("multi", [False, True])
def test_blocks_are_kept_until_the_workers_say_that_they_were_fetched(multi):
    engine = Engine(multi=multi)
    num_free = engine.kv_cache.num_available_blocks
    request, _ = prefilled(engine)
    assert num_free - engine.kv_cache.num_available_blocks in (4, 5)
    assert check(engine.kv_cache) == []
    engine.report_rank(finished_sending=[request.seq_id])
    assert engine.kv_cache.num_available_blocks == num_free
    engine.assert_idle()


def test_a_decoder_computes_only_what_is_no_full_block(pair):
    prefill, decode = pair
    _, params = prefilled(prefill)
    (request,) = decode.ask(TOKENS, params, max_tokens=8)
    decode.step()
    assert request.status is WAITS
    (load,) = decode.planned("loads")
    assert [each.request_id for each in decode.planned("watches")] == [load.source.request_id]
    (hold,) = prefill.planned("holds")
    assert load.source.request_id == hold.request_id
    assert load.source.workers == [ADDRESSES[0]]
    assert load.job.keys == [hold.keys]
    decode.copy_blocks(load, hold, prefill)
    decode.report_rank(finished_recving=[request.seq_id])
    output = decode.step()
    assert output.total_num_scheduled_tokens == 70 - 64
    decode.run()
    assert decode.tokens_of(request) == undisturbed(TOKENS, 8)
    assert request.num_external_tokens == 64
    decode.assert_idle()


def test_a_prompt_of_full_blocks_leaves_one_token_to_compute(pair):
    prefill, decode = pair
    tokens = prompt(64)
    _, params = prefilled(prefill, tokens)
    (request,) = decode.ask(tokens, params, max_tokens=4)
    decode.step()
    (load,) = decode.planned("loads")
    assert len(load.job.keys[0]) == 3, "the last token is computed, with its block"
    (hold,) = prefill.planned("holds")
    decode.copy_blocks(load, hold, prefill)
    decode.report_rank(finished_recving=[request.seq_id])
    decode.run()
    assert decode.tokens_of(request) == undisturbed(tokens, 4)


def test_what_is_cached_at_the_decoder_is_not_loaded(pair):
    prefill, decode = pair
    _, params = prefilled(prefill)
    decode.ask(TOKENS[:35])
    decode.run()
    (request,) = decode.ask(TOKENS, params)
    decode.step()
    (load,) = decode.planned("loads")
    assert load.job.keys == [prefill.planned("holds")[0].keys[2:]]
    decode.copy_blocks(load, prefill.planned("holds")[0], prefill)
    decode.report_rank(finished_recving=[request.seq_id])
    decode.run()
    assert decode.tokens_of(request) == undisturbed(TOKENS, 1)


def test_a_producer_frees_what_a_decoder_has_cached(pair):
    prefill, decode = pair
    _, params = prefilled(prefill)
    decode.ask(TOKENS)
    decode.run()
    decode.ask(TOKENS, params)
    decode.run()
    settle(decode)
    assert decode.planned("loads") == []
    ((source, _),) = decode.planned("releases")
    assert source.request_id == params["remote_request_id"]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load_follows_the_policy(pair, policy):
    prefill, _ = pair
    decode = Engine("kv_consumer", load_failure_policy=policy)
    _, params = prefilled(prefill)
    (request,) = decode.ask(TOKENS, params, max_tokens=5)
    decode.step()
    (load,) = decode.planned("loads")
    blocks = load.job.device[0].block_ids
    decode.report_rank(finished_recving=[request.seq_id], invalid_block_ids=blocks)
    decode.run()
    if policy == "fail":
        assert decode.finish_reason_of(request) is FinishReason.ERROR
    else:
        assert decode.tokens_of(request) == undisturbed(TOKENS, 5)
    settle(decode)
    assert decode.planned("releases") == [], "the workers have said it to the producer"
    decode.assert_idle()


def test_choices_load_once(pair):
    prefill, decode = pair
    _, params = prefilled(prefill, n=1)
    requests = decode.ask(TOKENS, params, max_tokens=3, n=3)
    decode.step()
    (load,) = decode.planned("loads")
    decode.copy_blocks(load, prefill.planned("holds")[0], prefill)
    decode.report_rank(finished_recving=[load.job.job_id])
    decode.run()
    assert len(decode.planned("loads")) == 1
    assert all(decode.tokens_of(each) == undisturbed(TOKENS, 3, each.choice) for each in requests)
    decode.assert_idle()


def test_one_choice_of_a_prefill_is_handed_over():
    engine = Engine()
    requests = engine.ask(TOKENS, PREFILL, n=3)
    engine.run()
    settle(engine)
    assert [hold.seq_id for hold in engine.planned("holds")] == [requests[0].seq_id]


class TestEnds:
    def test_a_client_that_leaves_a_queue_frees_the_producer(self, pair):
        prefill, decode = pair
        _, params = prefilled(prefill)
        (request,) = decode.ask(TOKENS, params)
        decode.scheduler.abort_request(request.request_id)
        settle(decode)
        assert [source.request_id for source, _ in decode.planned("releases")] == [
            params["remote_request_id"]
        ]
        decode.assert_idle()

    def test_blocks_of_a_load_outlive_its_request(self, pair):
        prefill, decode = pair
        num_free = decode.kv_cache.num_available_blocks
        _, params = prefilled(prefill)
        (request,) = decode.ask(TOKENS, params)
        decode.step()
        decode.scheduler.abort_request(request.request_id)
        assert decode.kv_cache.num_available_blocks < num_free
        decode.report_rank(finished_recving=[request.seq_id])
        assert decode.kv_cache.num_available_blocks == num_free
        settle(decode)
        decode.assert_idle()

    def test_new_workers_of_a_decoder_compute_what_was_loading(self, pair):
        prefill, decode = pair
        _, params = prefilled(prefill)
        (request,) = decode.ask(TOKENS, params, max_tokens=4)
        decode.step()
        decode.lose_workers()
        decode.report_rank()
        decode.run()
        assert decode.tokens_of(request) == undisturbed(TOKENS, 4)
        decode.assert_idle()

    def test_new_workers_of_a_decoder_send_the_heartbeats_of_waiting_requests(self):
        decode = Engine(max_num_seqs=1)
        decode.ask(prompt(20, 5), max_tokens=50)
        decode.step()
        _, params = prefilled(Engine())
        decode.ask(TOKENS, params)
        decode.step()
        assert len(decode.planned("watches")) == 1
        decode.lose_workers()
        decode.step()
        assert len(decode.planned("watches")) == 2

    def test_new_workers_of_a_producer_hold_nothing(self, pair):
        prefill, _ = pair
        num_free = prefill.kv_cache.num_available_blocks
        prefilled(prefill)
        prefill.lose_workers()
        assert prefill.kv_cache.num_available_blocks == num_free
        _, params = prefilled(prefill)
        assert params["do_remote_prefill"] is False, "its workers have no address yet"
        assert prefill.kv_cache.num_available_blocks == num_free

    def test_an_aborted_prefill_keeps_nothing(self, pair):
        prefill, _ = pair
        (request,) = prefill.ask(TOKENS, PREFILL, max_tokens=20)
        prefill.step()
        prefill.scheduler.abort_request(request.request_id)
        settle(prefill)
        assert prefill.planned("holds") == []
        prefill.assert_idle()

    def test_a_reset_ends_leases(self, pair):
        prefill, _ = pair
        request, _ = prefilled(prefill)
        assert prefill.scheduler.kv_transfer.reset_cache()
        settle(prefill)
        assert prefill.planned("drops") == [request.seq_id]

    def test_corrupt_kv_is_not_handed_over(self, pair):
        prefill, _ = pair
        request, _ = prefilled(prefill)
        prefill.scheduler.kv_transfer.discard_content(request)
        settle(prefill)
        assert prefill.planned("drops") == [request.seq_id]


def test_windows_hand_over_what_they_keep():
    """Of the group with a window of 32 tokens, the consumer loads the blocks that the hit needs."""
    windows = (None, 32)
    prefill = Engine(windows=windows, max_num_batched_tokens=32, long_prefill_token_threshold=32)
    decode = Engine(windows=windows)
    tokens = prompt(150)
    request, params = prefilled(prefill, tokens)
    full, window = params["remote_block_ids"]
    assert all(full)
    assert 0 in window
    (request,) = decode.ask(tokens, params, max_tokens=6)
    decode.step()
    (load,) = decode.planned("loads")
    decode.copy_blocks(load, prefill.planned("holds")[0], prefill)
    assert [len(keys) for keys in load.job.keys] == [9, 2]
    decode.report_rank(finished_recving=[request.seq_id])
    decode.run()
    assert decode.tokens_of(request) == undisturbed(tokens, 6)
    decode.assert_idle()


def test_a_prompt_without_a_full_block_is_answered_without_blocks(pair):
    prefill, _ = pair
    _, params = prefilled(prefill, TOKENS[:10])
    assert params["do_remote_prefill"] is False
    prefill.assert_idle()


@pytest.mark.parametrize(
    ("changes", "salt"),
    [
        ({"remote_block_ids": [[]]}, None),
        ({"remote_block_ids": [[1, 2], [3, 4]]}, None),
        ({"remote_block_ids": [[9] * 100_000]}, None),
        ({}, "another"),
    ],
)
def test_forged_block_ids_name_no_block_of_the_producer(pair, changes, salt):
    """The consumer computes the keys from its own request; ids from its client change none."""
    prefill, decode = pair
    _, params = prefilled(prefill)
    (request,) = decode.ask(TOKENS, {**params, **changes}, max_tokens=2, cache_salt=salt)
    decode.step()
    held = set(prefill.planned("holds")[0].keys)
    for load in decode.planned("loads"):
        asked = {key for keys in load.job.keys for key in keys}
        assert asked <= held if salt is None else asked.isdisjoint(held)
        blocks = load.job.device[0].block_ids
        decode.report_rank(finished_recving=[request.seq_id], invalid_block_ids=blocks)
    decode.run()
    assert decode.tokens_of(request) == undisturbed(TOKENS, 2)


def test_roles_are_kept():
    _, params = prefilled(Engine())
    producer, consumer = Engine("kv_producer"), Engine("kv_consumer")
    (request,) = producer.ask(TOKENS, params)
    producer.run()
    assert producer.steps == []
    (request,) = consumer.ask(TOKENS, PREFILL)
    assert consumer.answer(request) == {}
    settle(consumer)
    assert consumer.steps == []


def test_several_ranks_answer_when_all_have_an_address():
    engine = Engine(num_ranks=2, addresses=False)
    engine.report_rank(1)
    assert prefilled(engine)[1]["do_remote_prefill"] is False
    engine.report_rank(0)
    _, params = prefilled(engine)
    assert [each["port"] for each in params["remote_workers"]] == [7000, 7001]
    assert (params["tp_size"], params["remote_port"]) == (2, 7000)


def test_recurrent_states_are_refused_by_name():
    context = replace(plain_context(), state_slots=object())
    config = KVTransferConfig(kv_connector="PeerConnector", kv_connector_extra_config=EXTRA)
    with pytest.raises(ConfigError, match="PeerConnector does not copy recurrent states"):
        create_scheduler_connector(config, context)


def test_a_request_keeps_its_place_while_another_choice_of_it_loads(pair):
    """An equal prompt of the same hand-over waits for the load, and then finds it in the cache."""
    prefill, decode = pair
    _, params = prefilled(prefill)
    first, second = (decode.ask(TOKENS, params, max_tokens=2)[0] for _ in range(2))
    decode.step()
    (load,) = decode.planned("loads")
    assert {first.status, second.status} == {WAITS}
    decode.copy_blocks(load, prefill.planned("holds")[0], prefill)
    decode.report_rank(finished_recving=[load.job.job_id])
    decode.run()
    for request in (first, second):
        assert decode.tokens_of(request) == undisturbed(TOKENS, 2)
        assert request.status is RequestStatus.FINISHED_LENGTH
    decode.assert_idle()
