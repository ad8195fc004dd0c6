"""KV that jobs keep between two turns: the job's own references on the blocks of the last one.

    turn 1 ends ─▶ pinned for a moment ─▶ its tool is known: so long ─▶ turn 2 is here: kept
                        │                      │                             │
                        └──── time is over, room is lacking, newer turn ─────┴─▶ it runs: given up

Retained prefixes never keep a request from running: the KV cache counts blocks that nothing else
references as free, and reclaims as many as it lacks when it hands them out (`reclaim_blocks`). The
prefixes that are worth least are cut first, each from its end, so that the rest is still the
beginning of a prompt. Where layers have sliding windows a prefix is dropped as a whole: the blocks
that its windows have passed are gone, so no shorter prefix of it could be found.

Owns the pins and their order, one a job. What a pin is worth, and for how long, others say.
"""

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.hooks import SchedulerObserver

# A heap of retained prefixes: by the time at which they expire, or by value, the lowest first.
#
# Owns a heap, in which a pin that left or moved stays as a left-over until it comes to the top.


_SLACK: Final = 64
"""So many left-over entries are never worth a clean-up."""


class RetainedPrefix:
    """Blocks that a job keeps between two turns.

    request_id, seq_id: of the turn that is over; number: grows from pin to pin.
    blocks: in the order of their tokens; those at the end are given up first, and none is left
        only in a pin that is over. num_tokens: whose KV is in them, of all groups together.
    ended: seconds, when the turn did. value: what keeping a block is worth, in seconds.
    is_awaited: the next turn is here. by_client: the client has said for how long.
    """

    __slots__ = (
        "blocks",
        "by_client",
        "ended",
        "is_awaited",
        "job",
        "num_tokens",
        "number",
        "request_id",
        "seq_id",
        "tenant",
        "value",
    )

    def __init__(
        self,
        number: int,
        job: str,
        tenant: int,
        request_id: int,
        seq_id: int,
        blocks: list[int],
        num_tokens: int,
        ended: float,
    ) -> None:
        self.number = number
        self.job = job
        self.tenant = tenant
        self.request_id = request_id
        self.seq_id = seq_id
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.ended = ended
        self.value = 0.0
        self.is_awaited = self.by_client = False


class RetainedPrefixHeap:
    """Retained prefixes by ascending key; of two with the same key the older one first."""

    def __init__(self) -> None:
        self._keys: dict[int, float] = {}
        self._heap: list[tuple[float, int, RetainedPrefix]] = []

    def put(self, pin: RetainedPrefix, key: float) -> None:
        """Add a pin, or move it."""
        if self._keys.get(pin.number) == key:
            return
        self._keys[pin.number] = key
        heappush(self._heap, (key, pin.number, pin))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [each for each in self._heap if self._is_valid(each)]
            heapify(self._heap)

    def remove(self, pin: RetainedPrefix) -> None:
        """Nothing if it is not here."""
        self._keys.pop(pin.number, None)
        if not self._keys:
            self._heap.clear()

    def first(self) -> RetainedPrefix | None:
        """The pin of the lowest key; None where there is none."""
        heap = self._heap
        while heap:
            if self._is_valid(heap[0]):
                return heap[0][2]
            heappop(heap)
        return None

    def lowest_key(self) -> float | None:
        """That of the first pin; None where there is none."""
        pin = self.first()
        return None if pin is None else self._keys[pin.number]

    def first_up_to(self, key: float) -> RetainedPrefix | None:
        """The first pin, if its key is no higher than this."""
        pin = self.first()
        return pin if pin is not None and self._keys[pin.number] <= key else None

    def _is_valid(self, entry: tuple[float, int, RetainedPrefix]) -> bool:
        return self._keys.get(entry[1]) == entry[0]


EXPIRED: Final = "expired"
"""Why a pin is given up whose time is over."""


class RetentionLimits:
    """Most blocks that are pinned, of all tenants and of one; a shared block counts once."""

    def __init__(self, num_usable: int, share: float, share_of_tenant: float) -> None:
        self.num_blocks = int(num_usable * share)
        self.num_of_tenant = min(self.num_blocks, int(num_usable * share_of_tenant))

    @property
    def tells_tenants_apart(self) -> bool:
        return self.num_of_tenant < self.num_blocks


class _TenantPins:
    """Those of one tenant. counts: its pins by block."""

    __slots__ = ("counts", "order")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.order = RetainedPrefixHeap()


class RetainedPrefixes:
    """By job. Is the reserve of a KV cache.

    Counters since they were last taken: num_taken, num_hit (the next turn found something of the
    pin), num_expired, num_given_up (somebody needed the room, or the share was too large).
    """

    def __init__(
        self, kv_cache: KVCacheManager, limits: RetentionLimits, observer: SchedulerObserver
    ) -> None:
        self._pool = kv_cache.pool
        self._whole = not kv_cache.is_downward_closed
        self._block_size = kv_cache.block_size
        self._limits = limits
        self._observer = observer
        self._retained_prefixes: dict[str, RetainedPrefix] = {}
        self._deadlines = RetainedPrefixHeap()
        self._values = RetainedPrefixHeap()
        self._tenants: dict[int, _TenantPins] = {}
        self._num_made = 0
        self.num_taken = self.num_hit = self.num_expired = self.num_given_up = 0
        self._changed: dict[str, None] = {}
        kv_cache.reclaimable = self

    def pop_changed(self) -> list[str]:
        """Jobs that got a retained prefix, or lost theirs, since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def take_counts(self) -> tuple[int, int, int, int]:
        """Prefixes retained, hit, expired and dropped since the last call."""
        taken = self.num_taken, self.num_hit, self.num_expired, self.num_given_up
        self.num_taken = self.num_hit = self.num_expired = self.num_given_up = 0
        return taken

    def __len__(self) -> int:
        return len(self._retained_prefixes)

    def __iter__(self) -> Iterator[RetainedPrefix]:
        return iter(self._retained_prefixes.values())

    @property
    def num_blocks(self) -> int:
        """Pinned blocks; a shared one counts once."""
        return len(self._pool.pinned.counts)

    def of(self, job: str) -> RetainedPrefix | None:
        """The pin of a job, if it has one."""
        return self._retained_prefixes.get(job)

    def take(
        self,
        request: Request,
        blocks: list[int],
        ttl: float,
        value: float,
        now: float,
        *,
        by_client: bool = False,
    ) -> None:
        """Keep blocks of a turn that is over, which it still holds; the job's older pin goes.

        value: what keeping them is worth, in seconds. Over the share the least valuable go,
        which may be these.
        """
        job = request.agent.job
        older = self._retained_prefixes.get(job)
        if blocks:
            self._pool.pin(blocks)
        if older is not None:
            self._end(older, "newer turn")
        if not blocks:
            return
        self._num_made += 1
        num_computed = min(request.num_computed_tokens, request.num_tokens)
        pin = RetainedPrefix(
            self._num_made,
            job,
            request.tenant,
            request.request_id,
            request.seq_id,
            blocks,
            num_computed - num_computed % self._block_size,
            now,
        )
        pin.by_client = by_client
        self._retained_prefixes[job] = pin
        if self._limits.tells_tenants_apart:
            counts = self._tenants.setdefault(pin.tenant, _TenantPins()).counts
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        self.num_taken += 1
        self._changed[job] = None
        self._deadlines.put(pin, now + ttl)
        self.set_value(pin, value)
        self._observer.pinned(pin, ttl)
        self._keep_limits(pin)

    def grant(self, pin: RetainedPrefix, ttl: float, value: float, now: float) -> None:
        """Keep a pin for so long after the end of its turn; it goes if that is over."""
        if pin.ended + ttl <= now:
            self._end(pin, "not worth it")
            return
        self._deadlines.put(pin, pin.ended + ttl)
        self.set_value(pin, value)
        self._observer.pinned(pin, ttl)

    def set_value(self, pin: RetainedPrefix, value: float) -> None:
        """It is known what a pin is worth; that of one whose turn is here shows again later."""
        pin.value = value
        if not pin.is_awaited:
            self._put_value(pin, value)

    def wait_for_turn(self, pin: RetainedPrefix) -> None:
        """The next turn has arrived: its prefix is kept until it runs, and goes last of all."""
        pin.is_awaited = True
        self._deadlines.remove(pin)
        self._put_value(pin, math.inf)

    def wait_no_more(self, pin: RetainedPrefix, deadline: float) -> None:
        """The turn that the pin was kept for is over without having run."""
        pin.is_awaited = False
        self._deadlines.put(pin, deadline)
        self._put_value(pin, pin.value)

    def use(self, pin: RetainedPrefix, *, found: bool) -> None:
        """The next turn runs and has its own references; found: it began with a cached prefix."""
        self.num_hit += found
        self._end(pin, "next turn")

    def drop(self, job: str, reason: str) -> None:
        """Give up the pin of a job, if it has one."""
        pin = self._retained_prefixes.get(job)
        if pin is not None:
            self._end(pin, reason)

    def drop_all(self, reason: str) -> None:
        """Give up all pins."""
        for pin in list(self._retained_prefixes.values()):
            self._end(pin, reason)

    @property
    def next_deadline(self) -> float | None:
        """When the time of some pin is over; None for never."""
        return self._deadlines.lowest_key()

    def sweep(self, now: float) -> None:
        """Give up the pins whose time is over."""
        while (pin := self._deadlines.first_up_to(now)) is not None:
            self.num_expired += 1
            self._end(pin, EXPIRED)

    def reclaim_blocks(self, num_blocks: int) -> None:
        """Free so many blocks more; there must be as many that only pins reference."""
        pool = self._pool
        wanted = pool.num_free + num_blocks
        assert wanted <= pool.num_available, "more is wanted back than pins hold"
        while pool.num_free < wanted:
            pin = self._values.first()
            assert pin is not None, "blocks are pinned by no pin"
            self._cut(pin, wanted - pool.num_free, pool.pinned.counts)

    def _keep_limits(self, pin: RetainedPrefix) -> None:
        limits, counts = self._limits, self._pool.pinned.counts
        tenant = self._tenants.get(pin.tenant)
        while tenant is not None and len(tenant.counts) > limits.num_of_tenant:
            least = tenant.order.first()
            assert least is not None, "blocks of a tenant are pinned by no pin"
            self._cut(least, len(tenant.counts) - limits.num_of_tenant, tenant.counts)
        while len(counts) > limits.num_blocks:
            least = self._values.first()
            assert least is not None, "blocks are pinned by no pin"
            self._cut(least, len(counts) - limits.num_blocks, counts)

    def _cut(self, pin: RetainedPrefix, num_blocks: int, counts: dict[int, int]) -> None:
        """Give up blocks from the end of a pin, so many at most that no other pin has.

            |-- kept --|-- shared, its own … --|        those of `counts` 1 are its own

        Shared ones beyond them go too: they gain nothing, but without them nothing that stands
        before them would be reached.
        """
        blocks = pin.blocks
        first = len(blocks)
        while first and num_blocks and not self._whole:
            first -= 1
            num_blocks -= counts[blocks[first]] == 1
        if self._whole or not first:
            self.num_given_up += 1
            self._end(pin, "room")
            return
        cut = blocks[first:][::-1]
        value = pin.value * first / len(blocks)
        pin.num_tokens = pin.num_tokens * first // len(blocks)
        del blocks[first:]
        self._unpin(pin, cut)
        self.set_value(pin, value)

    def _end(self, pin: RetainedPrefix, reason: str) -> None:
        self._changed[pin.job] = None
        del self._retained_prefixes[pin.job]
        self._deadlines.remove(pin)
        self._values.remove(pin)
        self._unpin(pin, pin.blocks[::-1])
        tenant = self._tenants.get(pin.tenant)
        if tenant is not None:
            tenant.order.remove(pin)
            if not tenant.counts:
                del self._tenants[pin.tenant]
        self._observer.unpinned(pin, reason)

    def _unpin(self, pin: RetainedPrefix, blocks: list[int]) -> None:
        self._pool.unpin(blocks)
        tenant = self._tenants.get(pin.tenant)
        if tenant is not None:
            counts = tenant.counts
            for block in blocks:
                counts[block] -= 1
                if not counts[block]:
                    del counts[block]

    def _put_value(self, pin: RetainedPrefix, value: float) -> None:
        key = value / len(pin.blocks)
        self._values.put(pin, key)
        tenant = self._tenants.get(pin.tenant)
        if tenant is not None:
            tenant.order.put(pin, key)
