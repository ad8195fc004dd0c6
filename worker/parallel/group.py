"""The ranks that compute one model together, as a layer of the model sees them.

    join(epoch) ─▶ gather, gather, … ─▶ leave ─▶ join(next epoch) …

All ranks receive the same steps, so they make the same calls in the same order. A call waits for
the other ranks without a time limit: the supervisor finds a rank that hangs, and the end of a rank
ends the calls of all others with GroupLostError. TorchGroup (torch_group.py) is a group of several.
"""

from typing import Final

import torch

from proto.errors import TokendError

LONG_WAIT_SECONDS: Final = 1.0
"""Wait for other ranks after which a rank reports that it waits, so that the supervisor does not
take it for the one that hangs. Much longer than ranks are apart, much shorter than a hang."""


class GroupLostError(TokendError):
    """Another rank has left or died, so this rank cannot compute any more.

    A consequence only: the rank that raises it did not cause the failure.
    """


class RankGroup:
    """This rank among `size` ranks, counted from 0.

    The base class is a group of one rank that holds the whole model.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def join(self, epoch: int, purpose: str = "steps") -> None:
        """Connect to the other ranks of an epoch; raise GroupLostError if they do not come.

        purpose: distinguishes several groups of the same ranks in one epoch.
        """

    def leave(self) -> None:
        """Disconnect, which ends pending calls of the other ranks. Later calls do nothing."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors x of all ranks, of equal shape and dtype, as [size, *x.shape].

        On an accelerator the exchange is only queued, and may be part of a CUDA graph.
        """
        return x[None]
