"""How full the pool may get: when to stop admitting, when to go on, when to preempt.

Owns one bit, whether the doors are open. Two thresholds with a gap between them
keep the scheduler from admitting and preempting the same request in turns.

    in use   0 ───── resume ────── stop ────── preempt ── all
                open   |  as it was  |  closed    |  closed, and someone gives way
"""

from typing import Protocol

from engine_core.kv_cache.manager import ComputedBlocks, KVCacheManager
from engine_core.request import Request


class Pressure(Protocol):
    """What the occupancy of the pool asks for."""

    def too_high(self) -> bool:
        """Whether a running request should give way.

        To be asked in every step, also where one runs, or none: the occupancy may fall below a
        threshold then, and be between the two again when somebody wants to come in.
        """
        ...

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        """Whether this request may come in, to compute so many tokens."""
        ...


class NoPressure:
    """Only the end of the pool counts."""

    def too_high(self) -> bool:
        return False

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        return True


class Thresholds:
    """Fractions of the usable blocks, 0 < resume_below <= stop_above <= preempt_above <= 1."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        resume_below: float,
        stop_above: float,
        preempt_above: float,
    ) -> None:
        self._kv_cache = kv_cache
        self._num_usable = kv_cache.num_usable_blocks
        self._resume_below = resume_below * self._num_usable
        self._stop_above = stop_above * self._num_usable
        self._preempt_above = preempt_above * self._num_usable
        self._open = True

    def too_high(self) -> bool:
        return self._in_use() > self._preempt_above

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        in_use = self._in_use()
        needed = self._kv_cache.num_blocks_needed(request, num_new_tokens, computed)
        return self._open and in_use + needed <= self._preempt_above

    def _in_use(self) -> int:
        """Blocks in use; moves the doors."""
        in_use = self._num_usable - self._kv_cache.num_free_blocks
        if in_use > self._stop_above:
            self._open = False
        elif in_use < self._resume_below:
            self._open = True
        return in_use
