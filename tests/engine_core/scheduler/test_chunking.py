"""How many tokens of a request go into a step, at the limits."""

import pytest

from engine_core.scheduler.limits import ChunkRule


@pytest.mark.parametrize(
    ("num_missing", "budget", "expected"),
    [
        (5, 8, 5),
        (7, 7, 7),
        (8, 8, 8),
        (8, 7, 0),
        (2, 1, 0),
        (9, 8, 8),
        (9, 7, 7),
        (100, 1, 1),
    ],
)
def test_a_prompt_in_one_piece_waits_for_a_step_with_room_for_it(num_missing, budget, expected):
    """Except for a prompt that is longer than any step."""
    assert ChunkRule(8, 8, chunked=False).first_chunk(num_missing, budget) == expected


@pytest.mark.parametrize(
    ("num_missing", "budget", "expected"), [(8, 8, 6), (8, 5, 5), (6, 8, 6), (5, 8, 5)]
)
def test_a_prompt_in_chunks_takes_what_there_is(num_missing, budget, expected):
    assert ChunkRule(8, 6, chunked=True).first_chunk(num_missing, budget) == expected
