"""Failed loads: requests that use an invalid block recompute it, or end."""

import pytest

from engine_core.kv_connector.base import NO_MATCH
from engine_core.request import RequestStatus
from proto.messages.engine_io import FinishReason
from proto.messages.kv_connector import KVConnectorOutput
from tests.engine_core.scheduler.external_kv import (
    WAITS,
    engine_with,
    finish,
    losing,
    num_free,
    num_hashed,
    prompt,
)
from tests.fakes.engine_harness import scheduled
from tests.fakes.kv_connector import always
from tests.fakes.paged_runner import undisturbed


class TestInvalidBlocks:
    @pytest.mark.parametrize("overlapped", [False, True])
    def test_recompute_from_the_first_one(self, overlapped):
        """KVC-21: synchronous: no output of that step, blocks kept, computed from there."""
        engine = engine_with(
            always(99 * 16, is_async=False), fails=losing(50, 70), async_scheduling=overlapped
        )
        request = engine.add_one(prompt(1600), max_tokens=6)
        engine.send()
        table = engine.kv_cache.block_ids(request.seq_id)
        if overlapped:
            engine.send()
        engine.collect(engine.in_flight.popleft())
        assert request.status is RequestStatus.RUNNING
        assert request.num_computed_tokens == 50 * 16
        assert engine.tokens_of(request) == []
        assert engine.kv_cache.block_ids(request.seq_id)[0][:100] == table[0]
        finish(engine)
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 6)
        engine.assert_idle()

    def test_policy_fail_ends_the_request_and_keeps_valid_blocks_findable(self):
        """KVC-23: neither the invalid block nor later ones are findable; earlier ones are kept."""
        engine = engine_with(
            always(99 * 16, is_async=False), fails=losing(50), load_failure_policy="fail"
        )
        request = engine.add_one(prompt(1600))
        other = engine.add_one(prompt(40, 3), max_tokens=2)
        engine.step()
        assert engine.finish_reason_of(request) is FinishReason.ERROR
        (output,) = engine.outputs[request.request_id, 0]
        assert output.error.kind == "internal"
        cached = [engine.kv_cache.is_cached(each) for each in request.block_hashes]
        assert cached == [True] * 50 + [False] * 50
        finish(engine)
        assert engine.tokens_of(other) == undisturbed(other.prompt_token_ids, 2)
        engine.assert_idle()

    def test_asynchronous_recompute_waits_for_the_end_of_the_load(self):
        """KVC-24: an early report reduces the valid tokens; the request runs after the load."""
        engine = engine_with(always(99 * 16, is_async=True))
        request = engine.add_one(prompt(1600), max_tokens=3)
        engine.step()
        load = engine.connector.under_way[request.seq_id]
        load.bad = {load.tables[0][50]}
        engine.report(KVConnectorOutput(invalid_block_ids=sorted(load.bad)))
        assert request.status is WAITS
        assert request.num_computed_tokens == 50 * 16
        assert num_hashed(engine, request) == 0
        engine.finish_load(request)
        assert num_hashed(engine, request) == 50
        assert scheduled(engine.step()) == {request.seq_id: 1600 - 800}
        finish(engine)
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 3)

    @pytest.mark.parametrize("lost", [(0, 98), (50, 98), (98,)])
    def test_other_requests_keep_their_loaded_blocks(self, lost):
        """KVC-25; a failed load is not requested again."""
        engine = engine_with(always(99 * 16, is_async=True))
        requests = [engine.add_one(prompt(1600, seed), max_tokens=2) for seed in range(3)]
        engine.step()
        load = engine.connector.under_way[requests[1].seq_id]
        load.bad = {load.tables[0][index] for index in lost}
        for each in requests:
            engine.finish_load(each)
        kept = [each.num_computed_tokens for each in requests]
        assert kept == [99 * 16, min(lost) * 16, 99 * 16]
        finish(engine)
        assert len(engine.connector.asked) == 3
        for each in requests:
            assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 2)

    def test_every_request_sharing_an_invalid_block_recomputes_it(self):
        """KVC-27: a cache hit after the load, whose failure is reported later."""
        engine = engine_with(always(50 * 16, is_async=False))
        first = engine.add_one(prompt(1600), max_tokens=8)
        engine.step()
        engine.connector.answer = lambda request, num_local: NO_MATCH
        second = engine.add_one(prompt(960) + prompt(640, 9), max_tokens=8)
        engine.step()
        (table,) = engine.kv_cache.block_ids(first.seq_id)
        assert engine.kv_cache.block_ids(second.seq_id)[0][:60] == table[:60]
        engine.report(KVConnectorOutput(invalid_block_ids=[table[30]]))
        assert first.num_computed_tokens == second.num_computed_tokens == 30 * 16
        assert not engine.kv_cache.is_cached(first.block_hashes[30])
        finish(engine)
        engine.assert_idle()

    @pytest.mark.parametrize("order", [(0, 50, 98), (98, 50, 0), (50, 98, 0)])
    def test_successive_load_failures_are_each_recomputed(self, order):
        """KVC-28: the valid tokens end at the first invalid block so far."""
        engine = engine_with(always(99 * 16, is_async=True))
        request = engine.add_one(prompt(1600), max_tokens=2)
        engine.step()
        load, least = engine.connector.under_way[request.seq_id], 99
        for index in order:
            block, least = load.tables[0][index], min(least, index)
            load.bad.add(block)
            engine.report(KVConnectorOutput(invalid_block_ids=[block]))
            assert request.num_computed_tokens == least * 16
        finish(engine)
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 2)

    @pytest.mark.parametrize("is_async", [False, True])
    def test_with_windows_all_is_computed(self, is_async):
        """KVC-29: window blocks that a shorter prefix needs may be freed already."""
        engine = engine_with(
            always(320, is_async=is_async), fails=losing(3), windows=(None, 40), num_blocks=400
        )
        request = engine.add_one(prompt(400), max_tokens=4)
        finish(engine)
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 4)
        engine.assert_idle()

    def test_policy_fail_ends_a_waiting_request_and_keeps_its_blocks(self):
        """KVH-04."""
        engine = engine_with(always(32, is_async=True), load_failure_policy="fail")
        free = num_free(engine)
        request = engine.add_one(prompt(40))
        engine.step()
        load = engine.connector.under_way[request.seq_id]
        engine.report(KVConnectorOutput(invalid_block_ids=[load.tables[0][1]]))
        assert request.status is RequestStatus.FINISHED_ERROR
        assert engine.finish_reason_of(request) is FinishReason.ERROR
        assert len(engine.scheduler.waiting) == 0
        assert num_free(engine) == free - 2
        engine.finish_load(request)
        assert num_free(engine) == free

    def test_a_load_failure_of_a_request_preempted_since(self):
        """The token of that step was computed from missing KV, so it is dropped."""
        engine = engine_with(
            always(32, is_async=False), fails=losing(1), async_scheduling=True, num_blocks=12
        )
        request = engine.add_one(prompt(40), max_tokens=4)
        engine.send()
        engine.scheduler.reset_prefix_cache(preempting=True)
        assert request.status is RequestStatus.PREEMPTED
        engine.collect(engine.in_flight.popleft())
        assert engine.tokens_of(request) == []
        finish(engine)
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 4)
