"""What the offloading connector remembers of each request, and how requests lie on the medium.

device blocks       | 7 | 3 | 9 | 4 | 8 | 2 |          tables of a group, block_size tokens each
offloaded blocks    |   0   |   1   |   2   |          factor 2
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_core.kv_connector.base import SchedulerContext
from engine_core.kv_connector.offload.keys import OffloadKeys
from engine_core.request import Request


@dataclass(slots=True)
class TrackedRequest:
    """was_asked: the medium was asked for it before. next_block: offloaded blocks before it were
    stored or are not to be. next_at: tokens with which there is something more to store.
    touched: offloaded blocks that the medium has been told are in use, in order.
    hit: tokens in all that the last match promised; is_loading: they are being copied.
    """

    request: Request
    was_asked: bool = False
    next_block: int = 0
    next_at: int = 0
    touched: int = 0
    hit: int = 0
    is_loading: bool = False


class TrackedRequests(dict[int, TrackedRequest]):
    """By seq_id."""

    def of(self, request: Request) -> TrackedRequest:
        """What is known of a request, from now on something."""
        tracked = self.get(request.seq_id)
        if tracked is None:
            tracked = self[request.seq_id] = TrackedRequest(request)
        return tracked


@dataclass(frozen=True, slots=True)
class Shape:
    """How sequences are cut. block_size: tokens of a device block. windows: of the KV groups."""

    block_size: int
    factor: int
    windows: tuple[int | None, ...]
    keys: OffloadKeys
    size: int = field(init=False)
    groups: range = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.block_size * self.factor)
        object.__setattr__(self, "groups", range(len(self.windows)))

    @classmethod
    def of(cls, context: SchedulerContext, factor: int) -> "Shape":
        """Of an engine."""
        windows = tuple(group.sliding_window for group in context.geometry.groups)
        keys = OffloadKeys(len(windows), context.num_ranks, factor)
        return cls(context.block_size, factor, windows, keys)

    def all_keys(self, block_hashes: Sequence[bytes], end: int) -> list[bytes]:
        """Keys of the first `end` offloaded blocks, of every group, in the order of the tokens."""
        by_group = [self.keys.of(block_hashes, group, 0, end) for group in self.groups]
        return [key for keys in zip(*by_group, strict=True) for key in keys]
