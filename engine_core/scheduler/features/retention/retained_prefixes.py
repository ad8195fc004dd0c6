"""Retained prefixes: references on the KV of a session's last turn, for its next one.

    turn 1 ends ─▶ retained for 2 s ─▶ its tool is known: for τ ─▶ turn 2 arrives: retained
                        │                   │                            │
                        └──── expired, reclaimed, newer turn ────────────┴─▶ it runs: released

Retained prefixes never keep a request from running: the KV cache counts blocks that only they
reference as free, and reclaims the missing number at an allocation (`reclaim_blocks`). The least
valuable prefixes are cut first, each from its end, so that the rest is still the beginning of a
prompt. With groups that lose early blocks (sliding windows) a prefix is released as a whole,
because a shorter part of it could not be found.

`TTLRule` decides how long a prefix is retained and what it is worth.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.features.base import SchedulerObserver
from engine_core.scheduler.keyed_heap import KeyedHeap


@dataclass(slots=True, eq=False)
class RetainedPrefix:
    """The retained KV of one turn.

    number: grows with each prefix. request_id, seq_id: of the turn. blocks: in the order of their
    tokens; the last ones are released first. num_tokens: tokens with KV in all groups.
    ended: when the turn ended, in seconds. by_client: whether the client has set the TTL.
    ttl: seconds from `ended` for which it is retained. value: what keeping it is worth, in seconds.
    is_awaited: whether the next turn is waiting.
    was_cut: whether blocks at its end were released before.
    """

    number: int
    agent_session: str
    tenant: int
    request_id: int
    seq_id: int
    blocks: list[int]
    num_tokens: int
    ended: float
    by_client: bool
    ttl: float
    value: float = 0.0
    is_awaited: bool = False
    was_cut: bool = False


class _TenantPrefixes:
    """Retained prefixes of one tenant. counts: its references by block. order: by value."""

    __slots__ = ("counts", "order")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.order: KeyedHeap[RetainedPrefix] = KeyedHeap()


class RetainedPrefixes:
    """Retained prefixes by session; the reclaimable blocks of a KV cache.

    max_share, max_share_of_tenant: of the usable blocks, 0 to 1; a shared block counts once.
    Counters since `pop_counts`: num_taken; num_hit: the next turn found a cached prefix;
    num_expired: released after their TTL, or at once if it has passed when it is set; num_evicted:
    cut or released for room or over a limit, each counted once.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        max_share: float,
        max_share_of_tenant: float,
        observer: SchedulerObserver,
    ) -> None:
        self._pool = kv_cache.pool
        self._whole = not kv_cache.caches_all_prefixes
        self._block_size = kv_cache.block_size
        num_usable = kv_cache.num_usable_blocks
        self._max_blocks = int(num_usable * max_share)
        self._max_of_tenant = min(self._max_blocks, int(num_usable * max_share_of_tenant))
        self._observer = observer
        self._retained_prefixes: dict[str, RetainedPrefix] = {}
        self._deadlines: KeyedHeap[RetainedPrefix] = KeyedHeap()
        self._values: KeyedHeap[RetainedPrefix] = KeyedHeap()  # per block
        self._tenants: dict[int, _TenantPrefixes] = {}
        self._num_retained = 0
        self.num_taken = self.num_hit = self.num_expired = self.num_evicted = 0
        self._changed: dict[str, None] = {}
        kv_cache.reclaim_blocks = self.reclaim_blocks

    def pop_changed(self) -> list[str]:
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def pop_counts(self) -> tuple[int, int, int, int]:
        """Return how many prefixes were retained, hit, expired and evicted since the last call."""
        counts = self.num_taken, self.num_hit, self.num_expired, self.num_evicted
        self.num_taken = self.num_hit = self.num_expired = self.num_evicted = 0
        return counts

    def __len__(self) -> int:
        return len(self._retained_prefixes)

    def __iter__(self) -> Iterator[RetainedPrefix]:
        return iter(self._retained_prefixes.values())

    @property
    def num_blocks(self) -> int:
        return len(self._pool.retained.counts)

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
            self._pool.retain(blocks)
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
            by_client=by_client,
            ttl=ttl,
        )
        self._retained_prefixes[agent_session] = prefix
        if self._max_of_tenant < self._max_blocks:
            counts = self._tenants.setdefault(prefix.tenant, _TenantPrefixes()).counts
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        self.num_taken += 1
        self._changed[agent_session] = None
        self._deadlines.set_key(prefix.number, now + ttl, prefix)
        self.set_value(prefix, value)
        self._observer.on_prefix_retained(prefix, ttl)
        self._keep_limits(prefix)

    def set_expiry(self, prefix: RetainedPrefix, ttl: float, value: float, now: float) -> None:
        """Retain a prefix until `ttl` seconds after its turn; release it if they have passed."""
        prefix.ttl = ttl
        if prefix.ended + ttl <= now:
            self.num_expired += 1
            self._release(prefix, "not worth it")
            return
        self._deadlines.set_key(prefix.number, prefix.ended + ttl, prefix)
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
        self._deadlines.remove(prefix.number)
        self._update_value(prefix, math.inf)

    def end_hold(self, prefix: RetainedPrefix, deadline: float) -> None:
        """Let a prefix expire at `deadline`, because its next turn has ended without running."""
        prefix.is_awaited = False
        self._deadlines.set_key(prefix.number, deadline, prefix)
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
        first = self._deadlines.first()
        return None if first is None else first[0]

    def release_expired(self, now: float) -> None:
        while (first := self._deadlines.first()) is not None and first[0] <= now:
            self.num_expired += 1
            self._release(first[2], "expired")

    def reclaim_blocks(self, num_blocks: int) -> None:
        """Free `num_blocks` more blocks, of the least valuable prefixes."""
        pool = self._pool
        wanted = pool.num_free + num_blocks
        assert wanted <= pool.num_available, "more blocks are reclaimed than are retained"
        while pool.num_free < wanted:
            self._cut_least(self._values, wanted - pool.num_free, pool.retained.counts)

    def _keep_limits(self, prefix: RetainedPrefix) -> None:
        counts = self._pool.retained.counts
        tenant = self._tenants.get(prefix.tenant)
        while tenant is not None and len(tenant.counts) > self._max_of_tenant:
            excess = len(tenant.counts) - self._max_of_tenant
            self._cut_least(tenant.order, excess, tenant.counts)
        while len(counts) > self._max_blocks:
            self._cut_least(self._values, len(counts) - self._max_blocks, counts)

    def _cut_least(
        self, order: KeyedHeap[RetainedPrefix], num_blocks: int, counts: dict[int, int]
    ) -> None:
        """Release blocks from the end of the prefix that is worth least.

        At most `num_blocks` that only it retains.

            |-- kept --|-- shared, its own … --|        blocks with a count of 1 are its own

        Shared blocks after the prefix's own ones are released, too, because blocks are released
        from the end. This frees nothing.
        """
        least = order.first()
        assert least is not None, "blocks are retained by no prefix"
        prefix = least[2]
        blocks = prefix.blocks
        first = len(blocks)
        while first and num_blocks and not self._whole:
            first -= 1
            num_blocks -= counts[blocks[first]] == 1
        self.num_evicted += not prefix.was_cut
        if self._whole or not first:
            self._release(prefix, "room")
            return
        cut = blocks[first:][::-1]
        value = prefix.value * first / len(blocks)
        prefix.num_tokens = prefix.num_tokens * first // len(blocks)
        del blocks[first:]
        self._release_blocks(prefix, cut)
        prefix.was_cut = True
        self.set_value(prefix, value)
        self._observer.on_prefix_retained(prefix, prefix.ttl)

    def _release(self, prefix: RetainedPrefix, reason: str) -> None:
        self._changed[prefix.agent_session] = None
        del self._retained_prefixes[prefix.agent_session]
        self._deadlines.remove(prefix.number)
        self._values.remove(prefix.number)
        self._release_blocks(prefix, prefix.blocks[::-1])
        tenant = self._tenants.get(prefix.tenant)
        if tenant is not None:
            tenant.order.remove(prefix.number)
            if not tenant.counts:
                del self._tenants[prefix.tenant]
        self._observer.on_prefix_released(prefix, reason)

    def _release_blocks(self, prefix: RetainedPrefix, blocks: list[int]) -> None:
        self._pool.release_retained(blocks)
        tenant = self._tenants.get(prefix.tenant)
        if tenant is not None:
            counts = tenant.counts
            for block in blocks:
                counts[block] -= 1
                if not counts[block]:
                    del counts[block]

    def _update_value(self, prefix: RetainedPrefix, value: float) -> None:
        key = value / len(prefix.blocks)
        self._values.set_key(prefix.number, key, prefix)
        tenant = self._tenants.get(prefix.tenant)
        if tenant is not None:
            tenant.order.set_key(prefix.number, key, prefix)
