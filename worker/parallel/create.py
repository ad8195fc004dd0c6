"""Makes the group that a worker computes in."""

from collections.abc import Callable

import torch

from worker.parallel.group import Alone, RankGroup


def create_group(
    run_dir: str,
    rank: int,
    size: int,
    device: torch.device,
    on_long_wait: Callable[[], None],
    called_away: Callable[[], bool],
) -> RankGroup:
    """The group of `size` ranks of one daemon, which has not met yet.

    on_long_wait: is called when the others let this rank wait for long. called_away: whether
    it is to stop waiting for them to meet.
    """
    if size == 1:
        return Alone()
    from worker.parallel.torch_group import TorchGroup  # a worker alone starts without it

    return TorchGroup(run_dir, rank, size, device, on_long_wait, called_away)
