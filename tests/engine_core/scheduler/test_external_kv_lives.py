"""Random lives of requests whose KV may be elsewhere: whatever the connector does.

It has some of a prompt or does not know yet, loads in the step or while others compute, in any
order, late, or badly; it keeps blocks of requests that are over; requests are aborted and
preempted, caches are reset, workers die. Everyone ends with the tokens of an undisturbed run, who
reads what was not loaded is found by the runner, and all books agree after every operation.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kv_cache.integrity import check
from engine_core.kv_connector.base import ASK_AGAIN, NO_MATCH, Match
from proto.engine_io import FinishReason
from proto.kv_transfer import KVConnectorOutput
from tests.engine_core.scheduler.test_random_sequences import expected, prompt_of
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.kv_connector import FakeConnector

BLOCK_SIZE = 4

additions = st.tuples(
    st.just("add"),
    st.integers(0, 2),
    st.integers(1, 40),
    st.integers(1, 10),
    st.sampled_from([1, 1, 1, 2, 3]),
)
steps = st.tuples(st.just("step"))
loads = st.tuples(st.just("finish_load"), st.integers(0, 3))
operations = st.lists(
    st.one_of(
        *(additions, additions, steps, steps, steps, loads, loads),
        st.tuples(st.just("abort"), st.integers(0, 30), st.sampled_from([None, 0, 1])),
        st.tuples(st.just("tell_early"), st.integers(0, 3)),
        st.tuples(st.just("wake"), st.integers(0, 30)),
        st.tuples(st.just("send"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.booleans()),
        st.tuples(st.just("lose_workers")),
    ),
    max_size=60,
)
settings_of_engine = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(16, 40),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 64),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "windows": st.sampled_from([(None,), (None,), (None, 6), (9,), (5, None, 14)]),
        "async_scheduling": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.3]),
        "load_failure_policy": st.sampled_from(["recompute", "recompute", "fail"]),
    }
)


class Life:
    """One random run; `seed` decides what the connector says and does."""

    def __init__(self, seed, **config) -> None:
        config["num_blocks"] *= len(config.get("windows", (None,)))
        self.draw = random.Random(seed)
        self.connector = FakeConnector(self.answer, fails=self.fails, delays=self.delays)
        self.engine = EngineHarness(
            block_size=BLOCK_SIZE,
            max_model_len=52,
            connector=self.connector,
            crashes_until_alone=1000,
            **config,
        )
        self.policy = config.get("load_failure_policy", "recompute")
        self.requests = []
        self.asked = []
        self.aborted = set()
        self.patient = True

    # What the connector does

    def answer(self, request, num_local):
        kind = self.draw.choice(["nothing", "later", "now", "async", "async"])
        if kind == "nothing":
            return NO_MATCH
        if kind == "later" and self.patient:
            self.asked.append(request)
            return ASK_AGAIN
        num_blocks = self.draw.randint(0, 11)
        return Match(num_blocks * BLOCK_SIZE, is_async=kind == "async")

    def fails(self, load, blocks):
        if self.draw.random() < 0.7:
            return set()
        return {block for block in blocks if self.draw.random() < 0.3}

    def delays(self, request):
        return self.draw.random() < 0.3

    # What happens

    def do(self, operation) -> None:
        kind, *details = operation
        getattr(self, kind)(*details)
        assert check(self.engine.kv_cache) == []

    def add(self, family, length, max_tokens, n=1) -> None:
        self.requests += self.engine.add(prompt_of(family, length), max_tokens, n=n)

    def step(self) -> None:
        waits = bool(self.engine.in_flight)
        scheduler = self.engine.scheduler
        output = self.engine.step()
        if not output.total_num_scheduled_tokens and not waits:
            assert scheduler.external.is_awaited or not scheduler.has_work, "nobody progresses"

    def abort(self, index, choice) -> None:
        if index < len(self.requests):
            request_id = self.requests[index].request_id
            self.engine.scheduler.abort(request_id, choice)
            self.aborted |= {
                (request_id, each) for each in range(3) if choice is None or each == choice
            }

    def finish_load(self, index) -> None:
        under_way = list(self.connector.under_way)
        if index < len(under_way):
            self.engine.report(self.connector.finish(under_way[index], self.engine.runner))

    def tell_early(self, index) -> None:
        """A block of a load that is under way turns out bad before the load is over."""
        under_way = list(self.connector.under_way.values())
        if index < len(under_way):
            load = under_way[index]
            filled = load.blocks(BLOCK_SIZE, self.engine.runner.windows)
            bad = self.draw.choice(filled)[2]
            load.bad.add(bad)
            self.engine.report(KVConnectorOutput(invalid_block_ids=[bad]))

    def wake(self, index) -> None:
        if index < len(self.asked):
            self.engine.wake(self.asked[index])

    def send(self, index) -> None:
        if index < len(self.connector.sending):
            self.engine.report(self.connector.sent(self.connector.sending[index]))

    def reset(self, preempting) -> None:
        self.engine.scheduler.reset_prefix_cache(preempting=preempting)

    def lose_workers(self) -> None:
        epoch = self.engine.scheduler.worker_epoch
        self.engine.lose_workers(epoch + 1)
        assert self.engine.kv_cache.usage == 0

    def end(self) -> None:
        self.run_out()
        self.engine.assert_at_rest()
        for request in self.requests:
            self.compare(request)

    def run_out(self) -> None:
        self.patient = False
        for _ in range(10_000):
            for each in self.asked:
                self.engine.wake(each)
            self.step()
            for _ in range(4):
                self.finish_load(0)
                self.send(0)
            if not self.engine.scheduler.num_unfinished and not self.connector.under_way:
                break
        for _ in range(4):
            self.step()
        while self.connector.sending:
            self.send(0)

    def compare(self, request) -> None:
        key = (request.request_id, request.choice)
        tokens = self.engine.tokens_of(request)
        wanted = expected(request.prompt_token_ids, request.max_tokens, request.choice)
        reason = self.engine.final.get(key)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == wanted
            return
        assert tokens == wanted[: len(tokens)]
        if reason is None:
            assert key in self.aborted
        else:
            assert (reason, self.policy) == (FinishReason.ERROR, "fail")


@settings(max_examples=300, deadline=None)
@given(config=settings_of_engine, seed=st.integers(0, 10**6), script=operations)
def test_whatever_a_connector_does_everyone_ends_with_the_tokens_of_an_undisturbed_run(
    config, seed, script
):
    life = Life(seed, **config)
    for operation in script:
        life.do(operation)
    life.end()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 8), (8, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_where_loads_and_requests_that_run_lack_room(windows, overlapped, seed):
    """KVC-11: loads and running requests never hold what each of them lacks."""
    life = Life(
        seed,
        async_scheduling=overlapped,
        num_blocks=16,
        windows=windows,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    for each in range(30):
        life.add(each % 3, 4 + 7 * each % 36, 10)
    life.end()
    assert sum(len(each.preempted_at) for each in life.requests) > 0
