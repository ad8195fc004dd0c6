"""Rows of beam searches in the scheduler give the beams of the reference search."""

import random

import msgspec
import pytest

from engine_core.kv_cache.integrity import check
from engine_core.request import RequestStatus
from proto.errors import ProtocolError
from proto.messages.engine_io import FinishReason
from tests.engine_core.scheduler.plain_beams import add, expected, outputs
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.events import num_cached_tokens
from tests.fakes.paged_runner import undisturbed

WAITS = RequestStatus.WAITING_FOR_BEAMS
PROMPT = list(range(19))
CACHING = pytest.mark.parametrize("caching", [True, False])


def engine_of(caching=True, **settings):
    return EngineHarness(block_size=4, enable_prefix_caching=caching, **settings)


def blocks_in_use(engine):
    return engine.kv_cache.num_usable_blocks - engine.kv_cache.num_available_blocks


@CACHING
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_results_are_those_of_a_plain_search(width, overlapped, caching):
    engine = engine_of(caching, async_scheduling=overlapped)
    rows = add(engine, PROMPT, width, 12)
    engine.run()
    assert outputs(engine, rows) == expected(PROMPT, width, 12)
    assert {engine.finish_reason_of(row) for row in rows} == {FinishReason.LENGTH}
    engine.assert_idle()


@CACHING
def test_all_rows_share_what_they_have_in_common(caching):
    """The prompt fills four blocks and a part; each row has an end of its own."""
    engine = engine_of(caching)
    rows = add(engine, PROMPT, 3, 40)
    first = rows[0].seq_id
    assert scheduled(engine.step()) == {first: 19}
    output = engine.scheduler.schedule()
    assert scheduled(output) == dict.fromkeys([row.seq_id for row in rows], 1)
    assert len(output.block_copies) == 2 * 2
    assert output.cached_requests.forced_seq_ids == [first]
    assert blocks_in_use(engine) == 4 + 3
    engine.collect(output)
    for _ in range(30):
        engine.step()
        tables = [engine.kv_cache.block_ids(row.seq_id)[0] for row in rows]
        assert len({table[3] for table in tables}) == 1
        assert blocks_in_use(engine) == len({block for table in tables for block in table})
        assert check(engine.kv_cache) == []
    engine.run()
    computed = sum(step.total_num_scheduled_tokens for step in engine.runner.steps)
    assert computed == 19 + 3 * 39
    assert outputs(engine, rows) == expected(PROMPT, 3, 40)
    engine.assert_idle()


def test_rows_without_a_hypothesis_wait_for_the_first():
    engine = engine_of(long_prefill_token_threshold=8)
    rows = add(engine, PROMPT, 3)
    engine.step()
    assert [row.status for row in rows] == [RequestStatus.RUNNING, WAITS, WAITS]
    assert engine.scheduler.pop_stats().num_deferred == 2
    engine.run()
    assert outputs(engine, rows) == expected(PROMPT, 3)


def test_a_row_with_a_dropped_hypothesis_becomes_a_fork():
    """It stays in the running list and its prompt is not sent again."""
    engine = engine_of()
    rows = add(engine, PROMPT, 4, 30)
    engine.run()
    steps = engine.runner.steps[2:]
    assert sum(len(step.cached_requests.resumed_seq_ids) for step in steps) > 20
    assert sum(len(step.block_copies) for step in steps) > 20
    assert not any(step.preempted_seq_ids or step.new_requests for step in steps)
    assert outputs(engine, rows) == expected(PROMPT, 4, 30)


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"), [(0.0, False), (1.0, True), (-0.5, "never")]
)
def test_hypotheses_end_at_stop_tokens(length_penalty, early_stopping):
    params = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    stop_ids = list(range(0, 1000, 9))
    reasons = set()
    for start in range(6):
        prompt = list(range(start, start + 10))
        engine = engine_of()
        rows = add(
            engine, prompt, 3, 20, eos_token_ids=(0,), stop_token_ids=tuple(stop_ids[1:]), **params
        )
        engine.run()
        results = outputs(engine, rows)
        assert results == expected(prompt, 3, 20, stop_ids, **params)
        for row, tokens in zip(rows, results, strict=True):
            (final,) = engine.outputs[row.request_id, row.choice]
            stopped = tokens[-1] in stop_ids
            assert final.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert final.stop_reason == (tokens[-1] if stopped and tokens[-1] else None)
            assert num_cached_tokens(final) == 0
            reasons.add(final.finish_reason)
        engine.assert_idle()
    assert FinishReason.STOP in reasons


def test_one_token_needs_one_round():
    engine = engine_of()
    rows = add(engine, PROMPT, 3, 1)
    engine.step()
    assert outputs(engine, rows) == expected(PROMPT, 3, 1)
    engine.step()
    engine.assert_idle()


def test_a_prompt_of_one_token():
    engine = engine_of()
    rows = add(engine, [7], 3)
    engine.run()
    assert outputs(engine, rows) == expected([7], 3)


@CACHING
def test_other_requests_run_beside_beam_search(caching):
    engine = engine_of(caching, max_num_batched_tokens=16)
    before = engine.add_one([500, 501], max_tokens=20)
    rows = add(engine, PROMPT, 3, 10)
    others = add(engine, [*PROMPT, 77], 2, 10)
    after = engine.add(PROMPT, max_tokens=9, n=2)
    engine.run()
    assert engine.tokens_of(before) == undisturbed([500, 501], 20)
    assert outputs(engine, rows) == expected(PROMPT, 3, 10)
    assert outputs(engine, others) == expected([*PROMPT, 77], 2, 10)
    for each in after:
        assert engine.tokens_of(each) == undisturbed(PROMPT, 9, each.choice)
    engine.assert_idle()


@CACHING
@pytest.mark.parametrize("num_rounds", [0, 1, 2, 5])
def test_an_abort_frees_all(num_rounds, caching):
    engine = engine_of(caching)
    rows = add(engine, PROMPT, 4, 20)
    for _ in range(num_rounds):
        engine.step()
    assert engine.scheduler.abort_request(rows[0].request_id) == 4
    engine.run()
    engine.assert_idle()
    assert engine.final == {}


def test_aborting_one_beam_aborts_the_search():
    engine = engine_of()
    rows = add(engine, PROMPT, 3)
    engine.step()
    assert engine.scheduler.abort_request(rows[0].request_id, 1) == 3
    engine.run()
    engine.assert_idle()


def test_an_abort_while_a_step_computes():
    engine = engine_of()
    rows = add(engine, PROMPT, 3)
    for _ in range(3):
        engine.step()
    output = engine.scheduler.schedule()
    engine.scheduler.abort_request(rows[0].request_id)
    engine.collect(output)
    engine.run()
    engine.assert_idle()


@CACHING
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_rows_change_nothing(policy, caching):
    engine = engine_of(caching, num_blocks=17, scheduling_policy=policy)
    old = engine.add_one(list(range(500, 520)), max_tokens=30)
    rows = add(engine, PROMPT, 3, 20)
    engine.run()
    assert sum(row.num_preemptions for row in rows) > 0
    assert engine.tokens_of(old) == undisturbed(list(range(500, 520)), 30)
    assert outputs(engine, rows) == expected(PROMPT, 3, 20)
    engine.assert_idle()


@CACHING
@pytest.mark.parametrize("settings", [{"num_blocks": 11}, {"max_num_seqs": 2}, {"max_num_seqs": 1}])
def test_rows_that_never_fit_together_run_alternately(settings, caching):
    """11 blocks fit one sequence of 39 tokens."""
    engine = engine_of(caching, **settings)
    rows = add(engine, PROMPT, 4, 20)
    engine.run()
    assert outputs(engine, rows) == expected(PROMPT, 4, 20)
    engine.assert_idle()


def test_two_searches_that_do_not_fit_together_do_not_wait_for_each_other():
    engine = engine_of(False, num_blocks=15, scheduling_policy="priority")
    low = add(engine, PROMPT, 3, 16, priority=1)
    for _ in range(4):
        engine.step()
    high = add(engine, [*PROMPT[:9], 70], 3, 16)
    engine.run()
    assert outputs(engine, low) == expected(PROMPT, 3, 16)
    assert outputs(engine, high) == expected([*PROMPT[:9], 70], 3, 16)
    engine.assert_idle()


def test_a_pause_lets_a_search_that_has_begun_end():
    engine = engine_of(max_num_batched_tokens=8)
    rows = add(engine, PROMPT, 3)
    engine.step()
    engine.scheduler.pause("finish_running")
    engine.run()
    assert outputs(engine, rows) == expected(PROMPT, 3)


@pytest.mark.parametrize("windows", [(6,), (None, 6), (9, None, 5)])
def test_groups_with_windows(windows):
    engine = engine_of(windows=windows)
    rows = add(engine, PROMPT, 3, 20)
    engine.run()
    assert outputs(engine, rows) == expected(PROMPT, 3, 20)
    engine.assert_idle()


def test_a_row_without_candidates_is_a_protocol_error():
    engine = engine_of()
    add(engine, PROMPT, 2)
    output = engine.scheduler.schedule()
    result = engine.runner.execute(output)
    result.candidates.clear()
    with pytest.raises(ProtocolError, match="0 tokens"):
        engine.scheduler.update_from_output(output, result)


def test_a_row_with_a_token_is_a_protocol_error():
    """The result is discarded; new workers compute the step, and all rows end."""
    engine = engine_of()
    rows = add(engine, PROMPT, 2)
    engine.send()
    output = engine.in_flight[0]
    result = engine.runner.execute(output)
    result.sampled_token_ids[:] = [[7]]
    with pytest.raises(ProtocolError, match="has a token instead of candidates"):
        engine.scheduler.update_from_output(output, result)
    engine.lose_workers()
    engine.run()
    assert outputs(engine, rows) == expected(PROMPT, 2)
    engine.assert_idle()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
def test_hypotheses_outlive_the_workers(num_steps, overlapped):
    engine = engine_of(async_scheduling=overlapped)
    rows = add(engine, PROMPT, 3, 12)
    for _ in range(num_steps):
        engine.step()
    engine.lose_workers()
    engine.run()
    assert outputs(engine, rows) == expected(PROMPT, 3, 12)
    engine.assert_idle()


def test_a_search_that_crashes_workers_again_and_again_ends_as_one():
    engine = engine_of(crashes_until_isolated=1)
    rows = add(engine, PROMPT, 3, 12)
    for _ in range(8):
        engine.send()
        engine.lose_workers()
    assert list(engine.final.values()) == [FinishReason.ERROR]
    assert not engine.scheduler.has_request(rows[0].request_id)
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("failed", [[0], [1], [2, 0], [0, 1, 2]])
def test_nonfinite_logits_of_a_row_end_the_search(failed, overlapped):
    engine = engine_of(async_scheduling=overlapped)
    rows = add(engine, PROMPT, 3, 20)
    other = engine.add_one([500, 501], max_tokens=9)
    for _ in range(6):
        engine.step()
    engine.send()
    while not (result := engine.runner.execute(engine.in_flight[0])).candidates:
        engine.record_outputs(
            engine.scheduler.update_from_output(engine.in_flight.popleft(), result)
        )
        engine.send()
    output = engine.in_flight.popleft()
    seq_ids = [rows[slot].seq_id for slot in failed]
    candidates = [each for each in result.candidates if each.seq_id not in seq_ids]
    result = msgspec.structs.replace(result, failed_seq_ids=seq_ids, candidates=candidates)
    engine.record_outputs(engine.scheduler.update_from_output(output, result))
    assert engine.final == {(rows[0].request_id, failed[0]): FinishReason.ERROR}
    engine.run()
    assert engine.tokens_of(other) == undisturbed([500, 501], 9)
    engine.assert_idle()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_request_sequences_keep_the_invariants(seed, overlapped):
    """Searches and other requests in small pools, some aborted, get their expected outputs.

    The requests belong to one, two or three tenants in turn.
    """
    draw = random.Random(seed)
    windows = draw.choice([(None,), (None,), (None, 6), (5, None, 14)])
    engine = engine_of(
        draw.random() < 0.6,
        num_blocks=draw.randrange(12, 40) * len(windows),
        windows=windows,
        max_model_len=40,
        max_num_seqs=draw.choice([1, 3, 8, 16]),
        max_num_batched_tokens=draw.choice([1, 5, 16, 64]),
        enable_chunked_prefill=draw.random() < 0.8,
        scheduling_policy=draw.choice(["fcfs", "priority"]),
        watermark=draw.choice([0.0, 0.0, 0.2]),
        async_scheduling=overlapped,
        crashes_until_isolated=1000,
    )
    wanted, aborted = {}, set()
    for _ in range(150):
        if draw.random() < 0.15 and len(wanted) < 50:
            prompt = [draw.choice([0, 100]) + each for each in range(draw.randrange(1, 25))]
            max_tokens, width = draw.randrange(1, 15), draw.randrange(1, 5)
            tenant = len(wanted) % (1 + seed % 3)
            if draw.random() < 0.6:
                priority = draw.randrange(3)
                rows = add(engine, prompt, width, max_tokens, priority=priority, tenant=tenant)
                results = expected(prompt, width, max_tokens)
            else:
                rows = engine.add(prompt, max_tokens, n=width, tenant=tenant, eos_token_ids=())
                results = [undisturbed(prompt, max_tokens, each.choice) for each in rows]
            wanted.update(zip(rows, results, strict=True))
        if draw.random() < 0.05 and wanted:
            request = draw.choice(list(wanted))
            engine.scheduler.abort_request(request.request_id)
            aborted.add(request.request_id)
        if draw.random() < 0.02:
            assert engine.scheduler.reset_prefix_cache(preempting=True)
        if draw.random() < 0.02:
            engine.lose_workers()
        waits = bool(engine.in_flight)
        if engine.step().total_num_scheduled_tokens == 0:
            assert waits or not engine.scheduler.has_work
        assert check(engine.kv_cache) == []
    engine.run()
    engine.assert_idle()
    for row, tokens in wanted.items():
        if row.request_id not in aborted:
            assert engine.tokens_of(row) == tokens


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_search_that_crashes_may_be_due_to_is_tried_with_all_its_rows(num_steps, overlapped):
    """No row progresses without the others."""
    engine = engine_of(async_scheduling=overlapped)
    rows = add(engine, PROMPT, 3)
    for _ in range(num_steps):
        engine.step()
    for epoch in range(2, 6):
        engine.send()
        engine.lose_workers(epoch)
    late = engine.add_one([9], 3)
    seq_ids = {row.seq_id for row in rows}
    while not engine.tokens_of(late):
        output = engine.step_with_progress()
        assert set(scheduled(output)) <= seq_ids or late.seq_id in scheduled(output)
    engine.run()
    assert outputs(engine, rows) == expected(PROMPT, 3)
    assert engine.tokens_of(late) == undisturbed([9], 3)
    engine.assert_idle()
