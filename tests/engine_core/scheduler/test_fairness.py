"""Fairness between tenants, measured in steps, under endless floods."""

import itertools
from collections import defaultdict
from statistics import median

import pytest

from tests.fakes.engine_harness import EngineHarness

FLOOD, QUIET = 1, 2
STEP_TOKENS = 64
PROBES = (20, 60, 150)
"""Prompts that fit a step beside those who decode, fill it, or take several."""

FLOODS = {
    "long prompts": ((500, 4), {}),
    "short prompts": ((10, 60), {}),
    "answers that fill the pool": ((60, 300), {"num_blocks": 300}),
    "a pool for two of the longest": ((60, 100), {"num_blocks": 303}),
    "hardly any seats": ((500, 50), {"max_num_seqs": 2}),
    "decodes that fill a step": ((10, 200), {"max_num_seqs": 100, "num_blocks": 4000}),
}


class Flooded:
    """An engine in which one tenant always has forty requests waiting."""

    def __init__(self, flood, **settings) -> None:
        self.flood = flood
        self.numbers = itertools.count()
        self.engine = EngineHarness(
            **{
                "num_blocks": 500,
                "block_size": 4,
                "max_num_batched_tokens": STEP_TOKENS,
                "max_num_seqs": 16,
                "max_model_len": 600,
                **settings,
            }
        )

    def add(self, tenant, length, max_tokens):
        number = next(self.numbers)
        prompt = [(number * 37 + position * 7) % 900 for position in range(length)]
        return self.engine.add_one(prompt, max_tokens, tenant=tenant, eos_token_ids=())

    def pour(self) -> None:
        while self.flood and len(self.engine.scheduler.waiting) < 40:
            self.add(FLOOD, *self.flood)

    def steps(self, number) -> None:
        for _ in range(number):
            self.pour()
            self.engine.step()

    def steps_to_first_token(self, length) -> int:
        """Return the steps of a request that arrives during a step, which counts as the first."""
        self.pour()
        if self.flood:
            self.engine.send()
        probe = self.add(QUIET, length, 8)
        steps = 0
        if self.flood:
            self.engine.receive()
            steps = 1
        while not self.engine.tokens_of(probe):
            self.steps(1)
            steps += 1
        while self.engine.finish_reason_of(probe) is None:
            self.steps(1)
        return steps


def waits(flood, settings):
    """Median steps to the first token of each kind of probe, one probe after another."""
    engine = Flooded(flood, **settings)
    engine.steps(30 if flood else 0)
    found = defaultdict(list)
    for length in PROBES * 3:
        found[length].append(engine.steps_to_first_token(length))
        engine.steps(12)
    return {length: median(found[length]) for length in PROBES}


@pytest.mark.parametrize(
    ("kind", "overlapped"), [(kind, number % 2 > 0) for number, kind in enumerate(FLOODS)]
)
def test_under_a_flood_the_first_token_is_two_steps_later_at_most(kind, overlapped):
    flood, settings = FLOODS[kind]
    settings = {**settings, "async_scheduling": overlapped}
    idle, flooded = waits(None, settings), waits(flood, settings)
    assert all(flooded[length] <= idle[length] + 2 for length in PROBES), (idle, flooded)


def test_a_flood_delays_the_first_token_little_by_priority():
    flood, settings = FLOODS["answers that fill the pool"]
    settings = {**settings, "scheduling_policy": "priority"}
    idle, flooded = waits(None, settings), waits(flood, settings)
    assert all(flooded[length] <= idle[length] + 2 for length in PROBES), (idle, flooded)


def test_without_tenants_a_flood_delays_the_first_token():
    """The same flood and probes, all of one tenant: the delay is not limited."""
    flood, settings = FLOODS["long prompts"]
    engine = Flooded(flood, **settings)
    engine.steps(30)
    number = next(engine.numbers)
    probe = engine.engine.add_one([number] * 20, 8, tenant=FLOOD, eos_token_ids=())
    engine.steps(100)
    assert not engine.engine.tokens_of(probe)


def test_two_floods_share_the_throughput():
    """One tenant with long prompts, one with short prompts and long answers."""
    engine = Flooded(None, max_model_len=300)
    given = defaultdict(int)
    flights = []

    def pour() -> None:
        flights[:] = [each for each in flights if engine.engine.finish_reason_of(each) is None]
        for tenant, shape in ((1, (250, 2)), (2, (20, 40)), (3, (100, 10))):
            while sum(each.tenant == tenant for each in flights) < 12:
                flights.append(engine.add(tenant, *shape))

    for _ in range(300):
        pour()
        before = {each.seq_id: each.num_output_tokens for each in flights}
        new = [each for each in flights if not each.num_output_tokens]
        engine.engine.step()
        for each in flights:
            given[each.tenant] += 2 * (each.num_output_tokens - before[each.seq_id])
        for each in new:
            given[each.tenant] += each.num_prompt_tokens if each.num_output_tokens else 0
    assert max(given.values()) < 1.15 * min(given.values()), given


def test_a_flood_is_not_starved_by_many_quiet_tenants():
    """Each of them is served less than the flood, and together they use all capacity."""
    engine = Flooded((100, 4), max_model_len=200)
    engine.steps(100)
    mine = [each for each in engine.engine.scheduler.waiting if each.tenant == FLOOD][:3]
    for tenant in range(10, 400):
        engine.add(tenant, STEP_TOKENS, 1)
        engine.steps(1)
        if all(engine.engine.finish_reason_of(each) is not None for each in mine):
            break
    assert all(engine.engine.finish_reason_of(each) is not None for each in mine)
