"""KV that agent sessions retain between turns: when, its effect on others, and the rule."""

import ast
import math
from pathlib import Path

import msgspec
import pytest

from engine_core.kv_cache.integrity import check
from engine_core.scheduler.features.retention import agent_sessions as sessions_module
from engine_core.scheduler.features.retention.ttl_rule import (
    ExpectedBenefitTTL,
    TTLDecision,
    by_client,
)
from engine_core.scheduler.preemption import SwapRule
from engine_core.trace.recorder import TraceRecorder
from proto.messages.engine_io import AgentHint
from proto.messages.sched_trace import MAX_PINS, Arrival, PinBegin, PinEnd, Step
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.images import encoder_limits, with_pictures

ROOT = Path(__file__).parents[3]


class Engine(EngineHarness):
    """Return a continuum engine of 40 usable blocks of 4 tokens on a fake clock."""

    def __init__(self, **config) -> None:
        self.clock = FakeClock()
        settings = {
            "num_blocks": 41,
            "block_size": 4,
            "max_model_len": 160,
            "scheduling_policy": "continuum",
            "pin_policy": "fixed",
            "max_pinned_share_per_tenant": 1.0,
            "clock": self.clock,
        }
        super().__init__(**{**settings, **config})
        self.retained = self.scheduler._retained_prefixes

    def turn(self, session, prompt, max_tokens=4, *, last=False, ttl_ms=None, **more):
        """Run a turn to its end."""
        agent = AgentHint(session, last, ttl_ms)
        request = self.add_one(prompt, max_tokens, agent=agent, **more)
        self.run()
        return request

    def pinned(self) -> dict[str, int]:
        return {prefix.agent_session: len(prefix.blocks) for prefix in self.retained}


def tokens(start: int, number: int) -> list[int]:
    return list(range(start, start + number))


def test_a_finished_turn_retains_its_full_blocks_for_the_next_one():
    engine = Engine()
    first = engine.turn("a", tokens(0, 20))
    assert engine.pinned() == {"a": 5}  # 23 computed tokens
    second = engine.turn("a", tokens(0, 20) + engine.tokens_of(first) + tokens(500, 8), last=True)
    assert second.num_cached_tokens == 20
    assert engine.pinned() == {}
    stats = engine.scheduler.pop_stats()
    assert (stats.num_pins_taken, stats.num_pins_hit) == (1, 1)
    engine.assert_idle()


@pytest.mark.parametrize(
    ("policy", "agent"),
    [
        ("fcfs", AgentHint("a")),
        ("priority", AgentHint("a")),
        ("continuum", AgentHint("a", is_last_step=True)),
        ("continuum", AgentHint("")),
    ],
)
def test_conditions_for_retaining_a_prefix(policy, agent):
    """Pins need the policy, an agent session, and a next turn."""
    engine = Engine(scheduling_policy=policy)
    engine.add_one(tokens(0, 20), 4, agent=agent)
    engine.run()
    engine.assert_idle()


def test_a_newer_turn_supersedes_the_pin_of_its_session():
    """One retained prefix an agent session; shared blocks are not lost in between."""
    engine = Engine()
    first = engine.turn("a", tokens(0, 20))
    both = engine.add([*tokens(0, 20), *engine.tokens_of(first)], 8, agent=AgentHint("a"))
    engine.run()
    assert engine.pinned() == {"a": 7}
    assert engine.retained.prefix_of("a").request_id == both[0].request_id
    assert engine.retained.num_blocks == 7
    assert check(engine.kv_cache) == []


def test_pins_are_swept_before_anything_is_allocated():
    engine = Engine()
    engine.turn("a", tokens(0, 80))
    engine.clock.now += 2.1
    engine.add_one(tokens(200, 100), 4)
    engine.send()
    assert engine.pinned() == {}
    stats = engine.scheduler.pop_stats()
    assert (stats.num_pins_expired, stats.num_pins_given_up) == (1, 0)


def test_a_turn_does_not_find_an_expired_pin():
    engine = Engine()
    engine.turn("a", tokens(0, 20))
    engine.clock.now += 2.1
    late = engine.add_one(tokens(0, 24), 4, agent=AgentHint("a"))
    assert not late.finds_retained_prefix
    engine.run()
    stats = engine.scheduler.pop_stats()
    assert (stats.num_pins_hit, stats.num_pins_expired) == (0, 1)


@pytest.mark.parametrize("parked", [False, True])
def test_a_waiting_turn_loses_its_lead_with_its_retained_prefix(parked):
    engine = Engine(max_num_seqs=1)
    first = engine.turn("young", tokens(0, 20), arrival_time=5.0)
    engine.add_one(tokens(300, 20), 40)
    engine.step()
    prompt = [*tokens(0, 20), *engine.tokens_of(first)]
    turn = engine.add_one(prompt, 4, agent=AgentHint("young"), arrival_time=20.0)
    older = engine.add_one(tokens(400, 20), 4, agent=AgentHint("old"), arrival_time=2.0)
    waiting = engine.scheduler.waiting
    assert list(waiting) == [turn, older]
    if parked:
        waiting.park_request(turn)
    engine.retained.release_prefix("young", "room")
    engine.step()
    assert list(waiting) == [older, turn]
    assert not turn.finds_retained_prefix
    if parked:
        waiting.unpark_request(turn)
    assert waiting.peek_request() is older


def test_a_waiting_turn_gets_the_lead_when_its_prefix_is_retained():
    """The other choice of the turn ends, and its blocks are kept for the next turn."""
    engine = Engine(max_num_seqs=1)
    chosen, other = engine.add(tokens(0, 20), 4, n=2, agent=AgentHint("young"), arrival_time=5.0)
    engine.step()
    older = engine.add_one(tokens(400, 20), 4, agent=AgentHint("old"), arrival_time=2.0)
    assert list(engine.scheduler.waiting) == [older, other]
    while not chosen.is_finished:
        engine.step()
    assert engine.pinned() == {"young": 5}
    engine.step()
    assert engine.scheduler.running == [other]
    assert list(engine.scheduler.waiting) == [older]
    engine.run()


@pytest.mark.parametrize("failed_turn", [0, 1])
def test_a_turn_found_to_be_corrupt_after_its_end_keeps_nothing(failed_turn):
    engine = Engine()
    turns = [engine.add_one(tokens(at, 20), 8, agent=AgentHint(str(at))) for at in (0, 100)]
    engine.step()
    output = engine.scheduler.schedule()
    for each in turns:
        engine.scheduler.abort_request(each.request_id, stopped=True)
    assert engine.pinned() == {"0": 5, "100": 5}
    result = engine.runner.execute(output)
    sampled = list(result.sampled_token_ids)
    sampled[failed_turn] = []
    seq_ids = [turns[failed_turn].seq_id]
    result = msgspec.structs.replace(result, failed_seq_ids=seq_ids, sampled_token_ids=sampled)
    engine.scheduler.update_from_output(output, result)
    assert engine.pinned() == {"100" if failed_turn == 0 else "0": 5}
    assert check(engine.kv_cache) == []


def test_the_trace_records_pins_and_counts_their_blocks():
    lines = []
    clock = FakeClock()
    recorder = TraceRecorder(lines.append, started_at=0.0, num_seats=8, clock=clock)
    engine = Engine(clock=clock, observer=recorder, observers=(recorder.block_counter,))
    first = engine.turn("a", tokens(0, 20))
    engine.scheduler.report_tool(first.request_id, "a", "shell")
    engine.turn("a", tokens(0, 20) + tokens(300, 4), last=True)
    arrivals = [each for each in lines if isinstance(each, Arrival)]
    assert [each.job for each in arrivals] == ["a", "a"]
    begins = [each for each in lines if isinstance(each, PinBegin)]
    assert [(each.job, each.num_blocks, each.ttl_us) for each in begins] == [
        ("a", 5, 2_000_000),
        ("a", 5, 2_000_000),
    ]
    assert [each.reason for each in lines if isinstance(each, PinEnd)] == ["next turn"]
    snapshots = [each.snapshot for each in lines if isinstance(each, Step)]
    pinned = next(each for each in snapshots if each.pins)
    assert (pinned.pins[0].job, pinned.pins[0].num_blocks, pinned.pool.pinned) == ("a", 5, 5)
    for each in snapshots:
        pool = each.pool
        assert pool.free + pool.cached + pool.requests + pool.held + pool.pinned == 40


def test_a_step_of_the_trace_lists_a_bounded_number_of_pins_and_counts_all():
    lines = []
    clock = FakeClock()
    recorder = TraceRecorder(lines.append, started_at=0.0, num_seats=8, clock=clock)
    engine = Engine(
        num_blocks=400, clock=clock, observer=recorder, observers=(recorder.block_counter,)
    )
    for each in range(MAX_PINS + 6):
        engine.turn(str(each), tokens(each, 4), 2)
    last = [each.snapshot for each in lines if isinstance(each, Step)][-1]
    assert len(last.pins) == MAX_PINS
    assert last.num_pins == len(engine.retained) == last.pool.pinned == MAX_PINS + 6
    assert [each.job for each in last.pins[:2]] == [str(MAX_PINS + 5), str(MAX_PINS + 4)]


def test_a_request_that_continues_a_session_is_preempted_last():
    """Even if it was admitted last."""
    engine = Engine(num_blocks=17, max_num_batched_tokens=64)
    first = engine.turn("a", tokens(0, 8))
    cold = engine.add_one(tokens(300, 16), 30)
    engine.step()
    prompt = [*tokens(0, 8), *engine.tokens_of(first)]
    warm = engine.add_one(prompt, 30, agent=AgentHint("a"))
    engine.run()
    assert cold.num_preemptions > 0
    assert warm.num_preemptions == 0


def test_no_more_is_scheduled_than_runs():
    """The assertion stays; the output builder's rows are the running requests."""
    engine = Engine(num_blocks=17, max_num_batched_tokens=64)
    for each in range(6):
        engine.add_one(tokens(100 * each, 12), 20, agent=AgentHint(f"{each}"))
    while engine.scheduler.num_unfinished:
        output = engine.scheduler.schedule()
        rows = len(output.new_requests) + len(output.cached_requests.seq_ids)
        assert rows <= len(engine.scheduler.running)
        engine.in_flight.append(output)
        engine.receive()


def test_durations_run_from_the_end_of_a_turn_to_the_next_arrival():
    """Even if the turn arrived before the message about its tool."""
    engine = Engine()
    seen = []
    engine.scheduler.agent_sessions._rule = rule = Notes(seen)
    first = engine.turn("a", tokens(0, 20))
    engine.scheduler.report_tool(first.request_id, "a", "shell")
    engine.clock.now += 1.5
    second = engine.turn("a", tokens(0, 24))
    engine.clock.now += 0.25
    third = engine.add_one(tokens(0, 28), 4, agent=AgentHint("a"))
    engine.clock.now += 7.0
    engine.run()
    engine.scheduler.report_tool(second.request_id, "a", "search")
    engine.scheduler.report_tool(first.request_id, "a", "stale")
    engine.scheduler.report_tool(third.request_id, "b", "unknown")
    assert seen == [("shell", 1.5), ("search", 0.25)]
    assert engine.scheduler.pop_stats().tool_seconds == [1.5, 0.25]
    assert rule is engine.scheduler.agent_sessions._rule


class Notes:
    """A rule that retains all prefixes for a second, and records its calls."""

    def __init__(self, seen) -> None:
        self.seen = seen

    def provisional(self, num_tokens):
        return TTLDecision(1.0, 1.0)

    def decide(self, tool, num_tokens):
        return TTLDecision(1.0, 1.0)

    def learn_duration(self, tool, seconds):
        self.seen.append((tool, seconds))

    def learn_queueing_delay(self, seconds):
        pass

    def learn_num_turns(self, num_turns):
        pass


def test_pins_are_shortened_from_their_ends_by_the_missing_blocks():
    engine = Engine(max_pinned_share=1.0)
    engine.turn("a", tokens(0, 60))
    engine.turn("b", tokens(100, 60))
    assert engine.pinned() == {"a": 15, "b": 15}
    request = engine.add_one(tokens(300, 48), 1)  # 12 blocks, 10 are free
    engine.send()
    assert request.num_preemptions == 0
    assert engine.pinned() == {"a": 13, "b": 15}
    assert check(engine.kv_cache) == []


def test_a_prefix_that_loses_a_part_is_counted_once_and_traced_each_time():
    lines = []
    clock = FakeClock()
    recorder = TraceRecorder(lines.append, started_at=0.0, num_seats=8, clock=clock)
    engine = Engine(
        max_pinned_share=1.0, clock=clock, observer=recorder, observers=(recorder.block_counter,)
    )
    engine.turn("a", tokens(0, 60))
    engine.scheduler.pop_stats()
    for number, first in ((120, 300), (140, 500)):
        engine.add_one(tokens(first, number), 1)
        engine.send()
        engine.run()
    begins = [each for each in lines if isinstance(each, PinBegin)]
    assert [(each.job, each.num_blocks) for each in begins] == [("a", 15), ("a", 10), ("a", 5)]
    assert {each.ttl_us for each in begins} == {2_000_000}
    assert engine.pinned() == {"a": 5}
    assert engine.scheduler.pop_stats().num_pins_given_up == 1
    engine.retained.reclaim_blocks(5)
    assert [each.reason for each in lines if isinstance(each, PinEnd)] == ["room"]
    assert engine.scheduler.pop_stats().num_pins_given_up == 0


def test_a_prefix_that_is_not_worth_it_counts_as_expired():
    engine = Engine()
    for _ in range(101):
        engine.scheduler.agent_sessions._rule.learn_duration("slow", 1000.0)
    turn = engine.turn("a", tokens(0, 20))
    engine.scheduler.report_tool(turn.request_id, "a", "slow")
    assert engine.pinned() == {}
    stats = engine.scheduler.pop_stats()
    assert (stats.num_pins_taken, stats.num_pins_expired) == (1, 1)


def test_nothing_is_unpinned_in_vain():
    """If all retained prefixes together are not enough, none is released."""
    engine = Engine(max_pinned_share=1.0)
    engine.turn("a", tokens(0, 60))
    engine.add_one(tokens(100, 100), 16)
    engine.step()
    engine.add_one(tokens(300, 60), 4)  # 15 blocks, none free; 15 minus the other's need
    before = engine.pinned()["a"]
    engine.step()
    assert len(engine.scheduler.waiting) == 1
    assert before - engine.pinned()["a"] <= 1  # for the growing running request
    assert engine.pinned()["a"] > 0


def test_a_shared_block_counts_once_and_frees_nothing_by_one_unpin():
    engine = Engine(max_pinned_share=1.0)
    engine.turn("a", tokens(0, 40))
    engine.turn("b", tokens(0, 44))
    assert engine.pinned() == {"a": 10, "b": 11}
    assert engine.retained.num_blocks == 11
    assert engine.kv_cache.num_available_blocks == 40
    engine.retained.release_prefix("a", "test")
    assert engine.kv_cache.pool.num_free == 29
    assert engine.kv_cache.num_available_blocks == 40


def test_the_pin_share_is_kept_in_total_and_per_tenant():
    engine = Engine(max_pinned_share=0.5, max_pinned_share_per_tenant=0.25)
    engine.turn("a", tokens(0, 60), tenant=1)
    assert engine.pinned() == {"a": 10}
    engine.turn("b", tokens(100, 60), tenant=2)
    assert engine.pinned() == {"a": 10, "b": 10}
    engine.turn("c", tokens(200, 28), tenant=3)
    assert engine.retained.num_blocks == 20


def test_a_reset_drops_pins_only_if_it_is_done():
    engine = Engine()
    engine.turn("a", tokens(0, 20))
    engine.add_one(tokens(100, 20), 9)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.pinned() == {"a": 5}
    assert engine.scheduler.reset_prefix_cache(preempting=True)
    assert engine.pinned() == {}
    engine.run()
    engine.assert_idle()


def test_aborted_turns_pin_nothing_and_those_that_a_stop_string_ended_do():
    engine = Engine()
    for stopped, pinned in ((False, {}), (True, {"a": 5})):
        request = engine.add_one(tokens(0, 20), 9, agent=AgentHint("a"))
        engine.step()
        engine.step()
        engine.scheduler.abort_request(request.request_id, stopped=stopped)
        assert engine.pinned() == pinned


def test_a_pin_whose_turn_has_come_is_kept_until_it_runs_or_ends():
    engine = Engine()
    engine.turn("a", tokens(0, 20))
    engine.scheduler.pause("finish_running")
    turn = engine.add_one(tokens(0, 24), 4, agent=AgentHint("a"))
    engine.clock.now += 100.0
    engine.send()
    assert engine.pinned() == {"a": 5}
    engine.scheduler.abort_request(turn.request_id)
    engine.clock.now += 2.1
    engine.scheduler.resume()
    engine.send()
    assert engine.pinned() == {}


def test_a_pin_whose_turn_has_left_expires_while_an_older_turn_still_runs():
    engine = Engine()
    older = engine.add_one(tokens(300, 8), 60, agent=AgentHint("a"))
    engine.step()
    engine.run_until_finished(engine.add_one(tokens(0, 20), 4, agent=AgentHint("a")))
    engine.scheduler.pause("finish_running")
    next_ones = [engine.add_one(tokens(0, 24), 4, agent=AgentHint("a")) for _ in range(2)]
    for left, each in zip(({"a": 5}, {}), next_ones, strict=True):
        engine.scheduler.abort_request(each.request_id)
        engine.clock.now += 2.1
        engine.step()
        assert engine.pinned() == left
    assert not older.is_finished
    engine.scheduler.resume()
    engine.run()


def test_an_agent_session_is_not_forgotten_for_a_turn_that_took_long():
    """The tool's time starts at the end of the turn, not at its arrival."""
    engine = Engine()
    seen = []
    engine.scheduler.agent_sessions._rule = Notes(seen)
    engine.add_one(tokens(0, 20), 4, agent=AgentHint("a"))
    engine.step()
    engine.clock.now += 2 * sessions_module.FORGET_SECONDS
    engine.run()
    engine.add_one(tokens(300, 8), 4, agent=AgentHint("b"))
    assert engine.pinned() == {"a": 5}
    engine.run()
    engine.clock.now += sessions_module.FORGET_SECONDS
    engine.add_one(tokens(600, 8), 4, agent=AgentHint("c"))
    assert seen == [("", math.inf)]
    assert "a" not in engine.scheduler.agent_sessions._sessions


@pytest.mark.parametrize(
    ("windows", "num_blocks"), [((None,), 5), ((None, None), 10), ((None, 6), 6)]
)
def test_the_value_of_a_pin_depends_on_tokens_not_on_cache_groups(windows, num_blocks):
    engine = Engine(windows=windows)
    asked = []
    engine.scheduler.agent_sessions._rule = rule = Notes([])
    rule.decide = lambda tool, num_tokens: asked.append(num_tokens) or TTLDecision(1.0, 1.0)
    turn = engine.turn("a", tokens(0, 20))
    assert engine.pinned() == {"a": num_blocks}
    engine.scheduler.report_tool(turn.request_id, "a", "shell")
    assert asked == [20]  # 23 computed tokens in blocks of 4


def test_row_39_sessions_that_never_return_cost_bounded_memory():
    """3,000 sessions that never return; a clock jump changes only their end."""
    engine = Engine(num_blocks=401, pin_policy="rule")
    engine.step_seconds = lambda output: 0.01
    for each in range(3_000):
        engine.turn(f"session {each}", [each % 900, each // 900, *tokens(0, 6)], 1)
        engine.clock.now += 0.001
    assert engine.retained.num_blocks <= 200
    assert len(engine.retained._deadlines._heap) <= 2 * len(engine.retained) + 64
    assert len(engine.retained._values._heap) <= 2 * len(engine.retained) + 64
    engine.clock.now += 1e9
    engine.turn("again", tokens(0, 8), 1, last=True)
    engine.assert_idle()


@pytest.mark.interpreted
def test_the_session_that_was_seen_longest_ago_is_forgotten_if_there_are_too_many(monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 20)
    engine = Engine()
    for number in range(50):
        engine.turn(f"session {number}", tokens(number, 8), 1)
        engine.clock.now += 0.001
    sessions = engine.scheduler.agent_sessions
    assert len(sessions) == 20
    assert list(sessions._sessions) == [f"session {number}" for number in range(30, 50)]


def test_row_39_no_settable_clock_is_read():
    for path in (ROOT / "engine_core/scheduler").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("time", "time"), path


@pytest.mark.parametrize("ttl_ms", [-5.0, 0.0, 1e300, float("inf"), float("nan")])
def test_row_39_client_supplied_times_are_bounded(ttl_ms):
    seconds = by_client(ttl_ms)
    assert seconds is None or 0.0 <= seconds <= 3600.0
    engine = Engine()
    engine.turn("a", tokens(0, 20), ttl_ms=ttl_ms)
    engine.clock.now += 3601.0
    engine.turn("b", tokens(0, 8), 1, last=True)
    engine.assert_idle()


def test_row_39_a_client_that_lies_about_its_tools_loses_its_pins_first():
    engine = Engine(pin_policy="rule", max_pinned_share=1.0)
    engine.step_seconds = lambda output: 5.0
    liar = engine.turn("liar", tokens(0, 60), ttl_ms=1e9)
    honest = engine.turn("honest", tokens(100, 60))
    rule = engine.scheduler.agent_sessions._rule
    for _ in range(101):
        rule.learn_duration("slow", 1000.0)
        rule.learn_duration("quick", 0.1)
    engine.scheduler.report_tool(liar.request_id, "liar", "slow")
    engine.scheduler.report_tool(honest.request_id, "honest", "quick")
    engine.add_one(tokens(300, 80), 1)
    engine.send()
    assert engine.pinned() == {"liar": 5, "honest": 15}


def test_the_gain_of_a_pin_is_queue_delay_and_context():
    costs = SwapRule("auto")
    costs.learn_step(100, 1.0)
    rule = ExpectedBenefitTTL(costs)
    assert rule.decide("x", 50).seconds == 0.0  # B = 0.5: the cold start says no
    rule.learn_queueing_delay(2.0)
    assert rule.decide("x", 50).seconds == pytest.approx(0.9162907)  # ln 2.5
    for _ in range(101):
        rule.learn_duration("quick", 0.2)
    worth = rule.decide("quick", 50)
    assert (worth.seconds, worth.value) == (0.2, pytest.approx(2.3))


def test_requests_that_lost_their_kv_teach_the_queue_delay():
    engine = Engine()
    heard = []
    engine.scheduler.agent_sessions._rule = rule = Notes([])
    rule.learn_queueing_delay = heard.append
    rule.provisional = lambda num_tokens: TTLDecision(0.0, 0.0)
    engine.turn("a", tokens(0, 20))
    engine.add_one(tokens(0, 24), 4, agent=AgentHint("a"))
    engine.clock.now += 3.0
    engine.run()
    assert heard == [3.0]


def test_an_agent_session_is_as_long_as_from_its_first_arrival_to_the_end_of_its_last_step():
    engine = Engine(scheduling_policy="fcfs")
    engine.turn("a", tokens(0, 20), arrival_time=engine.clock())
    engine.clock.now += 5.0
    engine.turn("a", tokens(0, 24), last=True, arrival_time=engine.clock())
    assert engine.scheduler.pop_stats().agent_session_seconds == [5.0]
    assert len(engine.scheduler.agent_sessions) == 0


def test_the_next_turn_finds_images_that_other_images_have_replaced():
    """It encodes nothing; a request with another image in the same text finds nothing of it."""
    engine = Engine(encoder=encoder_limits(max_embeds=6, cache_size=6, max_input_tokens=100))
    prompt, images = with_pictures([tokens(0, 6), (1, 6), tokens(100, 8)])
    first = engine.turn("a", prompt, mm_features=images)
    assert engine.pinned() == {"a": 6}  # 25 computed tokens
    same, others = with_pictures([tokens(0, 6), (2, 6), tokens(100, 8)])
    assert same == prompt
    other = engine.turn("", same, mm_features=others)
    assert other.num_cached_tokens == 4
    assert engine.runner.encoder.num_encoded == 2
    prompt = [*prompt, *engine.tokens_of(first), *tokens(500, 8)]
    second = engine.turn("a", prompt, last=True, mm_features=images)
    assert second.num_cached_tokens == 24
    assert engine.runner.encoder.num_encoded == 2
    engine.assert_idle()
