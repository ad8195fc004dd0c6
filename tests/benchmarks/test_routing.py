"""The sessions of the routing benchmark, its engines, and the formulas of its policies."""

import itertools
import statistics

import pytest
from rich.console import Console

from api_server.engine.router import EngineLoad
from proto.errors import ConfigError
from tests.benchmarks.agents import MACHINES
from tests.benchmarks.fleet.engines import ChainCache, ModelEngine
from tests.benchmarks.fleet.policies import (
    Dynamo,
    Fleet,
    LeastLoad,
    LlmD,
    RoundRobin,
    dynamo_cost,
    llm_d_score,
    vllm_load,
)
from tests.benchmarks.fleet.traffic import (
    BLOCK_SIZE,
    RequestWithoutTokens,
    Session,
    Traffic,
    Turn,
    TurnRequest,
    request_with_tokens,
)
from tests.benchmarks.routing import ROUTER, measure_decisions, run_hour, working_set

MACHINE = MACHINES["assumed-70b"]
TOKEN_SECONDS = 0.06
QUIET = Console(quiet=True)
NUMBERS = itertools.count(1)


def session(num_turns=3, *, chain=9, shared=((1, 10),), num_new=320, answer=33):
    turns = [Turn(num_new, answer, 1.0)] * num_turns
    return Session(f"s{chain}", True, 1, chain, shared, turns, 0.0)


def turn_of(session, number=0):
    length = session.prompt_lengths[number]
    answer = session.turns[number].answer
    return TurnRequest(next(NUMBERS), session, number, 0.0, length, answer)


def shape(sessions):
    return [(each.name, each.tenant, each.arrival, each.shared, each.turns) for each in sessions]


def test_sessions_have_the_published_shape():
    traffic = Traffic(60, 600.0, 1, TOKEN_SECONDS)
    sessions = traffic.sessions()
    assert shape(sessions) == shape(traffic.sessions())
    assert shape(sessions) != shape(Traffic(60, 600.0, 2, TOKEN_SECONDS).sessions())
    began = [each for each in sessions if not each.first_turn]
    agents = [each for each in began if each.is_agent]
    assert 2.0 < (len(began) - len(agents)) / len(agents) < 4.0
    assert 37 <= statistics.median(len(each.turns) for each in agents) <= 49
    pauses = [turn.pause for each in agents for turn in each.turns]
    assert statistics.mean(pause < 1.0 for pause in pauses) == pytest.approx(0.865, abs=0.02)
    assert statistics.mean(pause < 10.0 for pause in pauses) == pytest.approx(0.95, abs=0.02)
    assert statistics.mean(bool(each.subagents) for each in agents) == pytest.approx(0.44, abs=0.12)
    tenants = [each.tenant for each in began]
    assert tenants.count(1) > 2 * tenants.count(4) > 0


def test_sessions_that_began_before_the_start_go_on_after_it():
    sessions = Traffic(20, 60.0, 1, TOKEN_SECONDS).sessions()
    assert {bool(each.first_turn) for each in sessions} == {True, False}
    assert all(each.arrival >= 0.0 for each in sessions)
    assert all(each.first_turn < len(each.turns) for each in sessions)


def test_subagents_share_a_system_prompt_or_the_context_of_their_parent():
    sessions = Traffic(40, 300.0, 1, TOKEN_SECONDS).sessions()
    forks = 0
    for parent in sessions:
        for number, children in parent.subagents.items():
            known = parent.prompt_lengths[number] - parent.turns[number].num_new
            for child in children:
                length = child.num_shared * BLOCK_SIZE
                is_fork = child.shared[-1][0] == parent.chain
                forks += is_fork
                assert (child.token_ids[:length] == parent.token_ids[:length]) == is_fork
                assert child.token_ids[length] != parent.token_ids[length]
                assert not is_fork or known - BLOCK_SIZE < length <= known
    assert forks > 3


def test_keys_without_tokens_name_the_same_runs_as_tokens():
    parent, other = session(4), session(2, chain=10)
    fork = session(2, chain=11, shared=((1, 10), (9, 30)))
    turns = [turn_of(parent), turn_of(parent, 3), turn_of(other, 1), turn_of(fork, 1)]
    hashed = [request_with_tokens(turn, named=False).keys for turn in turns]
    known = [RequestWithoutTokens(turn, named=False).keys for turn in turns]
    assert [len(keys) for keys in hashed] == [len(keys) for keys in known]

    def shared(first, second):
        return sum(one == two for one, two in zip(first, second, strict=False))

    for one, two in itertools.combinations(range(len(turns)), 2):
        assert shared(hashed[one], hashed[two]) == shared(known[one], known[two]) > 0


def test_names_of_sessions_reach_the_router_only_where_clients_name_them():
    turn = turn_of(session())
    for describe in (request_with_tokens, RequestWithoutTokens):
        assert describe(turn, named=True).session == "s9"
        assert describe(turn, named=False).session == ""
    named = [describe(turn, named=True) for describe in (request_with_tokens, RequestWithoutTokens)]
    assert named[0].affinity == named[1].affinity


def fleet(num_engines=3, rate=1000.0):
    return Fleet(num_engines, 4096, rate, lambda: 0.0)


def choose(policy, turn):
    return policy.choose(turn, RequestWithoutTokens(turn, named=True))


def send(policy, turn, engine):
    turn.engine = engine
    policy.note_sent(turn, RequestWithoutTokens(turn, named=True))
    return turn


def test_round_robin_takes_engines_in_turn():
    policy = RoundRobin(fleet())
    assert sorted(choose(policy, turn_of(session())) for _ in range(6)) == [0, 0, 1, 1, 2, 2]


def test_the_load_of_an_engine_by_vllm():
    assert vllm_load(3, EngineLoad(num_running=1, num_waiting=1, kv_usage=0.5)) == 3
    assert vllm_load(1, EngineLoad(num_running=3, num_waiting=2, kv_usage=1.0)) == 5 + 6 * 2 * 0.5
    policy = LeastLoad(fleet())
    sent = send(policy, turn_of(session()), 0)
    policy.note_load(1, EngineLoad(num_running=2))
    assert choose(policy, turn_of(session())) == 2
    send(policy, turn_of(session()), 2)
    policy.note_finished(sent)
    assert choose(policy, turn_of(session())) == 0


def test_llm_d_stays_where_the_prefix_is_until_that_costs_five_seconds_more():
    assert (llm_d_score(0), llm_d_score(2_097_152), llm_d_score(1e9)) == (1.0, 0.5, 0.0)
    policy, mine = LlmD(fleet()), session(8, num_new=640)
    first = send(policy, turn_of(mine, 5), 1)
    policy.note_token(first)
    assert policy.uncached == [0.0, 0.0, 0.0]
    busy = send(policy, turn_of(session(1, chain=20, num_new=4_600)), 1)
    assert 4_500 < policy.uncached[1] < 5_000
    chosen = [choose(policy, turn_of(mine, 6)) for _ in range(1000)]
    assert 970 <= chosen.count(1) < 1000  # some explore
    policy.note_token(busy)
    send(policy, turn_of(session(1, chain=21, num_new=5_200)), 1)
    assert {choose(policy, turn_of(mine, 6)) for _ in range(20)} == {0, 2}


def test_dynamo_takes_the_engine_of_the_fewest_blocks():
    assert dynamo_cost(160, 320, 160, 7) == 20 + 7
    assert dynamo_cost(0, 160, 320, 7) == 7
    policy, mine = Dynamo(fleet(2)), session(8)
    first = send(policy, turn_of(mine), 1)
    policy.note_token(first)
    policy.note_finished(first)
    assert policy._active == [0, 0]
    assert choose(policy, turn_of(mine, 1)) == 1
    running = send(policy, turn_of(session(1, chain=30, shared=((2, 10),), num_new=1600)), 1)
    policy.note_token(running)  # its blocks count, its prompt no longer
    assert policy._active == [0, 110]
    assert choose(policy, turn_of(mine, 1)) == 0
    policy.note_finished(running)
    assert choose(policy, turn_of(mine, 1)) == 1


def test_dynamo_counts_a_prefix_in_use_once():
    policy = Dynamo(fleet(2))
    sent = [
        send(policy, turn_of(session(1, chain=chain, shared=((1, 40),))), 0) for chain in (3, 4)
    ]
    assert policy._active == [40 + 20 + 20, 0]
    for turn in sent:
        policy.note_token(turn)
        policy.note_finished(turn)
    assert policy._active == [0, 0]
    assert policy._users == {}


def test_a_cache_of_chains_evicts_what_was_not_used_for_longest_from_its_end():
    cache = ChainCache(100)
    one, two = session(3, chain=5, num_new=330), session(3, chain=6, num_new=330)
    first = turn_of(one)
    assert cache.acquire(first) == 0
    assert cache.usage == pytest.approx(0.33)  # 10, 22 and one for the last token
    cache.release(first)
    assert cache.usage == 0.0
    second = turn_of(two)
    assert cache.acquire(second) == 160  # the system prompt
    cache.release(second)
    third = turn_of(one, 1)
    assert cache.acquire(third) == 160 + 352  # the first turn and most of its answer
    big = turn_of(session(1, chain=7, shared=((2, 10),), num_new=800))
    assert cache.acquire(big) is None  # 56 blocks are in use
    cache.release(third)
    assert cache.acquire(big) == 0
    again = turn_of(two, 1)
    assert cache.acquire(again) is None
    cache.release(big)
    assert cache.acquire(again) == 160  # its own chain was evicted first


def test_a_model_of_an_engine_takes_steps_until_a_turn_has_its_tokens():
    engine, turn = ModelEngine(MACHINE, 1000), turn_of(session(1, num_new=3000, answer=20))
    engine.submit(turn, 0.0)
    assert engine.load(0.0).num_running == 1
    now, events = 0.0, []
    while engine.next_end < 100.0:
        now = engine.next_end
        events += [(has_ended, now) for _, has_ended in engine.advance(now)]
    model = MACHINE.step_model
    first = model.seconds(2048, 1, 0) + model.seconds(3160 - 2048, 1, 0)
    end = first + 19 * model.seconds(1, 1, 0)
    assert [has_ended for has_ended, _ in events] == [False, True]
    assert [moment for _, moment in events] == pytest.approx([first, end])
    assert engine.load(now) == EngineLoad(timestamp=now)


def test_a_turn_that_arrives_gets_its_row_with_the_next_step():
    engine = ModelEngine(MACHINE, 1000)
    engine.submit(turn_of(session(1, answer=200)), 0.0)
    engine.advance(engine.next_end)
    planned, step = engine.next_end, MACHINE.step_model.seconds(1, 1, 0)
    began = MACHINE.step_model.seconds(480, 1, 0)
    engine.submit(turn_of(session(1, chain=10)), began + 1.5 * step)
    assert engine.next_end == pytest.approx(began + 2 * step)
    assert engine.next_end < planned


def test_the_working_set_is_what_live_sessions_have_at_once():
    one, two = turn_of(session(1)), turn_of(session(1, chain=10))
    one.ended_at, two.arrived = 5.0, 4.0
    assert working_set([one, two]) == 2 * 22
    two.arrived = 6.0
    assert working_set([one, two]) == 22


def test_sessions_find_more_of_their_prefixes_with_the_router_than_in_turn():
    hour = run_hour(Traffic(2, 60.0, 3, TOKEN_SECONDS), MACHINE, 2.0, QUIET)
    assert hour.step_error < 0.3
    for outcomes in (hour.real, hour.model):
        assert all(0.0 < outcome.hit_rate < 1.0 for outcome in outcomes.values())
        assert all(outcome.num_turns > 10 for outcome in outcomes.values())
        assert outcomes[ROUTER].hit_rate > outcomes["round robin"].hit_rate
    assert hour.model[ROUTER].hit_rate == pytest.approx(hour.real[ROUTER].hit_rate, abs=0.1)


def test_a_session_must_fit_into_a_pool():
    with pytest.raises(ConfigError, match="--share"):
        run_hour(Traffic(2, 30.0, 3, TOKEN_SECONDS), MACHINE, 0.01, QUIET)


def test_decisions_are_measured_in_parts():
    times = measure_decisions(num_engines=3, num_tokens=200, number=20)
    assert {len(values) for values in times.values()} == {20}
    assert set(times) >= {"hash", "choose", "note", "choose (thread)"}
    assert all(value >= 0 for values in times.values() for value in values)
