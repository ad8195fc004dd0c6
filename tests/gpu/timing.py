"""Times on a device, by its own clock, and the rates that they are held against."""

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import torch

CUDA: Final = torch.device("cuda", 0)
_BYTES: Final = 8 << 30
_SIZE: Final = 8192


def median_seconds(run: Callable[[], object], rounds: int, warm_ups: int = 3) -> float:
    """The median time of a round on the device; rounds follow each other without a wait."""
    for _ in range(warm_ups):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return statistics.median(times) / 1000


def read_rate() -> float:
    """Bytes a second of a sum over 8 GiB."""
    memory = torch.empty(_BYTES // 4, dtype=torch.float32, device=CUDA).normal_()
    return _BYTES / median_seconds(memory.sum, rounds=5)


def copy_rate() -> float:
    """Bytes a second, read and written, of a copy of 8 GiB."""
    source = torch.empty(_BYTES // 4, dtype=torch.float32, device=CUDA).normal_()
    target = torch.empty_like(source)
    return 2 * _BYTES / median_seconds(lambda: target.copy_(source), rounds=5)


def product_rate() -> float:
    """Operations a second of a product of bfloat16 matrices of random numbers."""
    a, b = (torch.randn(_SIZE, _SIZE, device=CUDA).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * _SIZE**3 / median_seconds(lambda: torch.mm(a, b, out=out), rounds=20)
