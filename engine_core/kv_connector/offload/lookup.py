"""How much of a sequence a medium can give back: each KV group's rule, and what all groups share.

    tokens     0          computed            end            limit
               |--device-----|----to be loaded----|              |
    full       every block from `computed` to `end`
    window     those of the last window - 1 tokens before `end`, as far as the device has them not

Pure functions of which offloaded blocks are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """computed: tokens that the device has. limit: most tokens that may be had. Both are whole
    device blocks. size: tokens of an offloaded block."""

    computed: int
    limit: int
    size: int

    @property
    def first(self) -> int:
        """The first offloaded block that may be needed, perhaps from its middle on."""
        return self.computed // self.size


@dataclass(frozen=True, slots=True)
class GroupPresence:
    """window: of the group's layers in tokens; None for full attention.

    present: of the offloaded blocks from `Extent.first` on, whether they can be loaded.
    """

    window: int | None
    present: Sequence[bool]


def first_needed(window: int | None, computed: int, end: int) -> int:
    """The first token to be loaded of a group, where all groups are to have [0, end)."""
    return computed if window is None else max(computed, end - window + 1)


def longest_run(extent: Extent, group: GroupPresence, most: int) -> int:
    """Tokens that one group can have, at most `most`; `computed` if nothing more.

    An end is the end of an offloaded block, or `most`, which may cut the last one short. A token
    that sees only itself needs none, but a hit is something that was computed.

        present     no   yes  yes  no   yes        window of two blocks
        ends                  ^
    """
    size, first, present = extent.size, extent.first, group.present
    runs = _runs(present)
    window = None if group.window is None else max(group.window, 2)
    end = most
    while end > extent.computed:
        last = (end - 1) // size
        if last - first < len(present):
            needs = last - first_needed(window, extent.computed, end) // size + 1
            if runs[last - first] >= needs:
                return end
        end = last * size
    return extent.computed


def longest_hit(extent: Extent, groups: Sequence[GroupPresence]) -> int:
    """Tokens that every group can have: lowered until all of them accept it, `computed` if none."""
    end, num_accepted, turn = extent.limit, 0, 0
    while num_accepted < len(groups) and end > extent.computed:
        lowered = longest_run(extent, groups[turn % len(groups)], end)
        num_accepted = num_accepted + 1 if lowered == end else 1
        end = lowered
        turn += 1
    return end


def _runs(present: Sequence[bool]) -> list[int]:
    """Of each block, how many present ones in a row end with it."""
    runs, length = [], 0
    for each in present:
        length = length + 1 if each else 0
        runs.append(length)
    return runs
