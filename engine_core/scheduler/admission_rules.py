"""Conditions on free blocks for an admission, beyond "the next tokens fit"."""

from collections.abc import Sequence
from typing import Final, Protocol

from engine_core.kv_cache.manager import NO_PREFIX, CachedPrefix, KVCacheManager
from engine_core.request import Request
from proto.settings.config import SchedulerConfig

DEFAULT_HYSTERESIS: Final = 0.9
"""Admission resumes below this fraction of the occupancy at which it stops, by default."""


class AdmissionRule(Protocol):
    """A condition on the pool for admitting the request at the head of the queue.

    A refusal ends admission for this step, so no later request overtakes. Rules are not asked while
    no request runs or loads, so there is always progress.
    """

    def admits(self, request: Request, num_new_tokens: int, computed: CachedPrefix) -> bool:
        """Return whether a request may start with `num_new_tokens` after its cached blocks.

        Fewer free blocks must never turn a refusal into an admission.
        """


class KVWatermarks:
    """A rule: occupancies of the pool at which admission resumes and stops, and preemption begins.

        in use   0 ───── resume ────── stop ────── preempt ── all
                   admit  |  as before  |  stopped   |  stopped, and requests are preempted

    The gaps prevent one request from being admitted and preempted in turns. Arguments are fractions
    of the usable blocks, 0 < resume_below <= stop_above <= preempt_above <= 1.
    """

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
        self._admitting = True

    def too_high(self) -> bool:
        """Return whether a running request has to be preempted; called in every step.

        The call also notes the occupancy, which may fall below a watermark between two steps and be
        above it again when the next request is admitted.
        """
        return self._update_in_use() > self._preempt_above

    def admits(self, request: Request, num_new_tokens: int, computed: CachedPrefix) -> bool:
        in_use = self._update_in_use()
        needed = self._kv_cache.num_blocks_needed(request, num_new_tokens, computed)
        return self._admitting and in_use + needed <= self._preempt_above

    def _update_in_use(self) -> int:
        """Return the blocks in use; stop or resume admission accordingly."""
        in_use = self._num_usable - self._kv_cache.num_available_blocks
        if in_use > self._stop_above:
            self._admitting = False
        elif in_use < self._resume_below:
            self._admitting = True
        return in_use


class Watermark:
    """A rule: a fraction of the blocks stays free at an admission, for requests that run."""

    def __init__(self, kv_cache: KVCacheManager, fraction: float) -> None:
        self._kv_cache = kv_cache
        self._num_reserved = int(fraction * kv_cache.num_usable_blocks)

    def admits(self, request: Request, num_new_tokens: int, computed: CachedPrefix) -> bool:
        needed = self._kv_cache.num_blocks_needed(request, num_new_tokens, computed)
        return needed + self._num_reserved <= self._kv_cache.num_available_blocks


class WholeSequence:
    """A rule: all tokens of the request must fit, not just the first chunk of them.

    So must the rest of the prompts of running requests.
    """

    def __init__(self, kv_cache: KVCacheManager, running: Sequence[Request]) -> None:
        self._kv_cache = kv_cache
        self._running = running

    def admits(self, request: Request, num_new_tokens: int, computed: CachedPrefix) -> bool:
        num_missing = request.num_tokens - request.num_computed_tokens - computed.num_tokens
        needed = self._needed(request, num_missing, computed)
        for other in self._running:
            if other.is_prefilling:
                num_missing = other.num_tokens - other.num_computed_tokens
                needed += self._needed(other, num_missing, NO_PREFIX)
        return needed <= self._kv_cache.num_available_blocks

    def _needed(self, request: Request, num_missing: int, computed: CachedPrefix) -> int:
        """Return the blocks that the missing tokens need; a window frees some on the way."""
        kv_cache = self._kv_cache
        return min(
            kv_cache.num_blocks_needed(request, num_missing, computed),
            kv_cache.max_blocks(request.num_tokens),
        )


def make_kv_watermarks(config: SchedulerConfig, kv_cache: KVCacheManager) -> KVWatermarks | None:
    """Return the watermarks of a configuration; None if it sets none below the whole pool."""
    stop, preempt = config.stop_admission_above, config.preempt_above
    if stop == preempt == 1.0:
        return None
    resume = config.resume_admission_below
    if resume is None:
        resume = DEFAULT_HYSTERESIS * stop
    return KVWatermarks(kv_cache, resume, stop, preempt)


def rules_of(
    config: SchedulerConfig,
    kv_cache: KVCacheManager,
    running: Sequence[Request],
    watermarks: KVWatermarks | None,
) -> tuple[AdmissionRule, ...]:
    """Return the rules of a configuration; none by default."""
    rules: list[AdmissionRule] = []
    if watermarks is not None:
        rules.append(watermarks)
    if config.scheduler_reserve_full_isl:
        rules.append(WholeSequence(kv_cache, running))
    if config.watermark:
        rules.append(Watermark(kv_cache, config.watermark))
    return tuple(rules)
