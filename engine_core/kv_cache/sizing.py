"""How many blocks a request holds at most, and the longest request for which a pool has room.

Pure functions of the model's KV groups.
"""

from bisect import bisect_right
from collections.abc import Sequence

from proto.lifecycle import KVGroup


def blocks_of_request(
    groups: Sequence[KVGroup], num_tokens: int, block_size: int, longest_chunk: int | None
) -> int:
    """Most blocks that a request holds while its `num_tokens` tokens are computed.

    longest_chunk: most tokens of it in one step; None for all of them.

    A window group holds what the first token of a step sees and what the step
    computes. It touches most blocks where the first of these tokens ends a block:

            |<- window - 1 ->|<- chunk ->|
      | . . . . | . . . . | . . . . | . . . . |
    """
    num_whole = -(-num_tokens // block_size)
    chunk = num_tokens if longest_chunk is None else min(longest_chunk, num_tokens)
    total = 0
    for group in groups:
        if group.sliding_window is None:
            total += num_whole
        else:
            num_near = group.sliding_window - 1 + chunk
            total += min(num_whole, 1 + -(-(num_near - 1) // block_size))
    return total


def longest_request(
    groups: Sequence[KVGroup],
    num_usable_blocks: int,
    block_size: int,
    longest_chunk: int | None,
    most: int,
) -> int:
    """Most tokens, up to `most`, of a request that has the whole pool to itself."""
    counts = range(-(-most // block_size) + 1)
    num_fitting = bisect_right(
        counts,
        num_usable_blocks,
        key=lambda count: blocks_of_request(groups, count * block_size, block_size, longest_chunk),
    )
    return min((num_fitting - 1) * block_size, most)
