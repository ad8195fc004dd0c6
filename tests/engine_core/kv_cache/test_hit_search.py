"""The search for a hit, compared with trying every length, over caches with random holes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.block_hashing import GroupKeys
from engine_core.kv_cache.coordinator import KVCacheCoordinator
from engine_core.kv_cache.groups import FullAttentionGroup, SlidingWindowGroup
from engine_core.kv_cache.pool import BlockPool
from proto.messages.lifecycle import KVGroup

NUM_BLOCKS = 16
BLOCK_SIZE = 2
HASHES = [bytes([number]) * 32 for number in range(NUM_BLOCKS)]

# Per group: its window, and which of 16 consecutive blocks are not cached.
groups_of_model = st.lists(
    st.tuples(
        st.sampled_from([None, 1, 2, 3, 4, 6, 7, 12]),
        st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=5),
    ),
    min_size=1,
    max_size=4,
)


def is_hit(window: int | None, missing: set[int], length: int) -> bool:
    """Return whether a group has all blocks that the token after the first `length` attends to."""
    if length % BLOCK_SIZE:
        return False
    first_seen = 0 if window is None else length - max(1, window - 1)
    blocks = range(length // BLOCK_SIZE)
    return all(block not in missing for block in blocks if (block + 1) * BLOCK_SIZE > first_seen)


def is_held(missing: set[int], length: int) -> bool:
    """Return whether a group has the block after the first `length` tokens."""
    block = length // BLOCK_SIZE
    return block < NUM_BLOCKS and block not in missing


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    model=groups_of_model,
    max_tokens=st.integers(0, NUM_BLOCKS * BLOCK_SIZE),
    num_dropped=st.integers(0, 1),
)
def test_the_longest_length_that_all_groups_accept_is_found(model, max_tokens, num_dropped):
    """With num_dropped the next block has to be cached in every group, too."""
    pool = BlockPool(200, enable_caching=True)
    groups, tables = [], []
    for number, (window, missing) in enumerate(model):
        keys = GroupKeys(number, BLOCK_SIZE)
        groups.append(
            FullAttentionGroup(pool, keys, KVGroup(), num_dropped)
            if window is None
            else SlidingWindowGroup(pool, keys, KVGroup(window), num_dropped)
        )
        tables.append(pool.get_new_blocks(NUM_BLOCKS))
        for index, block in enumerate(tables[-1]):
            if index not in missing:
                pool.cache_full_block(block, keys.key(HASHES[index]))
    lengths = [
        length
        for length in range(max_tokens + 1)
        if all(
            is_hit(window, missing, length)
            and not (num_dropped and length and not is_held(missing, length))
            for window, missing in model
        )
    ]
    coordinator = KVCacheCoordinator(groups)
    computed = coordinator.find_longest_hit(HASHES, max_tokens)
    assert computed.num_tokens == max(lengths)
    for (window, missing), table, hits in zip(model, tables, computed.block_ids, strict=False):
        assert len(hits) * BLOCK_SIZE == computed.num_tokens
        for index, block in enumerate(hits):
            assert block in (0, table[index])
            assert block == 0 or index not in missing
            passed = window is not None and (
                (index + 1) * BLOCK_SIZE <= len(hits) * BLOCK_SIZE - window + 1
            )
            assert block != 0 or passed
