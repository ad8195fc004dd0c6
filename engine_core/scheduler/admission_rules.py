"""Rules about room that hold for whoever is next, beyond "its next tokens fit".

A rule that says no stops the line for this step: no later request overtakes for want of
room. No rule is asked while nothing runs or loads, so that there is always progress.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from engine_core.kv_cache.manager import NOTHING_COMPUTED, ComputedBlocks, KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.pressure import NoPressure, Pressure, Thresholds
from proto.config import SchedulerConfig

DEFAULT_HYSTERESIS: Final = 0.9
"""Where nothing else is said, admission goes on below this part of where it stopped."""


class AdmissionRule(Protocol):
    """A condition on the pool for letting one more request in."""

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        """Whether `request` may start with `num_new_tokens` after its cached blocks.

        Less room in the pool never turns a no into a yes.
        """
        ...


class Watermark:
    """Some blocks stay free when a request comes in, for those that run and grow."""

    def __init__(self, kv_cache: KVCacheManager, fraction: float) -> None:
        self._kv_cache = kv_cache
        self._num_reserved = int(fraction * kv_cache.num_usable_blocks)

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        needed = self._kv_cache.num_blocks_needed(request, num_new_tokens, computed)
        return needed + self._num_reserved <= self._kv_cache.num_free_blocks


class WholeSequence:
    """All tokens a request has by now must fit, not just the first chunk of them.

    So must what the prompts of running requests have yet to take.
    """

    def __init__(self, kv_cache: KVCacheManager, running: Sequence[Request]) -> None:
        self._kv_cache = kv_cache
        self._running = running

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        num_missing = request.num_tokens - request.num_computed_tokens - computed.num_tokens
        needed = self._needed(request, num_missing, computed)
        for each in self._running:
            num_missing = each.num_tokens - each.num_computed_tokens
            if num_missing > 1:
                needed += self._needed(each, num_missing, NOTHING_COMPUTED)
        return needed <= self._kv_cache.num_free_blocks

    def _needed(self, request: Request, num_missing: int, computed: ComputedBlocks) -> int:
        """Blocks that the missing tokens take; a window gives some back on the way."""
        kv_cache = self._kv_cache
        return min(
            kv_cache.num_blocks_needed(request, num_missing, computed),
            kv_cache.most_blocks(request.num_tokens),
        )


def pressure_of(config: SchedulerConfig, kv_cache: KVCacheManager) -> Pressure:
    """The thresholds of a configuration, if it sets any below the whole pool."""
    stop, preempt = config.stop_admission_above, config.preempt_above
    if stop == preempt == 1.0:
        return NoPressure()
    resume = config.resume_admission_below
    if resume is None:
        resume = DEFAULT_HYSTERESIS * stop
    return Thresholds(kv_cache, resume, stop, preempt)


def rules_of(
    config: SchedulerConfig,
    kv_cache: KVCacheManager,
    running: Sequence[Request],
    pressure: Pressure,
) -> tuple[AdmissionRule, ...]:
    """The rules that a configuration asks for; none by default."""
    rules: list[AdmissionRule] = []
    if not isinstance(pressure, NoPressure):
        rules.append(pressure)
    if config.scheduler_reserve_full_isl:
        rules.append(WholeSequence(kv_cache, running))
    if config.watermark:
        rules.append(Watermark(kv_cache, config.watermark))
    return tuple(rules)
