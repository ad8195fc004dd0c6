"""Retained prefixes: references on the KV of a session's last turn, for its next one.

    turn 1 ends ─▶ retained for 2 s ─▶ its tool is known: for τ ─▶ turn 2 arrives: retained
                        │                   │                            │
                        └──── expired, evicted for room, newer turn ─────┴─▶ it runs: released

Retained prefixes never keep a request from running: the KV cache counts blocks that only they
reference as free, and reclaims the missing number at an allocation (`reclaim_blocks`). The least
valuable prefixes are cut first, each from its end, so that the rest is still the beginning of a
prompt. With groups that are not downward-closed (sliding windows) a prefix is released as a whole,
because a shorter part of it could not be found.

`TTLRule` decides how long a prefix is retained and what it is worth. `RetainedPrefixHeap` orders
prefixes by expiry or value.
"""

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.features.base import SchedulerObserver

_SLACK: Final = 64
"""Number of stale entries of a heap that are never worth a clean-up."""


class RetainedPrefix:
    """The retained KV of one turn.

    request_id, seq_id: of the turn; number: grows with each prefix. blocks: in the order of their
    tokens; those at the end are released first. num_tokens: tokens with KV in all groups.
    ended: when the turn ended, in seconds. value: what keeping it is worth, in seconds.
    is_awaited: whether the next turn is waiting. by_client: whether the client has set the TTL.
    """

    __slots__ = (
        "agent_session",
        "blocks",
        "by_client",
        "ended",
        "is_awaited",
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
        agent_session: str,
        tenant: int,
        request_id: int,
        seq_id: int,
        blocks: list[int],
        num_tokens: int,
        ended: float,
    ) -> None:
        self.number = number
        self.agent_session = agent_session
        self.tenant = tenant
        self.request_id = request_id
        self.seq_id = seq_id
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.ended = ended
        self.value = 0.0
        self.is_awaited = self.by_client = False


class RetainedPrefixHeap:
    """Retained prefixes by ascending key; of equal keys the older one first."""

    def __init__(self) -> None:
        self._keys: dict[int, float] = {}
        self._heap: list[tuple[float, int, RetainedPrefix]] = []

    def set_key(self, prefix: RetainedPrefix, key: float) -> None:
        """Add a prefix, or change its key."""
        if self._keys.get(prefix.number) == key:
            return
        self._keys[prefix.number] = key
        heappush(self._heap, (key, prefix.number, prefix))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapify(self._heap)

    def remove_prefix(self, prefix: RetainedPrefix) -> None:
        """Remove a prefix; does nothing if it is not in the heap."""
        self._keys.pop(prefix.number, None)
        if not self._keys:
            self._heap.clear()

    def first(self) -> RetainedPrefix | None:
        """Return the prefix with the lowest key; None if the heap is empty."""
        heap = self._heap
        while heap:
            if self._is_valid(heap[0]):
                return heap[0][2]
            heappop(heap)
        return None

    def lowest_key(self) -> float | None:
        prefix = self.first()
        return None if prefix is None else self._keys[prefix.number]

    def first_up_to(self, key: float) -> RetainedPrefix | None:
        """Return the first prefix if its key is at most `key`; otherwise None."""
        prefix = self.first()
        return prefix if prefix is not None and self._keys[prefix.number] <= key else None

    def _is_valid(self, entry: tuple[float, int, RetainedPrefix]) -> bool:
        return self._keys.get(entry[1]) == entry[0]


EXPIRED: Final = "expired"
"""Reason for the release of a prefix whose TTL has passed."""


class _TenantPrefixes:
    """Retained prefixes of one tenant. counts: its references by block."""

    __slots__ = ("counts", "order")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.order = RetainedPrefixHeap()


class RetainedPrefixes:
    """Retained prefixes by session; the reclaimable blocks of a KV cache.

    max_share, max_share_of_tenant: of the usable blocks, 0 to 1; a shared block counts once.
    Counters since `pop_counts`: num_taken, num_hit (the next turn found a cached prefix),
    num_expired, num_given_up (evicted for room, or over a limit).
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        max_share: float,
        max_share_of_tenant: float,
        observer: SchedulerObserver,
    ) -> None:
        self._pool = kv_cache.pool
        self._whole = not kv_cache.is_downward_closed
        self._block_size = kv_cache.block_size
        num_usable = kv_cache.num_usable_blocks
        self._max_blocks = int(num_usable * max_share)
        self._max_of_tenant = min(self._max_blocks, int(num_usable * max_share_of_tenant))
        self._observer = observer
        self._retained_prefixes: dict[str, RetainedPrefix] = {}
        self._deadlines = RetainedPrefixHeap()
        self._values = RetainedPrefixHeap()
        self._tenants: dict[int, _TenantPrefixes] = {}
        self._num_retained = 0
        self.num_taken = self.num_hit = self.num_expired = self.num_given_up = 0
        self._changed: dict[str, None] = {}
        kv_cache.reclaimable = self

    def pop_changed(self) -> list[str]:
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def pop_counts(self) -> tuple[int, int, int, int]:
        """Return how many prefixes were retained, hit, expired and evicted since the last call."""
        counts = self.num_taken, self.num_hit, self.num_expired, self.num_given_up
        self.num_taken = self.num_hit = self.num_expired = self.num_given_up = 0
        return counts

    def __len__(self) -> int:
        return len(self._retained_prefixes)

    def __iter__(self) -> Iterator[RetainedPrefix]:
        return iter(self._retained_prefixes.values())

    @property
    def num_blocks(self) -> int:
        return len(self._pool.pinned.counts)

    def prefix_of(self, agent_session: str) -> RetainedPrefix | None:
        return self._retained_prefixes.get(agent_session)

    def retain(
        self,
        request: Request,
        blocks: list[int],
        ttl: float,
        value: float,
        now: float,
        *,
        by_client: bool = False,
    ) -> None:
        """Retain blocks of an ended turn, before they are freed, instead of the previous turn's.

        ttl, value: in seconds. Above a limit the least valuable prefixes are cut, perhaps this one.
        """
        agent_session = request.agent.session
        older = self._retained_prefixes.get(agent_session)
        if blocks:
            self._pool.pin(blocks)
        if older is not None:
            self._release(older, "newer turn")
        if not blocks:
            return
        self._num_retained += 1
        num_computed = min(request.num_computed_tokens, request.num_tokens)
        prefix = RetainedPrefix(
            number=self._num_retained,
            agent_session=agent_session,
            tenant=request.tenant,
            request_id=request.request_id,
            seq_id=request.seq_id,
            blocks=blocks,
            num_tokens=num_computed - num_computed % self._block_size,
            ended=now,
        )
        prefix.by_client = by_client
        self._retained_prefixes[agent_session] = prefix
        if self._max_of_tenant < self._max_blocks:
            counts = self._tenants.setdefault(prefix.tenant, _TenantPrefixes()).counts
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        self.num_taken += 1
        self._changed[agent_session] = None
        self._deadlines.set_key(prefix, now + ttl)
        self.set_value(prefix, value)
        self._observer.on_prefix_retained(prefix, ttl)
        self._keep_limits(prefix)

    def set_expiry(self, prefix: RetainedPrefix, ttl: float, value: float, now: float) -> None:
        """Retain a prefix until `ttl` seconds after its turn; release it if they have passed."""
        if prefix.ended + ttl <= now:
            self._release(prefix, "not worth it")
            return
        self._deadlines.set_key(prefix, prefix.ended + ttl)
        self.set_value(prefix, value)
        self._observer.on_prefix_retained(prefix, ttl)

    def set_value(self, prefix: RetainedPrefix, value: float) -> None:
        """Set the value of a prefix; while its next turn waits, it counts as infinite."""
        prefix.value = value
        if not prefix.is_awaited:
            self._update_value(prefix, value)

    def hold_for_turn(self, prefix: RetainedPrefix) -> None:
        """Retain a prefix, as the last one to be evicted, until its next turn runs."""
        prefix.is_awaited = True
        self._deadlines.remove_prefix(prefix)
        self._update_value(prefix, math.inf)

    def end_hold(self, prefix: RetainedPrefix, deadline: float) -> None:
        """Let a prefix expire at `deadline`, because its next turn has ended without running."""
        prefix.is_awaited = False
        self._deadlines.set_key(prefix, deadline)
        self._update_value(prefix, prefix.value)

    def consume(self, prefix: RetainedPrefix, *, found: bool) -> None:
        """Release a prefix whose next turn runs; found: the turn began with a cached prefix."""
        self.num_hit += found
        self._release(prefix, "next turn")

    def release_prefix(self, agent_session: str, reason: str) -> None:
        prefix = self._retained_prefixes.get(agent_session)
        if prefix is not None:
            self._release(prefix, reason)

    def release_all(self, reason: str) -> None:
        for prefix in list(self._retained_prefixes.values()):
            self._release(prefix, reason)

    @property
    def next_deadline(self) -> float | None:
        """When the next prefix expires, in seconds; None for never."""
        return self._deadlines.lowest_key()

    def release_expired(self, now: float) -> None:
        while (prefix := self._deadlines.first_up_to(now)) is not None:
            self.num_expired += 1
            self._release(prefix, EXPIRED)

    def reclaim_blocks(self, num_blocks: int) -> None:
        """Free `num_blocks` more blocks, of the least valuable prefixes."""
        pool = self._pool
        wanted = pool.num_free + num_blocks
        assert wanted <= pool.num_available, "more blocks are reclaimed than are retained"
        while pool.num_free < wanted:
            prefix = self._values.first()
            assert prefix is not None, "blocks are pinned by no prefix"
            self._cut(prefix, wanted - pool.num_free, pool.pinned.counts)

    def _keep_limits(self, prefix: RetainedPrefix) -> None:
        counts = self._pool.pinned.counts
        tenant = self._tenants.get(prefix.tenant)
        while tenant is not None and len(tenant.counts) > self._max_of_tenant:
            least = tenant.order.first()
            assert least is not None, "blocks of a tenant are pinned by no prefix"
            self._cut(least, len(tenant.counts) - self._max_of_tenant, tenant.counts)
        while len(counts) > self._max_blocks:
            least = self._values.first()
            assert least is not None, "blocks are pinned by no prefix"
            self._cut(least, len(counts) - self._max_blocks, counts)

    def _cut(self, prefix: RetainedPrefix, num_blocks: int, counts: dict[int, int]) -> None:
        """Release blocks from the end of a prefix, at most `num_blocks` that only it retains.

            |-- kept --|-- shared, its own … --|        blocks with a count of 1 are its own

        Shared blocks behind them are released too: this frees nothing, but otherwise the blocks in
        front of them could not be reached.
        """
        blocks = prefix.blocks
        first = len(blocks)
        while first and num_blocks and not self._whole:
            first -= 1
            num_blocks -= counts[blocks[first]] == 1
        if self._whole or not first:
            self.num_given_up += 1
            self._release(prefix, "room")
            return
        cut = blocks[first:][::-1]
        value = prefix.value * first / len(blocks)
        prefix.num_tokens = prefix.num_tokens * first // len(blocks)
        del blocks[first:]
        self._unpin(prefix, cut)
        self.set_value(prefix, value)

    def _release(self, prefix: RetainedPrefix, reason: str) -> None:
        self._changed[prefix.agent_session] = None
        del self._retained_prefixes[prefix.agent_session]
        self._deadlines.remove_prefix(prefix)
        self._values.remove_prefix(prefix)
        self._unpin(prefix, prefix.blocks[::-1])
        tenant = self._tenants.get(prefix.tenant)
        if tenant is not None:
            tenant.order.remove_prefix(prefix)
            if not tenant.counts:
                del self._tenants[prefix.tenant]
        self._observer.on_prefix_released(prefix, reason)

    def _unpin(self, prefix: RetainedPrefix, blocks: list[int]) -> None:
        self._pool.unpin(blocks)
        tenant = self._tenants.get(prefix.tenant)
        if tenant is not None:
            counts = tenant.counts
            for block in blocks:
                counts[block] -= 1
                if not counts[block]:
                    del counts[block]

    def _update_value(self, prefix: RetainedPrefix, value: float) -> None:
        key = value / len(prefix.blocks)
        self._values.set_key(prefix, key)
        tenant = self._tenants.get(prefix.tenant)
        if tenant is not None:
            tenant.order.set_key(prefix, key)
