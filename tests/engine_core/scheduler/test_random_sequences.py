"""Random lives of requests: whatever happens, everyone ends, with the same tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kv_cache.integrity import check
from proto.engine_io import FinishReason
from tests.fakes.engine_harness import EOS, EngineHarness
from tests.fakes.paged_runner import undisturbed

BLOCK_SIZE = 4

additions = st.tuples(
    st.just("add"),
    st.integers(0, 2),  # which family of prompts: members share a prefix
    st.integers(1, 40),  # prompt length
    st.integers(1, 12),  # max_tokens
    st.integers(1, 3),  # n
)
aborts = st.tuples(st.just("abort"), st.integers(0, 30), st.sampled_from([None, 0, 1]))
steps = st.tuples(st.just("step"))
late_aborts = st.tuples(st.just("abort_in_flight"), st.integers(0, 30))
operations = st.lists(st.one_of(additions, aborts, steps, steps, steps, late_aborts), max_size=60)

settings_of_engine = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(16, 40),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 64),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "windows": st.sampled_from([(None,), (None,), (None, 6), (9,), (5, None, 14)]),
    }
)


def prompt_of(family: int, length: int) -> list[int]:
    return [(family * 100 + position) % 900 for position in range(length)]


def expected(prompt: list[int], max_tokens: int, choice: int) -> list[int]:
    tokens = undisturbed(prompt, max_tokens, choice)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


class Life:
    """One random run, with what must come out of it."""

    def __init__(self, **config) -> None:
        # A pool in which the longest request has room, however many groups there are.
        config["num_blocks"] *= len(config.get("windows", (None,)))
        self.engine = EngineHarness(block_size=BLOCK_SIZE, max_model_len=52, **config)
        self.requests = []
        self.aborted = set()

    def do(self, operation) -> None:
        kind, *details = operation
        getattr(self, kind)(*details)
        assert check(self.engine.kv_cache) == []

    def add(self, family, length, max_tokens, n) -> None:
        self.requests += self.engine.add(prompt_of(family, length), max_tokens, n=n)

    def step(self) -> None:
        unfinished = self.engine.scheduler.num_unfinished
        output = self.engine.step()
        assert (output.total_num_scheduled_tokens > 0) == (unfinished > 0)

    def abort(self, index, choice) -> None:
        if index < len(self.requests):
            request_id = self.requests[index].request_id
            self.engine.scheduler.abort(request_id, choice)
            self.aborted |= {
                (request_id, each) for each in range(3) if choice is None or each == choice
            }

    def abort_in_flight(self, index) -> None:
        output = self.engine.scheduler.schedule()
        self.abort(index, None)
        self.engine.collect(output)

    def end(self) -> None:
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


@settings(max_examples=150, deadline=None)
@given(config=settings_of_engine, script=operations)
def test_whatever_arrives_everyone_ends_with_the_tokens_of_an_undisturbed_run(config, script):
    life = Life(**config)
    for operation in script:
        life.do(operation)
    life.end()


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8, 4)])
def test_the_same_under_heavy_preemption(windows):
    life = Life(
        num_blocks=16 if None in windows else 7,
        windows=windows,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
    )
    for each in range(40):
        life.add(each % 3, 4 + each % 5, 12, 1)
    life.end()
    assert sum(each.num_preemptions for each in life.requests) >= 20
