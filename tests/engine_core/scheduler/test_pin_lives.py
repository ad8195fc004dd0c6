"""Random lives of jobs: turns, tools, pins that expire or give way, with and without KV elsewhere.

After every operation the pins' books are counted anew, one block at a time, and the cache's own
check holds. Everyone ends with the tokens of an undisturbed run.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kv_connector.base import NO_MATCH
from proto.agents import AgentHint
from tests.engine_core.scheduler.test_external_kv_lives import Life
from tests.engine_core.scheduler.test_random_sequences import prompt_of
from tests.fakes.clock import FakeClock

turns = st.tuples(
    st.just("turn"),
    st.integers(0, 4),
    st.integers(1, 36),
    st.integers(1, 10),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([None, None, None, 0.0, 500.0, 10**9, float("nan")]),
    st.booleans(),
)
steps = st.tuples(st.just("step"))
operations = st.lists(
    st.one_of(
        *(turns, turns, steps, steps, steps),
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 40), st.integers(1, 10)),
        st.tuples(st.just("read"), st.integers(0, 30), st.sampled_from(["", "a", "b"])),
        st.tuples(st.just("tick"), st.sampled_from([0.01, 0.5, 1.9, 5.0])),
        st.tuples(st.just("abort"), st.integers(0, 30), st.sampled_from([None, 0, 1])),
        st.tuples(st.just("stop"), st.integers(0, 30)),
        st.tuples(st.just("finish_load"), st.integers(0, 3)),
        st.tuples(st.just("wake"), st.integers(0, 30)),
        st.tuples(st.just("send"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.booleans()),
        st.tuples(st.just("lose_workers")),
    ),
    max_size=60,
)
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(16, 40),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 64),
        "windows": st.sampled_from([(None,), (None,), (None, 6), (9,)]),
        "async_scheduling": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.3]),
        "pin_policy": st.sampled_from(["rule", "rule", "fixed", "none"]),
        "max_pinned_share": st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        "max_pinned_share_per_tenant": st.sampled_from([0.2, 1.0]),
    }
)


class JobLife(Life):
    """elsewhere: the connector has something now and then."""

    def __init__(self, seed, *, elsewhere, **config) -> None:
        self.clock = FakeClock()
        self.elsewhere = elsewhere
        super().__init__(seed, scheduling_policy="continuum", clock=self.clock, **config)
        self.engine.step_seconds = lambda output: 0.2 * bool(output.total_num_scheduled_tokens)
        self.limit = int(self.engine.kv_cache.num_usable_blocks * config["max_pinned_share"])
        self.tenant_limit = min(
            self.limit,
            int(
                self.engine.kv_cache.num_usable_blocks
                * config.get("max_pinned_share_per_tenant", 1.0)
            ),
        )

    def answer(self, request, num_local):
        return super().answer(request, num_local) if self.elsewhere else NO_MATCH

    def delays(self, request):
        return self.elsewhere and super().delays(request)

    def do(self, operation) -> None:
        super().do(operation)
        self.count()

    def turn(self, job, length, max_tokens, n, ttl_ms, is_last) -> None:
        """Jobs 0 and 1 are one tenant's, 2 and 3 another's; some share a prefix."""
        agent = AgentHint(f"job {job}", is_last, ttl_ms)
        self.requests += self.engine.add(
            prompt_of(job % 3, length), max_tokens, n=n, agent=agent, tenant=job // 2
        )

    def read(self, index, tool) -> None:
        if index < len(self.requests):
            request = self.requests[index]
            self.engine.scheduler.end_turn(request.request_id, request.agent.job, tool)

    def tick(self, seconds) -> None:
        self.clock.now += seconds

    def stop(self, index) -> None:
        """The front end has found a stop string."""
        if index < len(self.requests):
            request = self.requests[index]
            self.engine.scheduler.abort(request.request_id, request.choice, stopped=True)
            self.aborted.add((request.request_id, request.choice))

    def count(self) -> None:
        scheduler, pool = self.engine.scheduler, self.engine.kv_cache.pool
        pins = list(scheduler._pins)
        references = Counter(block for pin in pins for block in pin.blocks)
        assert references == pool.pinned.counts
        assert all(pin.blocks and len(set(pin.blocks)) == len(pin.blocks) for pin in pins)
        alone = [block for block, count in references.items() if pool.ref_counts[block] == count]
        assert self.engine.kv_cache.num_free_blocks == pool.num_free + len(alone)
        assert len(references) <= self.limit
        assert len({pin.job for pin in pins}) == len(pins)
        for tenant in {pin.tenant for pin in pins}:
            own = {block for pin in pins if pin.tenant == tenant for block in pin.blocks}
            assert len(own) <= self.tenant_limit
        assert all(self.clock() - pin.ended <= 3600 or pin.is_awaited for pin in pins), (
            "nothing is kept for ever"
        )

    def run_out(self) -> None:
        super().run_out()
        self.clock.now += 10_000
        self.engine.step()
        assert len(self.engine.scheduler._pins) == 0
        assert self.engine.scheduler.take_stats().num_pinned_blocks == 0


@settings(max_examples=100, deadline=None)
@given(config=engines, elsewhere=st.booleans(), seed=st.integers(0, 10**6), script=operations)
def test_pins_change_no_token_and_their_books_hold(config, elsewhere, seed, script):
    life = JobLife(seed, elsewhere=elsewhere, **config)
    for operation in script:
        life.do(operation)
    life.end()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_where_room_is_lacking(overlapped, seed):
    """Pins give way as long as that helps; the pool is never too small because of them."""
    life = JobLife(
        seed,
        elsewhere=bool(seed),
        async_scheduling=overlapped,
        num_blocks=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_pinned_share=1.0,
        pin_policy="fixed",
    )
    given_up = 0
    for each in range(40):
        life.do(("turn", each % 5, 4 + 7 * each % 32, 8, 1, 10**9, False))
        for _ in range(3):
            life.do(("step",))
        given_up += life.engine.scheduler.take_stats().num_pins_given_up
    life.end()
    assert given_up > 0
