"""Random lives of requests: whatever happens, everyone ends, with the same tokens.

Every step progresses unless all that is left is held by a gate or a pause.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kv_cache.integrity import check
from proto.engine_io import FinishReason
from tests.fakes.engine_harness import EOS, EngineHarness
from tests.fakes.gates import FakeGate
from tests.fakes.paged_runner import undisturbed

BLOCK_SIZE = 4

additions = st.tuples(
    st.just("add"),
    st.integers(0, 2),  # which family of prompts: members share a prefix
    st.integers(1, 40),  # prompt length
    st.integers(1, 12),  # max_tokens
    st.integers(1, 3),  # n
    st.integers(-1, 1),  # priority
    st.sampled_from([0, 0, 0, 1, 1, 2]),  # tenant
)
aborts = st.tuples(st.just("abort"), st.integers(0, 30), st.sampled_from([None, 0, 1]))
steps = st.tuples(st.just("step"))
late_aborts = st.tuples(st.just("abort_in_flight"), st.integers(0, 30))
pauses = st.tuples(st.just("pause"), st.sampled_from(["finish_running", "freeze"]))
resumptions = st.tuples(st.just("resume"))
closures = st.tuples(st.just("close"), st.integers(0, 30))
openings = st.tuples(st.just("open"), st.integers(0, 30))
operations = st.lists(
    st.one_of(
        *(additions, aborts, steps, steps, steps, late_aborts),
        *(pauses, resumptions, resumptions, closures, openings),
    ),
    max_size=60,
)
fractions = st.tuples(*[st.sampled_from([0.3, 0.5, 0.7, 0.9, 1.0, 1.0, 1.0])] * 3).map(sorted)

settings_of_engine = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(16, 40),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 64),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "windows": st.sampled_from([(None,), (None,), (None, 6), (9,), (5, None, 14)]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3, 8, 16]),
        "max_step_stretch": st.sampled_from([0.0, 1.1]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "async_scheduling": st.booleans(),
        "scheduler_reserve_full_isl": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    }
)


def prompt_of(family: int, length: int) -> list[int]:
    return [(family * 100 + position) % 900 for position in range(length)]


def expected(prompt: list[int], max_tokens: int, choice: int) -> list[int]:
    tokens = undisturbed(prompt, max_tokens, choice)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


class Life:
    """One random run, with what must come out of it."""

    def __init__(self, thresholds=(1.0, 1.0, 1.0), **config) -> None:
        # A pool in which the longest request has room, however many groups there are.
        config["num_blocks"] *= len(config.get("windows", (None,)))
        resume, stop, preempt = thresholds
        self.gate = FakeGate()
        self.engine = EngineHarness(
            block_size=BLOCK_SIZE,
            max_model_len=52,
            gates=[self.gate],
            resume_admission_below=resume,
            stop_admission_above=stop,
            preempt_above=preempt,
            **config,
        )
        # Slow enough that prompts are paced, where they are.
        self.engine.step_seconds = lambda output: 0.1 * output.total_num_scheduled_tokens
        self.requests = []
        self.aborted = set()

    def do(self, operation) -> None:
        kind, *details = operation
        getattr(self, kind)(*details)
        assert check(self.engine.kv_cache) == []

    def add(self, family, length, max_tokens, n, priority=0, tenant=0) -> None:
        prompt = prompt_of(family, length)
        self.requests += self.engine.add(prompt, max_tokens, n=n, priority=priority, tenant=tenant)

    def step(self) -> None:
        waits = bool(self.engine.in_flight)
        output = self.engine.step()
        if output.total_num_scheduled_tokens == 0 and not waits:
            assert not self.engine.scheduler.has_work, "somebody could have progressed"

    def pause(self, mode) -> None:
        self.engine.scheduler.pause(mode)

    def resume(self) -> None:
        self.engine.scheduler.resume()

    def close(self, index) -> None:
        if index < len(self.requests):
            self.gate.closed_for.add(self.requests[index])

    def open(self, index) -> None:
        if index < len(self.requests):
            self.gate.open_for(self.requests[index])

    def abort(self, index, choice) -> None:
        if index < len(self.requests):
            request_id = self.requests[index].request_id
            self.engine.scheduler.abort(request_id, choice)
            self.aborted |= {
                (request_id, each) for each in range(3) if choice is None or each == choice
            }

    def abort_in_flight(self, index) -> None:
        self.engine.send()
        self.abort(index, None)
        self.engine.receive()

    def end(self) -> None:
        self.resume()
        self.gate.open_for(*self.requests)
        self.engine.run()
        self.engine.assert_at_rest()
        for request in self.requests:
            key = (request.request_id, request.choice)
            tokens = self.engine.tokens_of(request)
            wanted = expected(request.prompt_token_ids, request.max_tokens, request.choice)
            if key in self.engine.final:
                assert tokens == wanted
                reason = FinishReason.STOP if wanted[-1] == EOS else FinishReason.LENGTH
                assert self.engine.final[key] is reason
            else:
                assert key in self.aborted
                assert tokens == wanted[: len(tokens)]


@settings(max_examples=300, deadline=None)
@given(config=settings_of_engine, thresholds=fractions, script=operations)
def test_whatever_arrives_everyone_ends_with_the_tokens_of_an_undisturbed_run(
    config, thresholds, script
):
    life = Life(thresholds, **config)
    for operation in script:
        life.do(operation)
    life.end()


@pytest.mark.parametrize("num_tenants", [1, 3])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("windows", [(None,), (None, 8), (8, 4)])
def test_the_same_under_heavy_preemption(policy, windows, overlapped, num_tenants):
    life = Life(
        scheduling_policy=policy,
        async_scheduling=overlapped,
        num_blocks=16 if None in windows else 7,
        windows=windows,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
    )
    for each in range(40):
        life.add(each % 3, 4 + each % 5, 12, 1, -each, each * each % 7 % num_tenants)
    life.end()
    assert sum(each.num_preemptions for each in life.requests) >= 20
