"""KV of jobs that are over goes first, but for what they had not computed themselves."""

import pytest

from engine_core.kv_cache.integrity import check
from proto.agents import AgentHint
from tests.engine_core.scheduler.test_pins import Engine, tokens

POLICIES = ["none", "fixed", "rule"]


class Filled(Engine):
    """Its pool has content everywhere: 10 blocks are the oldest."""

    def __init__(self, **config) -> None:
        super().__init__(**{"pin_policy": "none", **config})
        self.turn("", tokens(1000, 40))
        self.turn("", tokens(2000, 76), max_tokens=5)
        assert self.num_empty == 10

    @property
    def num_empty(self) -> int:
        pool = self.kv_cache.pool
        return sum(pool.hashes[block] is None for block in pool.free_queue)

    def found(self, prompt) -> int:
        """Tokens of a prompt that are there, of which the last one never is."""
        request = self.add_one([*prompt, 7], 1)
        self.run()
        return request.num_cached_tokens


def fill(engine, start: int, number: int) -> None:
    """So many blocks more."""
    engine.turn("", tokens(start, 4 * number - 1), max_tokens=2)


@pytest.mark.parametrize("pin_policy", POLICIES)
def test_they_go_before_what_is_older(pin_policy):
    engine = Filled(pin_policy=pin_policy)
    fill(engine, 3000, 10)
    engine.turn("a", tokens(4000, 39), max_tokens=2, last=True)  # over the oldest, 1000 on
    fill(engine, 5000, 10)
    assert engine.found(tokens(2000, 76)) == 76
    assert engine.found(tokens(4000, 36)) == 0
    assert check(engine.kv_cache) == []


@pytest.mark.parametrize(
    ("policy", "last"), [("fcfs", True), ("priority", True), ("continuum", False)]
)
def test_the_others_go_by_age(policy, last):
    engine = Filled(scheduling_policy=policy)
    fill(engine, 3000, 10)
    engine.turn("a", tokens(4000, 39), max_tokens=2, last=last)
    fill(engine, 5000, 10)
    assert engine.found(tokens(4000, 36)) == 36
    assert engine.found(tokens(2000, 76)) < 76


def test_it_is_found_until_it_is_overwritten_and_goes_from_its_end():
    engine = Filled()
    fill(engine, 3000, 10)
    engine.turn("a", tokens(4000, 39), max_tokens=2, last=True)
    fill(engine, 5000, 4)
    assert engine.found(tokens(4000, 36)) == 24


def test_what_its_first_turn_found_is_shared_and_goes_by_age():
    engine = Filled()
    fill(engine, 3000, 10)  # 3000 on is what they have in common
    engine.turn("a", [*tokens(3000, 36), *tokens(4000, 15)], max_tokens=2)
    engine.turn("a", [*tokens(3000, 36), *tokens(4000, 19)], max_tokens=2, last=True)
    fill(engine, 5000, 5)
    assert engine.found([*tokens(3000, 36), *tokens(4000, 8)]) == 36
    assert engine.found(tokens(2000, 40)) == 40


def test_nothing_goes_early_while_there_is_room():
    engine = Engine(pin_policy="none")
    engine.turn("a", tokens(0, 39), max_tokens=2, last=True)
    engine.turn("", tokens(500, 79), max_tokens=2)
    request = engine.add_one([*tokens(0, 36), 7], 1)
    engine.run()
    assert request.num_cached_tokens == 36


def test_what_somebody_else_uses_stays():
    engine = Filled()
    fill(engine, 3000, 10)
    beside = engine.add_one(tokens(4000, 39), 20)
    engine.step()
    engine.step()
    engine.turn("a", tokens(4000, 39), max_tokens=2, last=True)
    engine.run_until_over(beside)
    assert check(engine.kv_cache) == []
    assert engine.found(tokens(4000, 36)) == 36


def test_choices_of_a_last_turn_go_together():
    engine = Filled()
    fill(engine, 3000, 10)
    engine.add(tokens(4000, 30), 4, n=2, agent=AgentHint("a", True, None))
    engine.run()
    fill(engine, 5000, 7)
    assert engine.found(tokens(2000, 76)) == 76
    assert engine.found(tokens(4000, 28)) == 0
