"""Equal prompts that arrive together compute their shared prefix once, also in chunks."""

import random
import sys

import pytest

from engine_core.request import RequestStatus
from engine_core.scheduler.features import prefix_sharing as prefix_wait
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed

WAITS = RequestStatus.WAITING_FOR_PREFIX


def chunked(**settings):
    """Chunks of 8 tokens leave budget for other requests."""
    return EngineHarness(
        **{
            "block_size": 4,
            "max_num_batched_tokens": 64,
            "long_prefill_token_threshold": 8,
            **settings,
        }
    )


def test_the_second_of_two_equal_prompts_waits_and_computes_only_its_end():
    engine = chunked()
    prompt = list(range(30))
    first, second = (engine.add_one(prompt, max_tokens=3) for _ in range(2))
    assert scheduled(engine.step()) == {first.seq_id: 8}
    assert second.status is WAITS
    assert scheduled(engine.step()) == {first.seq_id: 8}
    assert scheduled(engine.step()) == {first.seq_id: 8}
    # The first fills the seventh block in this step; the end of the prompt fills none.
    assert scheduled(engine.step()) == {first.seq_id: 6, second.seq_id: 2}
    assert second.num_cached_tokens == 28
    engine.run()
    computed = sum(step.total_num_scheduled_tokens for step in engine.runner.steps)
    assert computed == 30 + 2 + 2 * 2
    for each in (first, second):
        assert engine.tokens_of(each) == undisturbed(prompt, 3)
    engine.assert_idle()


def test_a_request_waits_only_for_the_shared_prefix():
    engine = chunked()
    common = list(range(16))
    first = engine.add_one(common + [100] * 30, max_tokens=1)
    second = engine.add_one(common + [200] * 30, max_tokens=1)
    assert scheduled(engine.step()) == {first.seq_id: 8}
    assert scheduled(engine.step()) == {first.seq_id: 8, second.seq_id: 8}
    assert second.num_cached_tokens == 16


def test_other_requests_are_admitted_during_the_wait():
    engine = chunked()
    first, second = (engine.add_one(list(range(30))) for _ in range(2))
    other = engine.add_one([500, 501])
    assert scheduled(engine.step()) == {first.seq_id: 8, other.seq_id: 2}
    assert list(engine.scheduler.waiting) == [second]


@pytest.mark.parametrize(
    "second",
    [
        {"prompt": list(range(1, 31))},
        {"prompt": list(range(30)), "cache_salt": "other"},
        {"prompt": list(range(30)), "prompt_logprobs": 0},
        {"prompt": [0, 1, 2, 3]},
    ],
)
def test_no_wait_for_blocks_that_would_not_be_used(second):
    engine = chunked()
    first = engine.add_one(list(range(30)))
    other = engine.add_one(**second)
    assert scheduled(engine.step()).keys() == {first.seq_id, other.seq_id}


def test_no_wait_without_a_prefix_cache():
    engine = chunked(enable_prefix_caching=False)
    first, second = (engine.add_one(list(range(30))) for _ in range(2))
    assert scheduled(engine.step()).keys() == {first.seq_id, second.seq_id}


def test_when_the_leader_is_aborted_the_next_one_leads():
    engine = chunked()
    prompt = list(range(30))
    first, second, third = (engine.add_one(prompt, max_tokens=2) for _ in range(3))
    engine.step()
    assert {second.status, third.status} == {WAITS}
    engine.scheduler.abort_request(first.request_id)
    assert engine.scheduler.has_work
    assert scheduled(engine.step()) == {second.seq_id: 8}
    assert second.num_cached_tokens == 8
    assert third.status is WAITS
    engine.run()
    assert engine.tokens_of(third) == undisturbed(prompt, 2)
    engine.assert_idle()


def test_preempting_the_leader_ends_the_wait():
    engine = chunked(num_blocks=12)
    old = engine.add_one(list(range(500, 516)), max_tokens=12)
    engine.step()
    engine.step()
    prompt = list(range(26))
    first, second = (engine.add_one(prompt, max_tokens=5) for _ in range(2))
    engine.run()
    assert first.num_preemptions > 0
    for each in (first, second):
        assert engine.tokens_of(each) == undisturbed(prompt, 5)
    assert engine.tokens_of(old) == undisturbed(list(range(500, 516)), 12)
    engine.assert_idle()


def test_a_waiting_request_can_be_aborted():
    engine = chunked()
    first, second = (engine.add_one(list(range(30)), max_tokens=1) for _ in range(2))
    engine.step()
    engine.scheduler.abort_request(second.request_id)
    engine.run()
    assert engine.tokens_of(first) == undisturbed(list(range(30)), 1)
    engine.assert_idle()


def test_the_wait_is_bounded_by_the_leaders_expected_time():
    engine = chunked()
    first, second = (engine.add_one(list(range(800)), max_tokens=1) for _ in range(2))
    for _ in range(99):
        assert scheduled(engine.step()) == {first.seq_id: 8}
        assert second.status is WAITS
    assert scheduled(engine.step()) == {first.seq_id: 8, second.seq_id: 4}
    engine.run()
    engine.assert_idle()


def test_the_wait_for_a_leader_that_yields_to_others_is_bounded():
    engine = EngineHarness(block_size=4, max_num_batched_tokens=32)
    prompt = list(range(800))
    leader = engine.add_one(prompt, max_tokens=1, tenant=1)
    assert scheduled(engine.step()) == {leader.seq_id: 32}
    others = [engine.add_one([600 + number] * 320, max_tokens=1, tenant=2) for number in range(2)]
    assert scheduled(engine.step()) == {others[0].seq_id: 32}
    waiter = engine.add_one(prompt, max_tokens=1, tenant=3)
    num_lost = 0
    while waiter.scheduled_at is None:
        step = scheduled(engine.step())
        num_lost += waiter.status is WAITS and leader.seq_id not in step
    assert 1 < num_lost <= prefix_wait.MAX_LOST_STEPS
    assert leader.num_computed_tokens < 800
    engine.run()
    engine.assert_idle()
    for each in (leader, waiter, *others):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 1)


def test_a_leader_that_yields_but_gets_its_tokens_is_waited_for():
    """Requests of less-served tenants arrive in each step, but also wait for the prefix."""
    engine = chunked()
    prompt = list(range(300))
    leader = engine.add_one(prompt, max_tokens=1, tenant=1)
    others = []
    for number in range(36):
        if number < 10:
            others.append(engine.add_one(prompt, max_tokens=1, tenant=2))
        assert scheduled(engine.step()) == {leader.seq_id: 8}
        assert all(each.status is WAITS for each in others)
    engine.run()
    computed = sum(step.total_num_scheduled_tokens for step in engine.runner.steps)
    assert computed == 300 + 4 * len(others)
    engine.assert_idle()


def test_steps_lost_to_one_leader_count_when_it_waits_for_the_next():
    """Each leader is aborted in the middle of its prompt, until one computes enough of it."""
    engine = chunked()
    prompt = list(range(400))
    requests = [engine.add_one(prompt, max_tokens=1) for _ in range(12)]
    for number in range(prefix_wait.MAX_LOST_STEPS):
        assert scheduled(engine.step()) == {requests[number].seq_id: 8}
        assert all(each.status is WAITS for each in requests[number + 1 :])
        engine.scheduler.abort_request(requests[number].request_id)
    rest = requests[prefix_wait.MAX_LOST_STEPS :]
    assert scheduled(engine.step()) == {each.seq_id: 8 for each in rest}
    engine.run()
    engine.assert_idle()


def test_a_request_may_wait_next_for_a_leader_that_shares_more():
    engine = chunked()
    shared = list(range(80))
    first = engine.add_one(shared[:16] + [500] * 60, max_tokens=1)
    second = engine.add_one(shared, max_tokens=1)
    third = engine.add_one(shared, max_tokens=1)
    assert scheduled(engine.step()) == {first.seq_id: 8}
    assert scheduled(engine.step()) == {first.seq_id: 8, second.seq_id: 8}
    for _ in range(7):
        assert third.status is WAITS
        assert scheduled(engine.step())[second.seq_id] == 8
    assert second.num_computed_tokens == 80
    assert (third.num_cached_tokens, third.num_computed_tokens) == (76, 80)
    engine.run()
    engine.assert_idle()


def test_no_wait_for_a_leader_behind_the_cached_prefix():
    engine = chunked()
    prompt = list(range(64))
    engine.add_one(prompt[:48], max_tokens=1)
    engine.run()
    slow = engine.add_one(prompt, max_tokens=1, prompt_logprobs=0)  # computes all of it
    late = engine.add_one(prompt, max_tokens=1)
    assert scheduled(engine.step()) == {slow.seq_id: 8, late.seq_id: 8}
    assert late.num_cached_tokens == 48
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize(("num_shared", "waits"), [(68, True), (66, False)])
def test_no_wait_for_less_than_a_sixteenth_of_a_chunk(num_shared, waits):
    """Chunks of 64 tokens: waiting is worth a step for four of them, not for two."""
    engine = EngineHarness(
        block_size=2, max_num_batched_tokens=256, long_prefill_token_threshold=64
    )
    prompt = list(range(200))
    leader = engine.add_one(prompt, max_tokens=1)
    other = engine.add_one(prompt[:num_shared] + [900] * 40, max_tokens=1)
    step = scheduled(engine.step())
    assert step[leader.seq_id] == 64
    assert (other.status is WAITS) == waits
    engine.run()
    assert other.num_cached_tokens == (num_shared if waits else 64)
    engine.assert_idle()


def test_requests_that_share_less_are_admitted_first():
    engine = chunked()
    prompt = list(range(40))
    leader = engine.add_one(prompt, max_tokens=1)
    ends = {num: engine.add_one(prompt[:num] + [900] * 8) for num in (32, 16, 24)}
    for num_computed in (8, 16, 24, 32):
        step = scheduled(engine.step())
        assert step[leader.seq_id] == 8
        for num, request in ends.items():
            assert (request.seq_id in step) == (num <= num_computed)
    for num, request in ends.items():
        assert request.num_cached_tokens == num


def test_no_wait_for_blocks_that_the_leader_has_lost():
    """The blocks are outside its window, and another request has allocated them meanwhile."""
    engine = chunked(num_blocks=26, windows=(8,))
    leader = engine.add_one(list(range(160)), max_tokens=1)
    for _ in range(6):
        engine.step()
    taker = engine.add_one(list(range(500, 560)), max_tokens=8)
    for _ in range(10):
        engine.step()
    assert taker.num_computed_tokens >= 56
    late = engine.add_one(list(range(12)), max_tokens=1)
    assert scheduled(engine.step())[late.seq_id] == 8
    assert leader.num_computed_tokens < 160


@pytest.mark.parametrize("seed", range(4))
def test_with_room_for_everyone_a_prefix_is_computed_once(seed):
    """In any order of arrival, the prefix is computed once, and so is the rest of each prompt."""
    rng = random.Random(seed)
    for _ in range(10):
        settings = {
            "max_num_batched_tokens": rng.choice([16, 33, 64, 200]),
            "long_prefill_token_threshold": rng.choice([0, 0, 5, 8, 32]),
            "max_num_seqs": 16,  # with few seats, tenants preempt each other
            "windows": rng.choice([(None,), (None,), (None, 6), (9,), (5, None, 14)]),
            "scheduling_policy": rng.choice(["fcfs", "priority", "continuum"]),
            "async_scheduling": rng.random() < 0.5,
            "enable_chunked_prefill": rng.random() < 0.7,
        }
        engine = EngineHarness(num_blocks=4000, block_size=4, **settings)
        shared = [position % 890 for position in range(rng.randint(20, 300))]
        requests = []
        for number in range(rng.randint(2, 16)):
            for _ in range(rng.randint(0, 5)):
                engine.step()
            prompt = shared + [900 + number] * rng.randint(0, 20)
            tenant, priority = rng.randrange(4), rng.randint(-1, 1)
            requests.append(engine.add_one(prompt, 1, tenant=tenant, priority=priority))
        while engine.scheduler.has_work or engine.in_flight:
            engine.step()
        num_computed = sum(each.total_num_scheduled_tokens for each in engine.runner.steps)
        # The last token of a prompt and tokens after its last full block are always computed.
        prompts = [each.prompt_token_ids for each in requests]
        blocks = {tuple(each[:end]) for each in prompts for end in range(4, len(each), 4)}
        once = 4 * len(blocks) + sum((len(each) - 1) % 4 + 1 for each in prompts)
        # A few tokens may be computed twice instead of waiting.
        chunk = settings["long_prefill_token_threshold"] or settings["max_num_batched_tokens"]
        spared = min(chunk, settings["max_num_batched_tokens"]) // prefix_wait.MIN_SHARED_FRACTION
        assert num_computed <= once + len(prompts) * spared
        for each in requests:
            assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 1)
        engine.assert_idle()


def num_lines_run(function):
    """Return the number of executed Python lines of a call."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.interpreted
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_step_does_not_visit_requests_that_keep_waiting(policy):
    costs = []
    for num_waiting in (3, 200):
        engine = chunked(scheduling_policy=policy)
        for seed in range(5):
            engine.add_one([900 + seed], max_tokens=50)
        leader = engine.add_one(list(range(80)), max_tokens=1)
        for _ in range(num_waiting):
            engine.add_one(list(range(80)), max_tokens=1)
        engine.step()
        engine.step()
        assert len(engine.scheduler.waiting) == num_waiting
        costs.append(num_lines_run(engine.send))
        engine.receive()
        assert leader.num_computed_tokens == 24
    # Garbage collection in between may run a few other lines.
    assert 50 < costs[1] < costs[0] + 40
