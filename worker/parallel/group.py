"""When a rank says that it waits: its device has not come to the end of a step for long.

What is queued on a device may wait for other ranks, and the host cannot tell. So it says that it
waits, which keeps it from being blamed unless all do; a rank whose host hangs says nothing.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from proto.errors import TokendError

LONG_WAIT_SECONDS = 1.0
"""Much longer than ranks are apart, and shorter than what is called a hang."""


class RankWaitReporter:
    """Of one of so many ranks. on_long_wait: is called once for a step that takes long."""

    def __init__(
        self,
        num_ranks: int,
        on_long_wait: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alone = num_ranks == 1
        self._on_long_wait = on_long_wait
        self._clock = clock
        self._step: int | None = None
        self._told = False
        self._since = 0.0

    def await_step(self, step: int | None) -> None:
        """The oldest step that is not done now; None: there is none."""
        if self._alone:
            return
        if step is None or step != self._step:
            self._step, self._told, self._since = step, False, self._clock()
        elif not self._told and self._clock() - self._since >= LONG_WAIT_SECONDS:
            self._told = True
            self._on_long_wait()


# The ranks that compute one model together, as a layer sees them.
#
#     join(epoch) ─▶ gather, gather, … ─▶ leave ─▶ join(next epoch) …
#
# Every rank makes the same calls in the same order, since all get the same steps. A call waits
# for the others without a limit of its own: who does not come is found by the supervisor, and
# the end of a rank ends the calls of all others with GroupLostError.


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
