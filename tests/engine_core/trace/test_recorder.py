"""The lines of a trace, compared with the state of the scheduler."""

import msgspec
import pytest

from proto.errors import ProtocolError
from proto.messages.sched_trace import (
    Arrival,
    Event,
    Finish,
    PoolUse,
    Result,
    Step,
    TraceHeader,
    read_line,
)
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.traced_engine import BUDGET, SEATS, TracedEngine, random_load

SECRET = 877
"""A token id that no prompt contains."""


def test_one_request_from_its_arrival_to_its_end() -> None:
    engine = TracedEngine()
    engine.clock.now = 1.5
    request = engine.harness.add_one([5] * 40, 3, arrival_time=1.25, tenant=9)
    engine.finish()
    (arrival,), (finish,) = engine.of(Arrival), engine.of(Finish)
    assert (arrival.seq_id, arrival.tenant) == (request.seq_id, 9)
    assert (arrival.time_us, arrival.arrived_us) == (1_500_000, 1_250_000)
    assert (arrival.num_prompt_tokens, arrival.max_tokens) == (40, 3)
    assert arrival.blocks.num_new == 2
    steps, results = engine.of(Step), engine.of(Result)
    assert [each.step for each in steps[:3]] == [each.step for each in results[:3]] == [1, 2, 3]
    first = steps[0]
    assert (first.snapshot.waiting, first.snapshot.running) == (1, 0)
    assert (first.snapshot.token_budget, first.snapshot.seats) == (BUDGET, SEATS)
    assert (first.decision.new, first.decision.new_tokens) == ([request.seq_id], [40])
    assert (first.decision.num_tokens, first.decision.context_tokens) == (40, 40)
    second = steps[1]
    assert (second.decision.running, second.decision.running_tokens) == ([request.seq_id], [])
    assert second.decision.context_tokens == 41
    assert results[0].first == [request.seq_id]
    assert results[1].first == []
    assert (finish.reason, finish.num_output_tokens) == ("length", 3)


def test_pool_use_and_cache_hits() -> None:
    engine = TracedEngine(num_blocks=11)
    engine.harness.add_one([5] * 40, 2)
    engine.finish()
    engine.harness.add_one([5] * 40, 2)
    engine.finish()
    second = next(each for each in engine.of(Step) if each.decision.hits and each.step > 1)
    assert second.snapshot.pool == PoolUse(free=8, cached=2, requests=0)
    (hit,) = second.decision.hits
    assert (hit.local_tokens, hit.external_tokens, hit.num_tokens) == (32, 0, 40)
    assert engine.of(Finish)[1].num_cached_tokens == 32
    for each in engine.of(Step):
        pool = each.snapshot.pool
        assert pool.free + pool.cached + pool.requests == 10


def test_externally_loaded_tokens_are_counted_separately_and_once() -> None:
    engine = TracedEngine()
    for number, is_async in enumerate((None, True, False)):
        request = engine.harness.add_one([5] * 40, 2)
        if is_async is not None:
            engine.recorder.on_external_hit(request, 16, "Disk", is_async=is_async)
        engine.finish()
        assert len(engine.of(Finish)) == number + 1
    hits = [hit for each in engine.of(Step) for hit in each.decision.hits]
    found = [(each.local_tokens, each.external_tokens, each.connector) for each in hits]
    assert found == [(0, 0, ""), (16, 16, "Disk"), (16, 16, "Disk")]
    assert [each.asynchronous for each in hits] == [False, True, False]


def test_queues_by_status_preemptions_and_resumptions() -> None:
    engine = TracedEngine(num_blocks=16)
    for seed in range(6):
        engine.harness.add_one([seed] * 60, 60)
    engine.finish()
    steps = engine.of(Step)
    preempted = [seq_id for each in steps for seq_id in each.decision.preempted]
    resumed = [seq_id for each in steps for seq_id in each.decision.resumed]
    assert preempted
    assert sorted(preempted) == sorted(resumed)
    back = set()
    for each in steps:
        assert each.snapshot.preempted == len(back)
        back |= set(each.decision.preempted)
        back -= set(each.decision.resumed)
    by_seq_id = {each.seq_id: each.num_preemptions for each in engine.of(Finish)}
    assert by_seq_id == {each: preempted.count(each) for each in by_seq_id}


def test_waiting_requests_are_counted_by_reason() -> None:
    """No request starts during a pause."""
    engine = TracedEngine()
    engine.harness.add_one([3] * 30, 9)
    engine.step()
    engine.harness.scheduler.pause("finish_running")
    for seed in range(2):
        engine.harness.add_one([seed] * 30, 2)
    engine.step()
    engine.step()
    engine.harness.scheduler.resume()
    engine.finish()
    counts = [(each.snapshot.waiting, each.snapshot.blocked) for each in engine.of(Step)]
    assert counts[:4] == [(1, {}), (2, {}), (0, {"resume": 2}), (2, {})]
    assert counts[-1][1] == {}


def test_every_finish_is_recorded_once_with_its_reason() -> None:
    for seed in range(4):
        engine = TracedEngine()
        random_load(seed, engine)
        arrivals = [each.seq_id for each in engine.of(Arrival)]
        ends = [each.seq_id for each in engine.of(Finish)]
        assert sorted(arrivals) == sorted(ends)
        assert (
            {"length"}
            < {each.reason for each in engine.of(Finish)}
            <= {
                "abort",
                "length",
                "stop",
            }
        )
        decided = sum(each.decision.num_tokens for each in engine.of(Step))
        assert decided == sum(
            sum(each.decision.new_tokens)
            + sum(each.decision.resumed_tokens)
            + (sum(each.decision.running_tokens) or len(each.decision.running))
            for each in engine.of(Step)
        )


def test_what_happens_between_steps() -> None:
    engine = TracedEngine()
    engine.harness.add_one([1] * 40, 8)
    engine.step()
    scheduler = engine.harness.scheduler
    scheduler.pause("freeze")
    scheduler.resume()
    engine.harness.lose_workers()
    engine.step()
    scheduler.reset_prefix_cache(preempting=True)
    engine.finish()
    events = [(each.what, each.detail) for each in engine.of(Event)]
    assert events == [
        ("pause", "freeze"),
        ("resume", ""),
        ("restart", "workers of epoch 2"),
        ("reset", "preempting"),
    ]
    after = [each for each in engine.of(Step) if each.snapshot.preempted]
    assert after, "it was queued again"
    assert engine.of(Step)[-1].snapshot.preempted == 0


def test_the_trace_contains_no_token_and_no_hash() -> None:
    engine = TracedEngine()
    request = engine.harness.add_one([SECRET] * 64, 4)
    engine.finish()
    text = engine.content.decode()
    assert str(SECRET) not in text
    for each in request.block_hashes:
        assert each.hex()[:8] not in text


def test_lines_survive_their_json_form_and_other_versions_do_not() -> None:
    engine = TracedEngine()
    random_load(1, engine)
    for line in engine.lines:
        assert read_line(msgspec.json.encode(line)) == line
    other = msgspec.structs.replace(engine.header, version=99)
    with pytest.raises(ProtocolError, match="version 99"):
        read_line(msgspec.json.encode(other))
    grown = msgspec.json.encode(engine.header)[:-1] + b',"later":1}'
    assert isinstance(read_line(grown), TraceHeader)


def test_drafts_are_among_the_tokens_of_running_sequences() -> None:
    engine = TracedEngine(drafting=SyntheticDrafts(1.0))
    request = engine.harness.add_one([5] * 20, 12, ignore_eos=True)
    engine.finish()
    decisions = [each.decision for each in engine.of(Step) if each.decision.drafted]
    assert decisions
    for decision in decisions:
        assert decision.drafted == [request.seq_id]
        assert decision.running_tokens == [1 + decision.draft_tokens[0]]
    assert sum(each.num_tokens for each in engine.of(Result)) == 12


def test_lookahead_is_in_the_decision_of_its_step() -> None:
    engine = TracedEngine(drafting=SyntheticDrafts(1.0, has_draft_model=True))
    request = engine.harness.add_one([5] * 20, 30, ignore_eos=True)
    engine.finish()
    decisions = [each.decision for each in engine.of(Step) if each.decision.lookahead]
    assert decisions
    for decision in decisions:
        assert decision.lookahead == [request.seq_id]
        assert decision.lookahead_tokens[0] > 0
