"""Long random operations, compared with a brute-force model that shares no code with the pool.

Hypothesis draws short sequences of all operations; a busy run has hundreds of steps with a pool
that is mostly full.
"""

import random
from collections import Counter

import pytest
from hypothesis import settings

from tests.engine_core.kv_cache.kv_cache_machine import KVCacheMachine

TestRandomSequences = KVCacheMachine.TestCase
TestRandomSequences.settings = settings(
    max_examples=40, stateful_step_count=60, deadline=None, derandomize=True
)


# Operations of a busy engine, by frequency.
WEIGHTS = {
    "add": 12,
    "admit": 25,
    "advance": 40,
    "speculate": 6,
    "run_ahead": 6,
    "fork": 6,
    "hand_over": 4,
    "branch": 4,
    "finish": 9,
    "abort": 1,
    "preempt": 2,
    "fail": 2,
    "lose": 2,
    "reset": 1,
}


def busy_life(machine: KVCacheMachine, draw: random.Random, num_steps: int) -> Counter[str]:
    """Drive the machine by hand, so that the pool is mostly full and prefixes are shared.

    Every step is compared with the model; returns the number of each operation.
    """
    details = {
        "add": lambda: {
            "common": draw.choice([8, 16, 24, 40]),
            "tail": draw.choices([0, 0, 0, 1], k=draw.randint(1, 12)),
            "salt": draw.choice([None] * 9 + ["s"]),
            "prompt_logprobs": draw.choice([None] * 9 + [0]),
            "twins": draw.randint(1, 2),
        },
        "admit": lambda: {"which": 0, "chunk": draw.choice([60, 20, 7, 1])},
        "advance": lambda: {
            "which": draw.randrange(1000),
            "chunk": draw.choice([20, 7, 1]),
            "token": draw.choice([0, 0, 0, 1]),
        },
        "speculate": lambda: {
            "which": draw.randrange(1000),
            "num_drafts": draw.randint(0, 4),
            "accepted": draw.choices([0, 0, 0, 1], k=draw.randint(0, 4)),
            "lookahead": draw.randint(0, 3),
        },
        "run_ahead": lambda: {"which": draw.randrange(1000), "token": draw.choice([0, 0, 0, 1])},
        "fork": lambda: {
            "which": draw.randrange(1000),
            "back": draw.choice([0, 1, 1, 2, 5]),
            "tail": draw.choices([0, 0, 0, 1], k=draw.randint(1, 4)),
            "chunk": draw.choice([20, 1]),
        },
        "hand_over": lambda: {
            "which": draw.randrange(1000),
            "input_tokens": draw.choices([0, 0, 0, 1], k=draw.randint(1, 12)),
        },
        "branch": lambda: {"which": draw.randrange(1000), "other": draw.randrange(1000)},
        "fail": lambda: {"which": draw.randrange(1000), "num_valid": draw.randint(0, 60)},
        "lose": lambda: {"which": 3 * draw.randrange(300)},
        "preempt": dict,
        "reset": lambda: {"really": True},
    }
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    needs = {"admit": "waiting", "abort": "waiting", "add": None, "reset": None, "lose": None}
    done: Counter[str] = Counter()
    while done.total() < num_steps:
        (name,) = draw.choices(names, weights)
        needed = needs.get(name, "running")
        possible = machine.model.found if name in ("lose", "reset") else True
        crowded = name == "add" and len(machine.waiting) > 6
        if crowded or not possible or (needed and not getattr(machine, needed)):
            continue
        if name == "branch" and len(machine.running) < 2:
            continue
        getattr(machine, name)(**details.get(name, lambda: {"which": draw.randrange(1000)})())
        machine.agrees_with_the_model()
        machine.events_tell_what_is_cached()
        machine.is_storable()
        done[name] += 1
    return done


ONE_GROUP = [([None], 4, 40), ([None], 1, 60), ([6], 2, 24)]
SEVERAL_GROUPS = [
    ([None, 6], 2, 30),
    ([None, 8, 8], 4, 16),
    ([9, None, 4], 3, 20),
    ([3, 12], 2, 20),
    ([None, None, 5, 10], 4, 14),
]
STEPS_EACH = 700


@pytest.mark.parametrize(("windows", "block_size", "num_usable"), ONE_GROUP + SEVERAL_GROUPS)
def test_random_operations_keep_the_invariants(windows, block_size, num_usable):
    machine = KVCacheMachine()
    machine.start(num_usable=num_usable, block_size=block_size, caching=True, windows=windows)
    done = busy_life(machine, random.Random(len(windows) * block_size), STEPS_EACH)
    _, num_hit = machine.manager.pop_prefix_cache_stats()
    print(f"{done.total()} steps, {num_hit} tokens found: {dict(done)}")
    assert done.keys() == WEIGHTS.keys()
    assert num_hit > 100
