"""KV of finished agent sessions is evicted first, except that of their initial prompt."""

import pytest

from engine_core.kv_cache.integrity import check
from proto.messages.engine_io import AgentHint
from tests.engine_core.scheduler.test_retained_prefixes import Engine, tokens

POLICIES = ["none", "fixed", "rule"]


class Filled(Engine):
    """Return an engine whose pool has content except in the next 10 blocks of each group."""

    def __init__(self, num_groups: int = 1, **config) -> None:
        windows, num_blocks = [None] * num_groups, 40 * num_groups + 1
        settings = {"pin_policy": "none", "windows": windows, "num_blocks": num_blocks}
        super().__init__(**{**settings, **config})
        self.turn("", tokens(1000, 40))
        self.turn("", tokens(2000, 76), max_tokens=5)
        assert self.num_empty == 10 * num_groups

    @property
    def num_empty(self) -> int:
        pool = self.kv_cache.pool
        return sum(pool.hashes[block] is None for block in pool.free_queue)

    def found(self, prompt) -> int:
        """Return the cached tokens of a prompt, which never include its last one."""
        request = self.add_one([*prompt, 7], 1)
        self.run()
        return request.num_cached_tokens


def fill(engine, start: int, number: int) -> None:
    """Allocate this many more blocks."""
    engine.turn("", tokens(start, 4 * number - 1), max_tokens=2)


def play_session(engine, num_first: int = 4, *, last: bool = True) -> None:
    """Run two turns of an agent session, which have 10 blocks at the end."""
    engine.turn("a", tokens(4000, num_first), max_tokens=2)
    engine.turn("a", tokens(4000, 39), max_tokens=2, last=last)


@pytest.mark.parametrize("pin_policy", POLICIES)
def test_blocks_of_finished_sessions_are_evicted_before_older_ones(pin_policy):
    engine = Filled(pin_policy=pin_policy)
    fill(engine, 3000, 10)
    play_session(engine)  # over the oldest, 1000 on
    fill(engine, 5000, 9)
    assert engine.found(tokens(2000, 76)) == 76
    assert engine.found(tokens(4000, 36)) == 4
    assert check(engine.kv_cache) == []


@pytest.mark.parametrize(
    ("policy", "last"), [("fcfs", True), ("priority", True), ("continuum", False)]
)
def test_other_blocks_are_evicted_by_age(policy, last):
    engine = Filled(scheduling_policy=policy)
    fill(engine, 3000, 10)
    play_session(engine, last=last)
    fill(engine, 5000, 10)
    assert engine.found(tokens(4000, 36)) == 36
    assert engine.found(tokens(2000, 76)) < 76


def test_blocks_of_a_finished_session_are_findable_until_overwritten():
    engine = Filled()
    fill(engine, 3000, 10)
    play_session(engine)
    fill(engine, 5000, 4)
    assert engine.found(tokens(4000, 36)) == 24


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(("num_first", "kept"), [(20, 20), (18, 16)])
def test_the_first_prompt_of_a_session_is_evicted_by_age(num_first, kept, num_groups):
    """Other sessions may share the initial prompt, but no block that contains answers."""
    engine = Filled(num_groups)
    fill(engine, 3000, 10)
    play_session(engine, num_first)
    fill(engine, 5000, 9)
    assert engine.found(tokens(4000, 36)) == kept


def test_a_session_of_one_turn_evicts_only_its_output_early():
    engine = Filled()
    fill(engine, 3000, 10)
    engine.turn("a", tokens(4000, 20), max_tokens=20, last=True)
    fill(engine, 5000, 9)
    assert engine.found(tokens(4000, 36)) == 20


def test_nothing_goes_early_while_there_is_room():
    engine = Engine(pin_policy="none")
    play_session(engine)
    engine.turn("", tokens(500, 79), max_tokens=2)
    request = engine.add_one([*tokens(4000, 36), 7], 1)
    engine.run()
    assert request.num_cached_tokens == 36


def test_blocks_in_use_by_other_requests_stay():
    engine = Filled()
    fill(engine, 3000, 10)
    beside = engine.add_one(tokens(4000, 39), 20)
    engine.step()
    engine.step()
    play_session(engine)
    engine.run_until_finished(beside)
    assert check(engine.kv_cache) == []
    assert engine.found(tokens(4000, 36)) == 36


def test_choices_of_a_last_turn_are_evicted_together():
    engine = Filled()
    fill(engine, 3000, 10)
    engine.turn("a", tokens(4000, 4), max_tokens=2)
    engine.add(tokens(4000, 30), 4, n=2, agent=AgentHint("a", True, None))
    engine.run()
    fill(engine, 5000, 7)
    assert engine.found(tokens(2000, 76)) == 76
    assert engine.found(tokens(4000, 28)) == 4


SYSTEM = tokens(4000, 24)
FOR_B = SYSTEM + tokens(6000, 11)


@pytest.mark.parametrize("pin_policy", ["none", "rule"])
@pytest.mark.parametrize("small_first", [False, True])
def test_blocks_shared_with_a_waiting_session_stay(pin_policy, small_first):
    """Also if the turns have different initial prompts, for example a request for a title."""
    engine = Filled(pin_policy=pin_policy)
    fill(engine, 3000, 10)
    if small_first:
        engine.turn("b", tokens(9000, 3), max_tokens=2)
    engine.turn("b", FOR_B, max_tokens=2)
    engine.clock.now += 5  # its pin has expired, its tool still runs
    engine.turn("a", tokens(8000, 3), max_tokens=1)
    engine.turn("a", [*SYSTEM, *tokens(7000, 11)], max_tokens=2, last=True)
    fill(engine, 5000, 8)
    assert engine.found(FOR_B) >= 32
    assert check(engine.kv_cache) == []


def test_blocks_another_session_was_forked_from_stay():
    engine = Filled()
    fill(engine, 3000, 10)
    engine.turn("a", tokens(4000, 4), max_tokens=2)
    engine.turn("a", tokens(4000, 31), max_tokens=2)
    engine.turn("b", [*tokens(4000, 31), *tokens(6000, 4)], max_tokens=2)
    engine.turn("a", [*tokens(4000, 31), *tokens(7000, 12)], max_tokens=2, last=True)
    fill(engine, 5000, 8)
    assert engine.found([*tokens(4000, 31), *tokens(6000, 4)]) >= 28


def test_a_prompt_that_begins_otherwise_is_a_first_one_too():
    engine = Filled()
    fill(engine, 3000, 10)
    engine.turn("a", tokens(8000, 3), max_tokens=2)
    engine.turn("a", SYSTEM, max_tokens=2)
    engine.turn("a", [*SYSTEM, *tokens(7000, 15)], max_tokens=2, last=True)
    fill(engine, 5000, 8)
    assert engine.found(SYSTEM) == 24


def test_a_mark_ends_with_the_content():
    engine = Filled()
    engine.found(tokens(2000, 76))
    pool = engine.kv_cache.pool
    assert sum(pool.shared) == 19
    fill(engine, 5000, 40)
    assert sum(pool.shared) == 0
    engine.found(tokens(5000, 76))
    assert sum(pool.shared) == 19
    assert engine.kv_cache.reset_prefix_cache()
    assert sum(pool.shared) == 0
