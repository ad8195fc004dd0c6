"""Mutation of valid inputs by strategies that hypothesis can shrink.

A mutation is a few small edits of a seed; an edit is three numbers: operation, place, value. Seeds
are valid inputs of the target and the interesting inputs of its corpus.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from hypothesis import strategies as st

Edit = tuple[int, int, int]
"""What, where (in 65,536ths of what there is), with which value."""
_EVERYWHERE: Final = 1 << 16
_MOST_PLACES: Final = 2000

EDITS: Final = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, _EVERYWHERE - 1), st.integers(0, _EVERYWHERE - 1)),
    min_size=1,
    max_size=5,
)

LENGTHS: Final = (0, 1, 7, 127, 128, 255, 65535, 1 << 31, 1 << 32, 1 << 60, (1 << 63) - 1, 1 << 63)
LENGTHS_AND_ALL_ONES: Final = (*LENGTHS, (1 << 64) - 1)

ODD_VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    *(0, 1, -1, 2, 17, 1000, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1, 1 << 31, 1 << 60),
    *(0.0, -0.0, 0.5, -1.5, 1e308, math.inf, -math.inf, math.nan),
    *(
        "",
        "x",
        "stop",
        "\0",
        "\x1b[2J",
        "a" * 5000,
        "😀",
        "\ud800",
        "0",
        "null",
        "../../etc/passwd",
        "{{ 1 }}",
    ),
    *([], [[]], [None], [0], [-1], ["x"], [[1, 2], [3]], [1.5], [True], list(range(300))),
    *({}, {"a": 1}, {"type": "text"}, {"type": "text", "text": "x"}, {"role": "user"}),
)
"""What a field might hold that was made for something else."""


def mutate_bytes(data: bytes, edits: Sequence[Edit], others: Sequence[bytes]) -> bytes:
    """Change, delete, double or replace bytes, lengths and ranges."""
    for what, where, value in edits:
        at = where * (len(data) + 1) // _EVERYWHERE
        length = 1 << (value % 12)
        number = LENGTHS_AND_ALL_ONES[value % len(LENGTHS_AND_ALL_ONES)]
        match what:
            case 0 | 1:
                data = data[:at] + bytes([value % 256]) + data[at + 1 :]
            case 2:
                data = data[:at] + struct.pack("<Q", number) + data[at + 8 :]
            case 3:
                data = data[:at] + struct.pack(">I", number & 0xFFFFFFFF) + data[at + 4 :]
            case 4:
                data = data[:at] + struct.pack("<I", value % 16) + data[at + 4 :]
            case 5:
                data = data[:at] + data[at + length :]
            case 6:
                data = data[:at] + data[at : at + length] * 2 + data[at + length :]
            case 7:
                data = data[:at]
            case 8:
                data = data[:at] + bytes([value % 256]) * length + data[at:]
            case 9 if others:
                other = others[value % len(others)]
                data = data[:at] + other[where * (len(other) + 1) // _EVERYWHERE :]
            case _:
                flipped = data[at : at + 1]
                data = (
                    data[:at] + bytes(each ^ (1 << value % 8) for each in flipped) + data[at + 1 :]
                )
    return data[: 1 << 20]


def mutate_tree(tree: Any, edits: Sequence[Edit], keys: Sequence[str] = ()) -> Any:
    """Replace, delete, add or nest values in lists and dicts.

    keys: names for added dict entries.
    """
    for what, where, value in edits:
        places = list(islice(_places(tree), _MOST_PLACES))
        if not places:
            return _copied(ODD_VALUES[value % len(ODD_VALUES)])
        holder, key = places[where * len(places) // _EVERYWHERE]
        replacement = _copied(ODD_VALUES[value % len(ODD_VALUES)])
        match what:
            case 0 | 1 | 2 | 3:
                holder[key] = replacement
            case 4:
                del holder[key]
            case 5 if isinstance(holder, list):
                holder.insert(key, replacement)
            case 5 | 6 | 7 if isinstance(holder, dict) and keys:
                holder[keys[where % len(keys)]] = replacement
            case 8:
                holder[key] = [_copied(holder[key]) for _ in range(1 + value % 5)]
            case 9 if type(holder[key]) is int:
                holder[key] += (1, -1, 1 << 20, -(1 << 40))[value % 4]
            case 10:
                other, place = places[value * len(places) // _EVERYWHERE]
                holder[key] = _copied(other[place])
            case _:
                for _ in range(1 << value % 8):
                    holder[key] = [holder[key]]
    return tree


def mutated(
    seeds: Sequence[bytes], mutate: Callable[[bytes, Sequence[Edit]], bytes]
) -> st.SearchStrategy[bytes]:
    """A strategy for mutations of one of the seeds."""
    return st.builds(
        lambda number, edits: mutate(seeds[number], edits),
        st.integers(0, len(seeds) - 1),
        EDITS,
    )


def mutated_bytes(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """A strategy for mutations of one of the seeds, in which parts of other seeds may stand."""
    return mutated(seeds, lambda data, edits: mutate_bytes(data, edits, seeds))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value, outermost first."""
    level = [tree]
    while level:
        holder = level.pop(0)
        if isinstance(holder, list):
            pairs = list(enumerate(holder))[:100]
        elif isinstance(holder, dict):
            pairs = list(holder.items())
        else:
            continue
        for key, value in pairs:
            yield holder, key
            level.append(value)


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(each) for each in value]
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value
