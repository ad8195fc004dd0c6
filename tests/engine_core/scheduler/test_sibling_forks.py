"""Choices of one request compute their prompt once and share its blocks."""

import pytest

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import Candidate
from engine_core.scheduler.features.prefix_sharing import SiblingForks
from engine_core.scheduler.preemption import WaitingBlockHolders
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.lifecycle import RECURRENT_STATE, KVGroup
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.gates import FakeGate
from tests.fakes.paged_runner import undisturbed

WAITS = RequestStatus.WAITING_FOR_FORK
PROMPT = list(range(19))
STATES = (KVGroup(), KVGroup(kind=RECURRENT_STATE))
CACHING = pytest.mark.parametrize("caching", [True, False])


def engine_of(caching: bool = True, **settings) -> EngineHarness:
    return EngineHarness(block_size=4, enable_prefix_caching=caching, **settings)


def blocks_in_use(engine: EngineHarness) -> int:
    return engine.kv_cache.num_usable_blocks - engine.kv_cache.num_available_blocks


def num_computed(engine: EngineHarness) -> int:
    return sum(step.total_num_scheduled_tokens for step in engine.runner.steps)


def assert_right(engine: EngineHarness, requests: list[Request], num_tokens: int) -> None:
    for each in requests:
        wanted = undisturbed(each.prompt_token_ids, num_tokens, each.choice)
        assert engine.tokens_of(each) == wanted
    engine.assert_idle()


@CACHING
def test_the_prompt_is_computed_once_and_its_last_token_by_every_choice(caching):
    engine = engine_of(caching)
    requests = engine.add(PROMPT, max_tokens=5, n=3)
    assert scheduled(engine.step()) == {requests[0].seq_id: 19}
    assert [each.status for each in requests[1:]] == [WAITS, WAITS]
    output = engine.step()
    assert scheduled(output) == dict.fromkeys([each.seq_id for each in requests], 1)
    assert [new.num_computed_tokens for new in output.new_requests] == [18, 18]
    engine.run()
    assert num_computed(engine) == 18 + 3 + 3 * 4
    assert_right(engine, requests, 5)


@CACHING
def test_choices_share_full_blocks_and_own_their_last_block(caching):
    engine = engine_of(caching)
    requests = engine.add(PROMPT, max_tokens=5, n=3)
    engine.step()
    output = engine.step()
    tables = [engine.kv_cache.block_ids(each.seq_id)[0] for each in requests]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert output.block_copies == [tables[0][4], tables[1][4], tables[0][4], tables[2][4]]
    assert blocks_in_use(engine) == 4 + 3
    counts = engine.kv_cache.pool.ref_counts
    assert [counts[block] for block in tables[1]] == [3, 3, 3, 3, 1]


def test_nothing_is_copied_where_the_shared_tokens_end_with_a_block():
    engine = engine_of()
    requests = engine.add(list(range(17)), max_tokens=3, n=2)
    engine.step()
    assert engine.step().block_copies == []
    assert blocks_in_use(engine) == 4 + 2
    engine.run()
    assert_right(engine, requests, 3)


@CACHING
def test_a_prompt_in_chunks_is_waited_for(caching):
    engine = engine_of(caching, max_num_batched_tokens=8)
    requests = engine.add(PROMPT, max_tokens=2, n=2)
    other = engine.add_one([500, 501], max_tokens=2)
    first, second = (each.seq_id for each in requests)
    assert scheduled(engine.step()) == {first: 8}
    assert scheduled(engine.step()) == {first: 8}
    assert second not in engine.runner.rows
    assert scheduled(engine.step()) == {first: 3, other.seq_id: 2}
    assert scheduled(engine.step()) == {first: 1, other.seq_id: 1, second: 1}
    engine.run()
    assert_right(engine, requests, 2)
    assert engine.tokens_of(other) == undisturbed([500, 501], 2)


def test_a_prompt_without_its_last_token_is_enough():
    """The first choice computes that token together with the others."""
    engine = engine_of(False, max_num_batched_tokens=9)
    requests = engine.add(PROMPT, max_tokens=2, n=3)
    engine.step()
    engine.step()
    assert scheduled(engine.step()) == dict.fromkeys([each.seq_id for each in requests], 1)
    engine.run()
    assert_right(engine, requests, 2)


def test_one_token_cannot_be_shared():
    engine = engine_of()
    requests = engine.add([7], max_tokens=3, n=3)
    assert scheduled(engine.step()) == dict.fromkeys([each.seq_id for each in requests], 1)
    engine.run()
    assert_right(engine, requests, 3)


@CACHING
def test_when_the_first_is_aborted_the_next_computes_the_prompt(caching):
    engine = engine_of(caching, long_prefill_token_threshold=8)
    requests = engine.add(PROMPT, max_tokens=2, n=3)
    engine.step()
    engine.scheduler.abort_request(requests[0].request_id, 0)
    assert engine.scheduler.has_work
    assert scheduled(engine.step()) == {requests[1].seq_id: 8}
    assert requests[2].status is WAITS
    engine.run()
    assert_right(engine, requests[1:], 2)


@CACHING
def test_forks_start_together_when_the_first_choice_ends_at_once(caching):
    engine = engine_of(caching)
    requests = engine.add(PROMPT, max_tokens=1, n=4)
    assert scheduled(engine.step()) == {requests[0].seq_id: 19}
    num_missing = 3 if caching else 1
    assert scheduled(engine.step()) == dict.fromkeys(
        [each.seq_id for each in requests[1:]], num_missing
    )
    engine.run()
    assert_right(engine, requests, 1)


def test_the_whole_request_can_be_aborted_while_some_wait():
    engine = engine_of(max_num_batched_tokens=8)
    requests = engine.add(PROMPT, n=3)
    engine.step()
    assert engine.scheduler.abort_request(requests[0].request_id) == 3
    engine.step()
    engine.assert_idle()


def test_one_that_waits_can_be_aborted():
    engine = engine_of(max_num_batched_tokens=8)
    requests = engine.add(PROMPT, max_tokens=2, n=3)
    engine.step()
    engine.scheduler.abort_request(requests[0].request_id, 1)
    engine.run()
    assert_right(engine, [requests[0], requests[2]], 2)


@CACHING
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempting_the_first_choice_ends_the_wait_of_others(policy, caching):
    engine = engine_of(caching, num_blocks=12, max_num_batched_tokens=8, scheduling_policy=policy)
    old = engine.add_one(list(range(500, 514)), max_tokens=14)
    engine.step()
    engine.step()
    requests = engine.add(list(range(22)), max_tokens=5, n=3)
    engine.run()
    assert requests[0].num_preemptions > 0
    assert engine.tokens_of(old) == undisturbed(list(range(500, 514)), 14)
    assert_right(engine, requests, 5)


@CACHING
def test_with_max_num_seqs_one_choices_run_one_by_one(caching):
    engine = engine_of(caching, max_num_seqs=1)
    requests = engine.add(PROMPT, max_tokens=3, n=3)
    engine.run()
    assert_right(engine, requests, 3)
    prompts = (19 + 3 + 3) if caching else (19 + 1 + 1)
    assert num_computed(engine) == prompts + 3 * 2


def test_a_choice_without_room_forks_when_there_is_some():
    engine = engine_of(num_blocks=9)
    other = engine.add_one([500, 501, 502], max_tokens=2)
    requests = engine.add(list(range(22)), max_tokens=3, n=3)
    engine.step()
    engine.step()
    assert [each.status for each in requests] == [
        RequestStatus.RUNNING,
        RequestStatus.RUNNING,
        RequestStatus.WAITING,
    ]
    engine.run()
    assert num_computed(engine) == 3 + 1 + 21 + 3 + 3 * 2
    assert engine.tokens_of(other) == undisturbed([500, 501, 502], 2)
    assert_right(engine, requests, 3)


def test_a_later_choice_forks_from_one_that_is_far_ahead():
    engine = engine_of(False, max_num_seqs=2)
    long = engine.add_one([500], max_tokens=9)
    requests = engine.add(PROMPT, max_tokens=12, n=2)
    engine.run()
    assert num_computed(engine) == 9 + 18 + 2 + 2 * 11
    assert engine.tokens_of(long) == undisturbed([500], 9)
    assert_right(engine, requests, 12)


@pytest.mark.parametrize("length", [9, 12, 13, 17])
@pytest.mark.parametrize("windows", [(6,), (None, 6), (9, None, 5)])
def test_groups_with_windows_give_the_same_tokens(windows, length):
    engine = engine_of(windows=windows)
    requests = engine.add(list(range(length)), max_tokens=8, n=3)
    engine.run()
    assert_right(engine, requests, 8)


def test_prompt_logprobs_come_from_the_choice_that_computes_the_prompt():
    engine = engine_of(max_num_batched_tokens=8)
    requests = engine.add(PROMPT, max_tokens=2, n=3, prompt_logprobs=1)
    engine.run()
    reported = {
        key: [each.prompt_logprobs.first_position for each in outputs if each.prompt_logprobs]
        for key, outputs in engine.outputs.items()
    }
    request_id = requests[0].request_id
    assert reported[request_id, 0] == [1, 9, 17]
    assert num_computed(engine) == 18 + 3 + 3
    assert_right(engine, requests, 2)


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("max_num_seqs", [4, 64])
@pytest.mark.parametrize(
    "fields", [{}, {"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}], ids=str
)
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"enable_prefix_caching": False},
        {"groups": STATES, "num_state_slots": 212},
    ],
    ids=["cached", "uncached", "states"],
)
def test_choices_that_end_with_their_first_token_compute_one_prompt(
    kind, fields, max_num_seqs, is_async, max_tokens
):
    """The first choice may have ended before the others begin."""
    settings = {"max_num_seqs": max_num_seqs, "async_scheduling": is_async, **kind}
    engine = EngineHarness(block_size=4, max_num_batched_tokens=64, **settings)
    prompt = list(range(199))
    requests = engine.add(prompt, max_tokens=max_tokens, n=16, **fields)
    engine.run()
    assert num_computed(engine) < 1.4 * len(prompt)
    reported = {
        each.prompt_logprobs.first_position
        for outputs in engine.outputs.values()
        for each in outputs
        if each.prompt_logprobs
    }
    assert reported >= {1, 65, 129, 193} if "prompt_logprobs" in fields else not reported
    assert_right(engine, requests, max_tokens)


def test_an_heir_of_the_prompt_may_lose_it_and_computes_it_again():
    engine = engine_of(False, max_num_seqs=1)
    requests = engine.add(PROMPT, max_tokens=1, n=3)
    engine.step()
    assert requests[1].num_computed_tokens == 18
    engine.scheduler.reset_prefix_cache(preempting=True)
    engine.run()
    assert num_computed(engine) == 19 + 19 + 1
    assert_right(engine, requests, 1)


def test_an_heir_of_the_prompt_may_be_aborted():
    engine = engine_of(False, max_num_seqs=1)
    requests = engine.add(PROMPT, max_tokens=1, n=3)
    engine.step()
    engine.scheduler.abort_request(requests[1].request_id, 1)
    engine.run()
    assert num_computed(engine) == 19 + 1
    assert_right(engine, [requests[0], requests[2]], 1)


def test_choices_taken_up_again_share_the_prompt_and_compute_their_outputs():
    engine = engine_of(False)
    outputs = [undisturbed(PROMPT, 3, 0), undisturbed(PROMPT, 5, 1), undisturbed(PROMPT, 1, 2)]
    requests = engine.add(
        PROMPT,
        max_tokens=8,
        n=3,
        output_token_ids=tuple(map(tuple, outputs)),
        finished_choices=(0,),
    )
    assert scheduled(engine.step()) == {requests[0].seq_id: 24}
    assert scheduled(engine.step()) == {requests[0].seq_id: 1, requests[1].seq_id: 1}
    engine.run()
    assert engine.tokens_of(requests[0]) == undisturbed(PROMPT, 8, 1)[5:]
    assert engine.tokens_of(requests[1]) == undisturbed(PROMPT, 8, 2)[1:]
    engine.assert_idle()


def test_cached_tokens_are_those_of_the_first():
    engine = engine_of()
    engine.add_one(PROMPT[:9], max_tokens=1)
    engine.run()
    engine.kv_cache.pop_prefix_cache_stats()
    requests = engine.add(PROMPT, max_tokens=2, n=3)
    engine.run()
    assert [each.num_cached_tokens for each in requests] == [8, 8, 8]
    assert engine.kv_cache.pop_prefix_cache_stats() == (19, 8)


def test_a_preempted_choice_comes_back_as_a_fork():
    """It is preempted by another request, which ends soon."""
    engine = engine_of(False, num_blocks=15)
    other = engine.add_one([500, 501, 502, 503], max_tokens=12)
    requests = engine.add(list(range(22)), max_tokens=18, n=2)
    engine.run()
    (resumed,) = (step for step in engine.runner.steps if step.cached_requests.resumed_seq_ids)
    assert resumed.cached_requests.resumed_seq_ids == [requests[1].seq_id]
    assert resumed.cached_requests.num_computed_tokens[-1] == 22
    assert len(resumed.block_copies) == 2
    assert engine.tokens_of(other) == undisturbed([500, 501, 502, 503], 12)
    assert_right(engine, requests, 18)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_pause_lets_all_choices_of_a_request_end_that_has_begun(max_tokens):
    engine = engine_of(max_num_batched_tokens=8)
    requests = engine.add(PROMPT, max_tokens=max_tokens, n=2)
    engine.step()
    engine.scheduler.pause("finish_running")
    other = engine.add_one([7], max_tokens=1)
    while engine.scheduler.has_work:
        engine.step()
    assert all(each.is_finished for each in requests)
    assert other.status is RequestStatus.WAITING_FOR_RESUME
    engine.scheduler.resume()
    engine.run()
    assert_right(engine, requests, max_tokens)


def test_a_gate_before_it_may_hold_any_of_them():
    gate = FakeGate()
    engine = engine_of(gates=[gate])
    requests = engine.add(PROMPT, max_tokens=4, n=3)
    gate.blocked = {requests[0]}
    assert scheduled(engine.step()) == {requests[1].seq_id: 19}
    assert scheduled(engine.step()) == {requests[1].seq_id: 1, requests[2].seq_id: 1}
    gate.unblock(requests[0])
    assert scheduled(engine.step())[requests[0].seq_id] == 1
    engine.run()
    assert_right(engine, requests, 4)


def make_gate(engine: EngineHarness, choices: dict[int, dict[int, Request]], woken) -> SiblingForks:
    return SiblingForks(
        engine.kv_cache, choices, WaitingBlockHolders(engine.kv_cache), woken.append
    )


class Watched(dict):
    """Choices by number; counts iterations."""

    num_looks = 0

    def values(self):
        self.num_looks += 1
        return super().values()


def test_a_step_does_not_visit_choices_that_wait_for_the_prompt():
    engine = engine_of()
    requests = engine.add(PROMPT, max_tokens=2, n=50)
    choices = Watched({each.choice: each for each in requests})
    woken = []
    gate = make_gate(engine, {requests[0].request_id: choices}, woken)
    first = requests[0]
    first.status = RequestStatus.RUNNING
    for each in requests[1:]:
        assert gate.is_blocked(Candidate(each, engine.kv_cache))
    choices.num_looks = 0
    for _ in range(10):
        gate.begin_admission(StepPlan(100, 0.0))
    assert (choices.num_looks, woken) == (0, [])
    first.num_computed_tokens = len(PROMPT)
    gate.begin_admission(StepPlan(100, 0.0))
    assert woken == requests[1:]
    assert choices.num_looks == 0


def test_a_choice_preempted_in_the_same_pass_does_not_wait_for_itself():
    engine = engine_of()
    first, second = engine.add(PROMPT, max_tokens=2, n=2)
    gate = make_gate(engine, {first.request_id: {0: first, 1: second}}, [])
    first.status = RequestStatus.RUNNING
    assert gate.is_blocked(Candidate(second, engine.kv_cache))
    first.status = RequestStatus.PREEMPTED
    assert not gate.is_blocked(Candidate(first, engine.kv_cache))


def test_choices_wait_for_another_leader_when_theirs_is_preempted():
    engine = engine_of(long_prefill_token_threshold=4)
    requests = engine.add(PROMPT, max_tokens=2, n=4)
    engine.step()
    assert [each.status for each in requests[1:]] == [WAITS] * 3
    engine.scheduler.reset_prefix_cache(preempting=True)
    engine.step()
    assert requests[0].status is RequestStatus.RUNNING
    assert [each.status for each in requests[1:]] == [WAITS] * 3
    engine.run()
    assert_right(engine, requests, 2)
