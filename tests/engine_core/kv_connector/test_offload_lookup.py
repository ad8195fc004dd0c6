"""The longest hit of all KV cache groups (behaviour OFC-13), against a brute-force search."""

import random

import pytest

from engine_core.kv_connector.offload.planners import (
    Extent,
    GroupPresence,
    first_needed,
    longest_hit,
    longest_run,
)
from engine_core.kv_connector.offload.tracking import BlockLayout, parse_key

F, T = False, True


@pytest.mark.parametrize(
    ("window", "present", "expected"),
    [
        (2, [F, T, T], 3),
        (2, [F, T, T, F], 3),
        (2, [T, T, F, T, T], 5),
        (2, [F, T, T, F, T], 3),
        (3, [T, T, F], 2),
        (4, [T, F, T, T, T], 1),
        (1, [F, T, T], 3),
        (2, [F, F], 0),
    ],
)
def test_window_lookup_finds_the_last_full_window_or_a_prefix(
    window: int, present: list[bool], expected: int
) -> None:
    """window: number of offloaded blocks that the next token attends to."""
    size = 4
    extent = Extent(0, len(present) * size, size)
    group = (window * size + 1, present)
    assert longest_run(extent, group, extent.limit) == expected * size


def test_full_attention_lookup_is_the_leading_run() -> None:
    extent = Extent(4, 24, 4)
    assert longest_run(extent, (None, [T, T, F, T, T]), 24) == 12
    assert longest_run(extent, (None, [F, T, T, T, T]), 24) == 4


def test_a_hit_may_end_inside_an_offloaded_block() -> None:
    extent = Extent(0, 14, 8)
    assert longest_hit(extent, [(None, [T, T])]) == 14
    assert longest_hit(extent, [(None, [T, F])]) == 8


def brute_force(extent: Extent, groups: list[GroupPresence]) -> int:
    ends = {extent.limit, *range(0, extent.limit, extent.size)}
    for end in sorted(ends, reverse=True):
        if end <= extent.computed:
            continue
        for window, present in groups:
            window = None if window is None else max(window, 2)
            needed = range(first_needed(window, extent.computed, end), end)
            blocks = {token // extent.size - extent.first for token in needed}
            if any(block >= len(present) or not present[block] for block in blocks):
                break
        else:
            return end
    return extent.computed


def test_longest_hit_against_brute_force() -> None:
    for seed in range(200):
        compare_longest_hit(random.Random(seed))


def compare_longest_hit(rng: random.Random) -> None:
    block, factor = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
    size = block * factor
    num_blocks = rng.randint(1, 9)
    computed = rng.randrange(num_blocks * factor) * block
    limit = rng.randrange(computed, num_blocks * size + 1, block)
    extent = Extent(computed, limit, size)
    groups = [
        (
            rng.choice([None, 1, rng.randint(1, 3 * size)]),
            [rng.random() < 0.8 for _ in range(num_blocks - extent.first)],
        )
        for _ in range(rng.randint(1, 4))
    ]
    assert longest_hit(extent, groups) == brute_force(extent, groups)


def test_keys_are_the_last_hash_with_group_ranks_and_factor() -> None:
    hashes = [bytes([number]) * 32 for number in range(9)]
    layout = BlockLayout(4, 4, (None, None), 2)
    assert [parse_key(key) for key in layout.keys(hashes, 1, 0, 2)] == [
        (hashes[3], 1),
        (hashes[7], 1),
    ]
    assert layout.keys(hashes, 1, 1, 2) == layout.keys(hashes, 1, 0, 2)[1:]
    others = [
        BlockLayout(4, 4, (None, None), 1).keys(hashes, 1, 0, 2),
        BlockLayout(4, 2, (None, None), 2).keys(hashes, 1, 1, 4)[::2],
        layout.keys(hashes, 0, 0, 2),
    ]
    for other in others:
        assert [parse_key(key)[0] for key in other] == [hashes[3], hashes[7]]
        assert not set(other) & set(layout.keys(hashes, 1, 0, 2))
