"""Which layer keeps its K and V in which KV cache group, and in which slot of its blocks.

Layers that see the same part of a sequence can share a block table, and blocks are
all of one size, so layers are dealt out to groups of equal size:

    layers    w w w w w F w w w w w F …      15 with a window, 3 with full attention
    groups    0: F F F     1: w w w     2: w w w   …   5: w w w
    a block   | slot 0 | slot 1 | slot 2 |       of any group, from one pool

Pure arithmetic on windows; knows nothing of tensors or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Window = int | None
"""Tokens that a query sees, its own included; None for all."""


class Place(NamedTuple):
    """Where a layer keeps its K and V."""

    group: int
    slot: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """places: of each layer. windows: of each group. num_slots: most layers of a group."""

    places: tuple[Place, ...]
    windows: tuple[Window, ...]
    num_slots: int

    @property
    def num_groups(self) -> int:
        return len(self.windows)


def kv_layout(windows: Sequence[Window]) -> KVLayout:
    """The layout for layers with these windows; full attention comes first.

    Groups are as large as the rarest kind of layer has layers. Where the commonest
    kind has less than a quarter more, one group of each kind wastes less than
    cutting that kind in two. The last groups of a kind may be short of layers:
    their blocks have slots that stay empty.
    """
    kinds = {window: _layers_of(window, windows) for window in sorted(set(windows), key=_order)}
    sizes = [len(layers) for layers in kinds.values()]
    size = max(sizes) if max(sizes) < 1.25 * min(sizes) else min(sizes)
    places: dict[int, Place] = {}
    group_windows: list[Window] = []
    for window, layers in kinds.items():
        num_groups = -(-len(layers) // size)
        for first in range(num_groups):
            for slot, layer in enumerate(layers[first::num_groups]):
                places[layer] = Place(len(group_windows), slot)
            group_windows.append(window)
    return KVLayout(
        tuple(places[layer] for layer in range(len(windows))), tuple(group_windows), size
    )


def _layers_of(window: Window, windows: Sequence[Window]) -> list[int]:
    return [layer for layer, each in enumerate(windows) if each == window]


def _order(window: Window) -> tuple[bool, int]:
    """Full attention, then wide windows before narrow ones."""
    return (window is not None, -(window or 0))
