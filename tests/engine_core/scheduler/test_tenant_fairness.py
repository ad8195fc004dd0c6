"""Fairness between tenants: step tokens, seats, blocks."""

import pytest

from engine_core.request import RequestStatus
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.gates import FakeGate
from tests.fakes.paged_runner import undisturbed

HEAVY, LIGHT, OTHER = 1, 2, 3


def prompt(length, start=0):
    return [(start * 101 + position * 7) % 900 for position in range(length)]


def engine_with(**settings):
    return EngineHarness(**{"max_num_batched_tokens": 64, "block_size": 4, **settings})


def add(engine, tenant, length, max_tokens=16, **params):
    start = next(engine.ids)
    return engine.add_one(
        prompt(length, start), max_tokens, tenant=tenant, eos_token_ids=(), **params
    )


def run_and_check(engine, *requests):
    engine.run()
    for each in requests:
        wanted = undisturbed(each.prompt_token_ids, each.max_tokens)
        assert engine.tokens_of(each) == wanted
    engine.assert_idle()


def test_a_prompt_in_progress_yields_and_takes_the_remaining_budget():
    engine = engine_with()
    heavy = add(engine, HEAVY, 300)
    assert scheduled(engine.step()) == {heavy.seq_id: 64}
    light = add(engine, LIGHT, 40)
    assert scheduled(engine.step()) == {light.seq_id: 40, heavy.seq_id: 24}
    assert scheduled(engine.step()) == {light.seq_id: 1, heavy.seq_id: 63}
    run_and_check(engine, heavy, light)


def test_a_prompt_of_several_steps_is_not_interrupted_by_the_yielding_one():
    engine = engine_with()
    heavy = add(engine, HEAVY, 600)
    for _ in range(4):
        engine.step()
    light = add(engine, LIGHT, 150)
    steps = [scheduled(engine.step()) for _ in range(3)]
    assert steps == [
        {light.seq_id: 64},
        {light.seq_id: 64},
        {light.seq_id: 22, heavy.seq_id: 42},
    ]
    run_and_check(engine, heavy, light)


def test_a_decode_keeps_its_token():
    engine = engine_with()
    writers = [add(engine, HEAVY, 10) for _ in range(3)]
    engine.step()
    heavy = add(engine, HEAVY, 300)
    engine.step()
    light = add(engine, LIGHT, 100)
    tokens = scheduled(engine.step())
    assert tokens == {each.seq_id: 1 for each in writers} | {light.seq_id: 61}
    run_and_check(engine, heavy, light, *writers)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("num_writers", [20, 40, 60, 63, 64, 80])
def test_a_long_prompt_takes_one_step_more_at_most_however_many_decode(num_writers, overlapped):
    """Four steps of 64 tokens are what it takes on an idle server."""
    engine = engine_with(async_scheduling=overlapped, max_num_seqs=100, num_blocks=1000)
    writers = [add(engine, HEAVY, 10, max_tokens=30) for _ in range(num_writers)]
    while engine.scheduler.waiting and len(engine.scheduler.running) < 64:
        engine.step()
    light = add(engine, LIGHT, 230, max_tokens=2)
    num_steps = 0
    while light.num_computed_tokens < 230:
        engine.step()
        num_steps += 1
    assert num_steps <= 5
    run_and_check(engine, light, *writers)


def test_a_yielding_request_gets_its_token_when_budget_is_left():
    engine = engine_with(max_num_seqs=60, num_blocks=1000)
    writers = [add(engine, HEAVY, 10, max_tokens=50) for _ in range(40)]
    while not all(map(engine.tokens_of, writers)):
        engine.step()
    light = add(engine, LIGHT, 150, max_tokens=2)
    assert scheduled(engine.step()) == {light.seq_id: 64}
    assert scheduled(engine.step()) == {light.seq_id: 64}
    all_of_them = {each.seq_id: 1 for each in writers}
    assert scheduled(engine.step()) == all_of_them | {light.seq_id: 22}
    run_and_check(engine, light, *writers)


def test_no_request_yields_to_a_tenant_that_would_then_be_served_more():
    engine = engine_with(max_num_seqs=60, num_blocks=1000, max_model_len=300)
    writers = [add(engine, HEAVY, 1, max_tokens=100) for _ in range(50)]
    engine.step()
    light = add(engine, LIGHT, 250, max_tokens=2)
    assert scheduled(engine.step()) == {each.seq_id: 1 for each in writers} | {light.seq_id: 14}
    run_and_check(engine, light, *writers)


def test_prompts_of_the_same_tenant_keep_their_order():
    engine = engine_with()
    first = add(engine, HEAVY, 300)
    engine.step()
    second = add(engine, HEAVY, 20)
    light = add(engine, LIGHT, 30, max_tokens=1)
    assert scheduled(engine.step()) == {light.seq_id: 30, first.seq_id: 34}
    assert scheduled(engine.step()) == {first.seq_id: 64}
    assert second.status is RequestStatus.WAITING
    run_and_check(engine, first, second)


def test_no_request_yields_to_a_tenant_served_more():
    engine = engine_with(max_model_len=400)
    add(engine, HEAVY, 320, max_tokens=1)
    engine.run()
    light = add(engine, LIGHT, 100)
    engine.step()
    heavy = add(engine, HEAVY, 30)
    assert scheduled(engine.step()) == {light.seq_id: 36, heavy.seq_id: 28}
    run_and_check(engine, heavy, light)


def test_of_several_prompts_the_one_of_the_tenant_served_least_goes_first():
    engine = engine_with(long_prefill_token_threshold=30)
    heavy = add(engine, HEAVY, 300)
    engine.step()
    other = add(engine, OTHER, 200)
    engine.step()
    light = add(engine, LIGHT, 60)
    assert scheduled(engine.step()) == {light.seq_id: 30, other.seq_id: 30, heavy.seq_id: 4}
    assert scheduled(engine.step()) == {light.seq_id: 30, other.seq_id: 30, heavy.seq_id: 4}
    run_and_check(engine, heavy, light, other)


def test_the_youngest_request_of_the_tenant_served_most_is_preempted():
    engine = engine_with(max_num_seqs=3)
    add(engine, OTHER, 4)
    old, young = add(engine, HEAVY, 20), add(engine, HEAVY, 20)
    engine.step()
    light = add(engine, LIGHT, 8)
    output = engine.step()
    assert output.preempted_seq_ids == [young.seq_id]
    assert scheduled(output)[light.seq_id] == 8
    assert old.status is RequestStatus.RUNNING
    assert list(engine.scheduler.waiting) == [young]
    run_and_check(engine, old, young, light)


def test_a_tenant_preempts_only_when_behind_by_more_than_its_tokens():
    engine = engine_with(max_num_seqs=1, max_model_len=200)
    heavy = add(engine, HEAVY, 20, max_tokens=40)
    engine.step()
    light = add(engine, LIGHT, 30)  # both began at the same place, and 20 tokens were served
    num_steps = 0
    while light.status is RequestStatus.WAITING:
        output = engine.step()
        num_steps += 1
    assert output.preempted_seq_ids == [heavy.seq_id]
    assert heavy.num_output_tokens < 40
    assert num_steps == 6  # 20 input tokens and 2 for each of 6 steps are more than 30
    run_and_check(engine, heavy, light)


def test_victims_are_preempted_one_by_one_for_blocks():
    """24 usable blocks of 4; the light prompt takes 12."""
    engine = engine_with(num_blocks=25, max_num_batched_tokens=128)
    heavy = [add(engine, HEAVY, 28, max_tokens=4) for _ in range(3)]
    engine.step()
    assert engine.kv_cache.num_available_blocks == 3
    light = add(engine, LIGHT, 48, max_tokens=4)
    output = engine.step()
    assert output.preempted_seq_ids == [heavy[2].seq_id, heavy[1].seq_id]
    assert scheduled(output) == {heavy[0].seq_id: 1, light.seq_id: 48}
    run_and_check(engine, light, *heavy)


def test_blocks_of_a_victim_planned_in_this_step_are_not_findable():
    """The light prompt shares a prefix with the victim's, which is removed from the same step."""
    engine = engine_with(num_blocks=25)
    texts = [prompt(80, 1), prompt(40, 2)]
    heavy = engine.add_one(texts[0], 4, tenant=HEAVY, eos_token_ids=())
    engine.step()
    light = engine.add_one(texts[0][:70] + texts[1][:20], 4, tenant=LIGHT, eos_token_ids=())
    engine.step()
    engine.step()
    run_and_check(engine, light, heavy)


def test_nothing_is_preempted_for_fairness_in_a_step_that_admitted_a_request():
    engine = engine_with(max_num_seqs=2)
    add(engine, HEAVY, 30)
    engine.step()
    first, second = add(engine, LIGHT, 4), add(engine, LIGHT, 4)
    output = engine.step()
    assert output.preempted_seq_ids == []
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    assert len(engine.step().preempted_seq_ids) == 1
    assert second.status is RequestStatus.RUNNING


def test_priority_goes_before_fairness():
    engine = engine_with(max_num_seqs=1, scheduling_policy="priority")
    urgent = add(engine, HEAVY, 200, priority=0)
    engine.step()
    light = add(engine, LIGHT, 8, priority=1)
    output = engine.step()
    assert scheduled(output) == {urgent.seq_id: 64}
    assert output.preempted_seq_ids == []
    run_and_check(engine, urgent, light)


def test_a_request_of_high_priority_does_not_wait_for_prompts_of_others():
    engine = engine_with(scheduling_policy="priority")
    add(engine, LIGHT, 300, priority=1)
    engine.step()
    urgent = add(engine, HEAVY, 60, priority=0)
    assert scheduled(engine.step())[urgent.seq_id] == 60


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_victim_for_blocks_belongs_to_the_tenant_served_most(policy):
    """11 usable blocks: the light request came last and would be the victim otherwise."""
    engine = engine_with(num_blocks=12, scheduling_policy=policy)
    old = add(engine, HEAVY, 16, max_tokens=20)
    young = add(engine, HEAVY, 16, max_tokens=20)
    engine.step()
    light = add(engine, LIGHT, 4, max_tokens=20)
    while not old.num_preemptions + young.num_preemptions + light.num_preemptions:
        engine.step()
    assert young.num_preemptions == 1
    run_and_check(engine, old, young, light)


def test_a_refused_head_is_rechecked_once_it_may_preempt():
    """The pool does not get freer, but the other tenant is served meanwhile."""
    engine = engine_with(num_blocks=26, max_model_len=100)
    heavy = add(engine, HEAVY, 70, max_tokens=29)
    engine.step()
    light = add(engine, LIGHT, 90, max_tokens=2)
    steps = 0
    while light.status is not RequestStatus.RUNNING:
        engine.step()
        steps += 1
    assert heavy.num_preemptions == 1
    assert heavy.num_output_tokens < 29
    run_and_check(engine, heavy, light)


def test_two_tenants_do_not_preempt_one_another_endlessly():
    engine = engine_with(max_num_seqs=1, max_model_len=300)
    requests = [add(engine, tenant, 20, max_tokens=200) for tenant in (1, 2)]
    steps = engine.run()
    preemptions = sum(each.num_preemptions for each in requests)
    assert 1 <= preemptions <= 8
    assert steps <= 400 + 2 * preemptions + 2


@pytest.mark.parametrize("overlapped", [False, True])
def test_choices_beams_and_lost_workers(overlapped):
    engine = engine_with(max_num_seqs=4, num_blocks=60, async_scheduling=overlapped)
    heavy = [add(engine, HEAVY, 30, max_tokens=30) for _ in range(8)]
    for _ in range(5):
        engine.step()
    choices = engine.add(prompt(20, 5), 6, n=3, tenant=LIGHT, eos_token_ids=())
    for _ in range(4):
        engine.step()
    engine.lose_workers()
    late = add(engine, OTHER, 12, max_tokens=3)
    engine.run()
    for each in [*heavy, *choices, late]:
        wanted = undisturbed(each.prompt_token_ids, each.max_tokens, each.choice)
        assert engine.tokens_of(each) == wanted
    engine.assert_idle()


class LateGate(FakeGate):
    """Holds a request back from the second time on that it is asked, and others always."""

    def __init__(self) -> None:
        super().__init__()
        self.late = None
        self.num_asked = 0

    def is_blocked(self, candidate) -> bool:
        if candidate.request is self.late:
            self.num_asked += 1
            if self.num_asked > 1:
                self.blocked.add(candidate.request)
        return super().is_blocked(candidate)


def test_no_request_of_its_tenant_takes_the_seat_of_a_victim():
    """What it gave way to has to wait after all, as for a prefix of which the victim had a part."""
    gate = LateGate()
    engine = engine_with(max_num_seqs=2, gates=[gate])
    add(engine, OTHER, 4)
    old = add(engine, HEAVY, 40)
    engine.step()
    light = gate.late = add(engine, LIGHT, 4)
    young = add(engine, HEAVY, 4)
    gate.blocked.add(old)
    output = engine.step()
    assert output.preempted_seq_ids == [old.seq_id]
    assert gate.num_asked == 2
    assert young.status is RequestStatus.WAITING
    gate.unblock(old, light)
    gate.late = None
    engine.step()
    assert light.status is RequestStatus.RUNNING
    run_and_check(engine, old, light, young)


def test_a_victim_is_not_resumed_in_the_same_step():
    """Its first chunk would fit into the rest."""
    engine = engine_with(
        num_blocks=11, long_prefill_token_threshold=16, enable_prefix_caching=False
    )
    heavy = add(engine, HEAVY, 36, max_tokens=4)
    while heavy.num_computed_tokens < 37:
        engine.step()
    light = add(engine, LIGHT, 8, max_tokens=4)
    output = engine.step()
    assert output.preempted_seq_ids == [heavy.seq_id]
    assert scheduled(output) == {light.seq_id: 8}
    assert heavy.status is RequestStatus.PREEMPTED
    run_and_check(engine, heavy, light)
