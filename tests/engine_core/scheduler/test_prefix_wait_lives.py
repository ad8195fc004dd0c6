"""However they come, requests that begin alike compute what they share once, and all of them end.

What a life computes is counted against what it has to: a prefix once, then everyone's own end.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.request import RequestStatus
from engine_core.scheduler.prefix_wait import CROWD, PrefixWait
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.paged_runner import undisturbed

BLOCK_SIZE = 4

settings_of_engine = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([16, 33, 64, 200]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5, 8, 32]),
        "max_num_seqs": st.sampled_from([2, 4, 16]),
        "windows": st.sampled_from([(None,), (None,), (None, 6), (9,), (5, None, 14)]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "continuum"]),
        "async_scheduling": st.booleans(),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
    }
)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 5),  # steps before it
        st.integers(0, 20),  # tokens of its own
        st.integers(0, 3),  # tenant
        st.integers(-1, 1),  # priority
    ),
    min_size=2,
    max_size=16,
)


def gate_of(engine):
    """The gate, and that its books agree with each other and with the requests."""
    (gate,) = (each for each in engine.scheduler._gates if isinstance(each, PrefixWait))
    by_block = {}
    for leaders in gate._by_first_block.values():
        assert leaders
        by_block |= leaders
    assert by_block == gate._leaders
    held = {each for each in engine.scheduler.waiting if each.status is WAITS}
    assert held == {waiter.request for waiter in gate._waiters.values()}
    tickets = {
        handle: number for leader in by_block.values() for _, (number, handle) in leader.waiters
    }
    for request in held:
        assert tickets[request.handle] == gate._waiters[request.handle].number
    return gate


WAITS = RequestStatus.WAITING_FOR_PREFIX


def finish(engine):
    while engine.scheduler.has_work or engine.in_flight:
        engine.step()
        gate_of(engine)
    gate = gate_of(engine)
    assert not gate._leaders
    assert not gate._num_lost
    engine.assert_at_rest()


@settings(max_examples=150, deadline=None)
@given(config=settings_of_engine, num_shared=st.integers(20, 300), script=arrivals)
def test_with_room_for_everyone_a_prefix_is_computed_once(config, num_shared, script):
    config["max_num_seqs"] = 16  # where seats are short, tenants take each other's
    engine = EngineHarness(num_blocks=4000, block_size=BLOCK_SIZE, **config)
    shared = [position % 890 for position in range(num_shared)]
    requests = []
    for number, (num_steps, num_own, tenant, priority) in enumerate(script):
        for _ in range(num_steps):
            engine.step()
            gate_of(engine)
        prompt = shared + [900 + number] * num_own
        requests.append(engine.add_one(prompt, 1, tenant=tenant, priority=priority))
    finish(engine)
    num_computed = sum(each.total_num_scheduled_tokens for each in engine.runner.steps)
    prompts = [each.prompt_token_ids for each in requests]
    once = len(blocks_of(prompts)) * BLOCK_SIZE + sum(map(num_outside_blocks, prompts))
    # A little may be computed twice rather than waited for.
    chunk = min(value for value in longest_chunk(config) if value)
    assert num_computed <= once + len(prompts) * (chunk // CROWD)
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 1)


def longest_chunk(config):
    return config["max_num_batched_tokens"], config["long_prefill_token_threshold"]


def num_outside_blocks(prompt):
    """Tokens at the end that nobody can find: the last one is always computed."""
    return (len(prompt) - 1) % BLOCK_SIZE + 1


def blocks_of(prompts):
    """The different blocks that can be found, each with all before it."""
    return {
        tuple(prompt[:end])
        for prompt in prompts
        for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE)
    }


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 4), st.integers(0, 3), st.integers(-1, 1)),
        st.tuples(st.just("step"), st.integers(1, 8)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("reset")),
        st.tuples(st.just("lose")),
        st.tuples(st.just("pause"), st.sampled_from(["finish_running", "freeze"])),
        st.tuples(st.just("resume")),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(config=settings_of_engine, num_blocks=st.integers(30, 60), script=operations)
def test_whatever_becomes_of_leaders_everyone_ends(config, num_blocks, script):
    """A pool that is too small, aborts, resets, pauses, and workers that die."""
    num_blocks *= len(config["windows"])
    engine = EngineHarness(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=112, **config
    )
    requests, aborted, epoch = [], set(), 1
    for kind, *details in script:
        if kind == "add":
            family, tenant, priority = details
            prompt = [family * 100 + position for position in range(100 - 10 * family)]
            requests.append(engine.add_one(prompt, 8, tenant=tenant, priority=priority))
        elif kind == "abort" and requests:
            request = requests[details[0] % len(requests)]
            engine.scheduler.abort(request.request_id)
            aborted.add(request)
        elif kind == "reset":
            engine.scheduler.reset_prefix_cache(preempting=True)
        elif kind == "lose":
            epoch += 1
            engine.lose_workers(epoch)
        elif kind == "pause":
            engine.scheduler.pause(*details)
        elif kind == "resume":
            engine.scheduler.resume()
        for _ in range(*details) if kind == "step" else ():
            engine.step()
            gate_of(engine)
    engine.scheduler.resume()
    finish(engine)
    for each in requests:
        wanted = undisturbed(each.prompt_token_ids, 8)
        tokens = engine.tokens_of(each)
        ended = (each.request_id, each.choice) in engine.final
        assert ended or each in aborted
        assert wanted[: len(tokens)] == tokens
