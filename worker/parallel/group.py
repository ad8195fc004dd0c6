"""The ranks that compute one model together, as a layer sees them.

    join(epoch) ─▶ gather, gather, … ─▶ leave ─▶ join(next epoch) …

Every rank makes the same calls in the same order, since all get the same steps. A call waits
for the others without a limit of its own: who does not come is found by the supervisor, and
the end of a rank ends the calls of all others with GroupLostError.
"""

from typing import Protocol

import torch

from proto.errors import TokendError


class GroupLostError(TokendError):
    """Another rank has left or has died, so nothing can be computed together any more.

    The echo of what happened elsewhere: whoever raises it is not to blame.
    """


class RankGroup(Protocol):
    """This rank among `size` ranks, counted from 0."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def join(self, epoch: int, purpose: str = "steps") -> None:
        """Meet the ranks of an epoch; raises GroupLostError when they do not come.

        purpose: a name for each time that the same ranks meet in an epoch.
        """
        ...

    def leave(self) -> None:
        """Let go of the others, who may be waiting for us; nothing if that has happened."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x, of one shape and dtype on every rank, to a new [size, *x.shape], by rank.

        On an accelerator only queued, and may be part of a graph.
        """
        ...


class Alone:
    """One rank that has all of the model."""

    rank = 0
    size = 1

    def join(self, epoch: int, purpose: str = "steps") -> None:
        """There is nobody to meet."""

    def leave(self) -> None:
        """There is nobody to leave."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]
