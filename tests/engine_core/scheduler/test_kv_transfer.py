"""The scheduler's side of the KV connector's contract: queries, notifications, waits.

Names follow the methods of the contract. The harness's runner detects reads of KV that is not
loaded.
"""

import json

import pytest

from engine_core.kv_cache.integrity import check
from engine_core.kv_connector.base import NO_MATCH, NOT_KNOWN_YET, Match
from engine_core.request import RequestStatus
from proto.messages.engine_io import FinishReason
from proto.messages.kv_connector import KVConnectorOutput
from tests.engine_core.scheduler.external_kv import (
    WAITS,
    engine_with,
    finish,
    num_free,
    num_hashed,
    prompt,
)
from tests.fakes.engine_harness import scheduled
from tests.fakes.kv_connector import always
from tests.fakes.paged_runner import undisturbed

RULES = [{"watermark": 0.5}, {"stop_admission_above": 0.5, "preempt_above": 0.5}]


@pytest.mark.parametrize("rule", RULES)
def test_admission_rules_apply_to_loads(rule):
    """Of 12 blocks one request runs in 2; a load of 5 would leave fewer free than the rule asks."""

    def answer(request, num_local):
        return Match(80, is_async=True) if request.num_prompt_tokens > 80 else NO_MATCH

    engine = engine_with(answer, num_blocks=13, **rule)
    engine.add_one(prompt(20), max_tokens=6)
    engine.step()
    loads = engine.add_one(prompt(90, 1), max_tokens=2)
    engine.step()
    assert loads.status is not WAITS
    assert not engine.connector.under_way
    finish(engine)
    assert engine.tokens_of(loads) == undisturbed(loads.prompt_token_ids, 2)
    engine.assert_idle()


class TestGetNumNewMatchedTokens:
    @pytest.mark.parametrize("is_async", [False, True])
    def test_matched_tokens_are_not_computed(self, is_async):
        """KVC-01: the connector has 32 of 64 tokens; each request computes the other 32."""
        engine = engine_with(always(32, is_async=is_async))
        free = num_free(engine)
        requests = [engine.add_one(prompt(64, seed), max_tokens=2) for seed in (1, 2)]
        output = engine.step()
        if is_async:
            assert output.total_num_scheduled_tokens == 0
            for each in requests:
                engine.finish_load(each)
            output = engine.step()
        assert scheduled(output) == {each.seq_id: 32 for each in requests}
        assert engine.connector.metas[0] == 2
        assert num_free(engine) == free - 8
        assert [num_hashed(engine, each) for each in requests] == [4, 4]
        finish(engine)
        assert sum(engine.connector.metas) == 2, "decode steps load nothing"
        assert num_free(engine) == free
        for each in requests:
            assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 2)
        engine.assert_idle()

    def test_the_connector_is_queried_for_tokens_missing_on_the_device(self):
        """KVC-03: 64 tokens are in the pool, 32 more in the connector: 32 of 128 are computed."""
        engine = engine_with(lambda request, num_local: NO_MATCH)
        first = engine.add_one(prompt(64), max_tokens=2)
        finish(engine)
        engine.connector.answer = lambda request, num_local: Match(32, is_async=False)
        second = engine.add_one(prompt(64) + prompt(64, 5), max_tokens=2)
        output = engine.step()
        assert engine.connector.asked[-1] == (second.seq_id, 64)
        assert scheduled(output) == {second.seq_id: 32}
        finish(engine)
        assert first.seq_id == engine.connector.asked[0][0]
        assert engine.tokens_of(second) == undisturbed(second.prompt_token_ids, 2)

    def test_none_makes_the_scheduler_ask_again(self):
        """KVH-09: the request is blocked, later ones pass it, and a notification unblocks it."""
        answers = {}
        engine = engine_with(lambda request, num_local: answers[request.seq_id])
        first, second = engine.add_one(prompt(40, 1)), engine.add_one(prompt(40, 2))
        answers.update({first.seq_id: NOT_KNOWN_YET, second.seq_id: NO_MATCH})
        assert scheduled(engine.step()) == {second.seq_id: 40}
        assert first.status is WAITS
        engine.step()
        assert engine.connector.asked.count((first.seq_id, 0)) == 1, (
            "no query before the notification"
        )
        answers[first.seq_id] = Match(16, is_async=False)
        engine.unblock(first)
        assert scheduled(engine.step())[first.seq_id] == 24
        finish(engine)
        assert engine.tokens_of(first) == undisturbed(first.prompt_token_ids, 16)

    def test_unblocking_a_request_that_does_not_wait_does_nothing(self):
        engine = engine_with(lambda request, num_local: NO_MATCH)
        request = engine.add_one(prompt(40))
        engine.step()
        engine.unblock(request)
        assert request.status is RequestStatus.RUNNING
        finish(engine)

    @pytest.mark.parametrize("is_async", [False, True])
    def test_one_token_is_left_to_compute(self, is_async):
        """KVC-16, KVH-09: a prompt of two blocks, all of it in the connector."""
        engine = engine_with(always(32, is_async=is_async))
        request = engine.add_one(prompt(32), max_tokens=2)
        output = engine.step()
        if is_async:
            engine.finish_load(request)
            assert request.num_computed_tokens == 31
            output = engine.step()
        assert scheduled(output) == {request.seq_id: 1}
        assert output.new_requests[0].num_computed_tokens == 31
        assert [len(table) for table in output.new_requests[0].block_ids] == [2]
        finish(engine)
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 2)

    def test_the_connector_is_not_queried_with_prompt_logprobs(self):
        engine = engine_with(always(32, is_async=False))
        request = engine.add_one(prompt(64), max_tokens=1, prompt_logprobs=1)
        assert scheduled(engine.step()) == {request.seq_id: 64}
        assert engine.connector.asked == []

    def test_external_prefix_cache_stats(self):
        """KVC-04: queries and hits in tokens, of requests and not of tries."""
        engine = engine_with(always(4, is_async=False), block_size=4, enable_prefix_caching=False)
        for seed in (1, 2):
            engine.add_one(prompt(8, seed), max_tokens=1)
        engine.step()
        stats = engine.scheduler.pop_stats()
        assert stats.external_prefix_cache_queries == 16
        assert stats.external_prefix_cache_hits == 8
        assert stats.num_preemptions == 0
        again = engine.scheduler.pop_stats()
        assert again.external_prefix_cache_queries == again.external_prefix_cache_hits == 0

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_load_without_free_blocks_waits(self, is_async):
        """KVC-05: 9 blocks of 4, two prompts of 24 tokens: one runs, the other does later."""
        engine = engine_with(always(8, is_async=is_async), block_size=4, num_blocks=10)
        first, second = (engine.add_one(prompt(24, seed), max_tokens=2) for seed in (1, 2))
        output = engine.step()
        if is_async:
            assert list(engine.connector.under_way) == [first.seq_id]
            engine.finish_load(first)
            output = engine.step()
        assert scheduled(output) == {first.seq_id: 16}
        assert second.status is RequestStatus.WAITING
        finish(engine)
        assert engine.tokens_of(second) == undisturbed(second.prompt_token_ids, 2)
        engine.assert_idle()


class TestWaitingForRemoteKvs:
    def test_blocks_being_loaded_are_not_findable(self):
        """KVC-13: nothing is computed, nothing is hashed, until the load is reported."""
        engine = engine_with(always(32, is_async=True))
        request = engine.add_one(prompt(40), max_tokens=1)
        output = engine.step()
        assert output.total_num_scheduled_tokens == 0
        assert output.connector_metadata
        assert request.status is WAITS
        assert len(engine.kv_cache.block_ids(request.seq_id)[0]) == 2
        assert num_hashed(engine, request) == 0
        assert len(engine.kv_cache.pool.index) == 0
        engine.finish_load(request)
        assert num_hashed(engine, request) == 2
        assert scheduled(engine.step()) == {request.seq_id: 8}
        finish(engine)
        engine.assert_idle()

    def test_an_equal_prompt_does_not_hit_blocks_being_loaded(self):
        """KVC-15: a request that computes meanwhile has its own blocks."""
        answers = {}
        engine = engine_with(lambda request, num_local: answers.get(request.seq_id, NO_MATCH))
        remote = engine.add_one(prompt(40), max_tokens=3)
        answers[remote.seq_id] = Match(32, is_async=True)
        engine.step()
        local = engine.add_one(prompt(40), max_tokens=3)
        assert scheduled(engine.step()) == {local.seq_id: 40}
        theirs, ours = (engine.kv_cache.block_ids(each.seq_id)[0] for each in (remote, local))
        assert not set(theirs) & set(ours)
        assert num_hashed(engine, remote) == 0
        assert num_hashed(engine, local) == 2
        finish(engine)
        assert engine.tokens_of(remote) == engine.tokens_of(local)

    def test_other_requests_are_admitted_before_a_waiting_one(self):
        engine = engine_with(
            lambda request, num_local: Match(16 if len(request.prompt_token_ids) == 40 else 0, True)
        )
        engine.add_one(prompt(40))
        short = engine.add_one(prompt(20, 3))
        assert scheduled(engine.step()) == {short.seq_id: 20}

    def test_loads_reserve_what_the_rest_of_the_prompt_takes(self):
        """KVC-11: of 9 blocks A needs 8 and B 5; B holds none before A runs."""
        engine = engine_with(always(64, is_async=True), num_blocks=10)
        first, second = engine.add_one(prompt(120, 1)), engine.add_one(prompt(80, 2))
        engine.step()
        assert first.num_computed_tokens == 64
        assert second.status is RequestStatus.WAITING
        assert engine.kv_cache.block_ids(second.seq_id) == [[]]
        engine.finish_load(first)
        assert scheduled(engine.step()) == {first.seq_id: 56}
        finish(engine)
        assert second.num_preemptions == 0
        assert engine.tokens_of(second) == undisturbed(second.prompt_token_ids, 16)

    def test_a_loaded_request_can_be_preempted_and_resumed(self):
        """KVC-17: five blocks for two requests; the last one is preempted and resumes."""
        answers = {}
        engine = engine_with(
            lambda request, num_local: answers.get(request.seq_id, NO_MATCH), num_blocks=6
        )
        local = engine.add_one(prompt(32, 1), max_tokens=20)
        remote = engine.add_one(prompt(32, 2), max_tokens=20)
        answers[remote.seq_id] = Match(32, is_async=True)
        finish(engine)
        assert remote.num_preemptions + local.num_preemptions > 0
        for each in (local, remote):
            assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 20)
        engine.assert_idle()

    def test_a_pause_lets_loads_end(self):
        engine = engine_with(always(32, is_async=True))
        request = engine.add_one(prompt(40), max_tokens=2)
        engine.step()
        engine.scheduler.pause("freeze")
        engine.finish_load(request)
        assert not engine.scheduler.has_work
        engine.scheduler.resume()
        finish(engine)
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 2)

    def test_loaded_choices_are_not_forked(self):
        engine = engine_with(always(32, is_async=True))
        choices = engine.add(prompt(40), 4, n=3)
        finish(engine)
        for each in choices:
            assert engine.tokens_of(each) == undisturbed(prompt(40), 4, each.choice)
        engine.assert_idle()


class TestAborts:
    def test_blocks_stay_until_the_load_ends(self):
        """KVC-07: aborted during its load."""
        engine = engine_with(always(32, is_async=True))
        free = num_free(engine)
        request = engine.add_one(prompt(40))
        engine.step()
        engine.scheduler.abort_request(request.request_id)
        assert engine.scheduler.num_unfinished == 0
        assert num_free(engine) == free - 2
        assert check(engine.kv_cache) == []
        engine.finish_load(request)
        assert num_free(engine) == free
        assert engine.kv_cache.transfer_refs.num_blocks == 0
        assert len(engine.kv_cache.pool.index) == 0, "the block is not confirmed"
        engine.step()
        engine.assert_idle()

    def test_an_abort_after_the_load_frees_at_once(self):
        """KVC-08."""
        engine = engine_with(always(32, is_async=True))
        free = num_free(engine)
        request = engine.add_one(prompt(40))
        engine.step()
        engine.finish_load(request)
        engine.scheduler.abort_request(request.request_id)
        assert num_free(engine) == free
        assert engine.kv_cache.transfer_refs.num_blocks == 0

    def test_a_signal_after_the_load_is_ignored(self):
        """Row 24: reports of unknown seq_ids, or repeated reports."""
        engine = engine_with(always(32, is_async=True))
        request = engine.add_one(prompt(40), max_tokens=2)
        engine.step()
        engine.finish_load(request)
        late = KVConnectorOutput([77], [request.seq_id, 78], [])
        engine.report(late)
        finish(engine)
        engine.report(late)
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 2)
        engine.assert_idle()

    def test_a_request_waiting_for_the_connector_can_be_aborted(self):
        engine = engine_with(lambda request, num_local: NOT_KNOWN_YET)
        request = engine.add_one(prompt(40))
        engine.step()
        engine.scheduler.abort_request(request.request_id)
        engine.unblock(request)
        engine.assert_idle()


class TestRequestFinished:
    def test_request_finished_is_called_once_per_request(self):
        engine = engine_with(always(16, is_async=False))
        ended = engine.add_one(prompt(40, 1), max_tokens=2)
        waits = engine.add_one(prompt(40, 2))
        engine.scheduler.abort_request(waits.request_id)
        finish(engine)
        assert sorted(engine.connector.finished) == sorted([ended.seq_id, waits.seq_id])

    def test_delayed_blocks_stay_until_finished_sending(self):
        """KVC-09, KVC-19, KVH-10."""
        engine = engine_with(always(0, is_async=False), delays=lambda request: True)
        free = num_free(engine)
        request = engine.add_one(prompt(40), max_tokens=1)
        engine.step()
        assert engine.finish_reason_of(request) is FinishReason.LENGTH
        (blocks,) = json.loads(request.kv_transfer_params)["remote_block_ids"]
        assert len(blocks) == 3, "the one in which the prompt ends among them (KVC-20)"
        assert num_free(engine) == free - 3
        assert engine.scheduler.kv_transfer.is_awaited
        assert check(engine.kv_cache) == []
        engine.step()
        engine.report(engine.connector.sent(request.seq_id))
        assert num_free(engine) == free
        engine.assert_idle()

    def test_blocks_being_sent_are_findable(self):
        engine = engine_with(always(0, is_async=False), delays=lambda request: True)
        first = engine.add_one(prompt(40), max_tokens=1)
        engine.step()
        second = engine.add_one(prompt(40), max_tokens=1)
        assert scheduled(engine.step()) == {second.seq_id: 8}
        for each in (first, second):
            engine.report(engine.connector.sent(each.seq_id))
        engine.step()
        engine.assert_idle()


class TestUpdateStateAfterAlloc:
    def test_a_request_without_external_tokens_is_reported_with_zero(self):
        engine = engine_with(lambda request, num_local: NO_MATCH)
        request = engine.add_one(prompt(40))
        engine.step()
        assert engine.connector.allocated == [(request.seq_id, 0)]

    def test_an_asynchronous_load_is_reported_once(self):
        engine = engine_with(always(32, is_async=True))
        request = engine.add_one(prompt(40), max_tokens=2)
        finish(engine)
        assert engine.connector.allocated == [(request.seq_id, 32), (request.seq_id, 0)]


class TestBuildConnectorMeta:
    def test_build_connector_meta_is_called_once_per_step(self):
        engine = engine_with(always(32, is_async=True))
        engine.add_one(prompt(40), max_tokens=4)
        finish(engine)
        assert len(engine.connector.metas) == engine.scheduler.step

    def test_a_step_that_only_loads_goes_to_the_workers(self):
        engine = engine_with(always(32, is_async=True))
        engine.add_one(prompt(40))
        output = engine.send()
        assert (output.total_num_scheduled_tokens, output.connector_metadata) == (0, b"loads")


class TestStartOver:
    def test_loads_and_kept_blocks_are_dropped(self):
        """A death during transfers: everything in flight is forgotten, and computed again."""
        engine = engine_with(
            lambda request, num_local: Match(32, True) if request.choice == 0 else NOT_KNOWN_YET,
            delays=lambda request: True,
        )
        over = engine.add_one(prompt(40, 1), max_tokens=1)
        engine.step()
        engine.finish_load(over)
        engine.step()
        loading, gone = engine.add_one(prompt(40, 2), max_tokens=2), engine.add_one(prompt(40, 3))
        engine.step()
        engine.scheduler.abort_request(gone.request_id)
        assert engine.kv_cache.transfer_refs.num_blocks > 0
        engine.lose_workers()
        assert engine.connector.num_epochs == 2
        assert engine.kv_cache.usage == 0
        assert engine.kv_cache.transfer_refs.num_blocks == 0
        finish(engine)
        assert engine.tokens_of(loading) == undisturbed(loading.prompt_token_ids, 2)
        for seq_id in list(engine.connector.sending):
            engine.report(engine.connector.sent(seq_id))
        engine.assert_idle()

    def test_references_of_the_connector_are_released(self):
        engine = engine_with(lambda request, num_local: NO_MATCH)
        request = engine.add_one(prompt(40), max_tokens=3)
        engine.step()
        (table,) = engine.kv_cache.block_ids(request.seq_id)
        engine.transfer_refs.hold(table)
        finish(engine)
        assert num_free(engine) == engine.kv_cache.num_usable_blocks - len(table)
        assert check(engine.kv_cache) == []
        engine.lose_workers()
        assert engine.kv_cache.usage == 0


class TestReset:
    def test_blocks_held_by_the_connector_are_no_unfinished_work(self):
        engine = engine_with(lambda request, num_local: NO_MATCH, delays=lambda request: True)
        request = engine.add_one(prompt(40), max_tokens=1)
        engine.step()
        engine.step()
        assert engine.scheduler.reset_prefix_cache()
        assert len(engine.kv_cache.pool.index) == 0
        engine.report(engine.connector.sent(request.seq_id))
        engine.assert_idle()

    def test_a_forced_reset_drops_loads_and_running_requests(self):
        engine = engine_with(always(32, is_async=True))
        request = engine.add_one(prompt(40), max_tokens=3)
        engine.step()
        assert not engine.scheduler.reset_prefix_cache()
        assert engine.scheduler.reset_prefix_cache(preempting=True)
        engine.step()
        assert engine.connector.asked == [(request.seq_id, 0)], "not two loads of the same blocks"
        engine.finish_load(request)
        finish(engine)
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 3)
        engine.assert_idle()
