"""The KV cache manager: the scheduler's interface to blocks, groups and cached prefixes.

The manager owns the pool, the coordinator of the groups, and the statistics of prefix hits. It
reads the counters, token ids and hashes of requests and never changes them. Which request waits or
is preempted is decided elsewhere. Start reading at `KVCacheManager.allocate_slots`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from engine_core.block_hashing import BlockHasher
from engine_core.kv_cache.coordinator import (
    NO_PREFIX,
    CachedPrefix,
    KVCacheCoordinator,
    PendingCopies,
    make_groups,
    max_blocks_of_request,
)
from engine_core.kv_cache.events import NO_RESIDENCY, PoolObserver, ResidencyMeter, make_pool
from engine_core.kv_cache.groups import CacheGroup, FullAttentionGroup, RecurrentStateGroup
from engine_core.kv_cache.pool import TransferRefs
from engine_core.request import Request
from proto.messages.lifecycle import KVGroup as KVGroupSpec
from proto.messages.scheduler_output import BlockIds
from proto.messages.stats import KVEviction

__all__ = ["NO_NEW_BLOCKS", "NO_PREFIX", "CachedPrefix", "KVCacheManager"]

NO_NEW_BLOCKS: Final[BlockIds] = []
"""Returned, always this very object, if no group needed a block; never changed."""


class KVCacheManager:
    """Block tables of all requests of one engine.

    num_blocks counts the null block. fingerprint: covers everything that changes KV values; the
    root of the block hashes. hasher: to be given to each Request; None without prefix caching.
    groups: of the model's layers. longest_chunk: maximum tokens of a request in one step;
    None: all of them. reclaim_blocks: frees this many more blocks of retained prefixes.
    num_state_slots: of the pool of recurrent states, with the null slot. observers,
    state_observers: of the two pools. num_dropped_blocks: cached
    blocks at the end of a hit that are computed again. 1 for a draft head (EAGLE): its KV at a
    position also depends on the next token, so the last entry of a block is right only for a
    request that continues with the same token.

        cached     | A | B | C |      C's last entry belongs to a next token that is not known
        hit        | A | B |          C's first token is known, so B's last entry is right, unless
                                      an equal block was kept that another token followed
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool,
        fingerprint: bytes,
        *,
        groups: Sequence[KVGroupSpec] = (KVGroupSpec(),),
        longest_chunk: int | None = None,
        num_state_slots: int = 0,
        eviction_policy: str = "lru",
        observers: Sequence[PoolObserver] = (),
        state_observers: Sequence[PoolObserver] = (),
        residency: ResidencyMeter = NO_RESIDENCY,
        num_dropped_blocks: int = 0,
    ) -> None:
        self.num_dropped_blocks = num_dropped_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.hasher = BlockHasher(block_size, fingerprint) if enable_caching else None
        if residency.one_in:
            observers = (*observers, residency)
        self.pool = make_pool(num_blocks, enable_caching, eviction_policy, observers)
        self._specs = tuple(groups)
        self._longest_chunk = longest_chunk
        self._residency = residency
        self._coordinator = KVCacheCoordinator(
            make_groups(
                *(self.pool, groups, block_size, num_state_slots, eviction_policy),
                *(num_dropped_blocks, state_observers),
            )
        )
        self.state_groups = self._coordinator.state_groups
        self.has_states = bool(self.state_groups)
        self.block_groups = tuple(
            group for group in self._coordinator.groups if group.pool is self.pool
        )
        self._pending_copies = PendingCopies()
        self._pending_state_copies = PendingCopies()
        self.transfer_refs = TransferRefs(self.pool)
        self.reclaim_blocks: Callable[[int], None] | None = None
        # By seq_id, of all requests with blocks: a number of tokens, below which an allocation
        # needs no new block, frees none of a window and completes none.
        self._unchanged_below: dict[int, int] = {}
        # By seq_id, of requests with KV that is being loaded: tokens before that KV.
        self._confirmed_until: dict[int, int] = {}
        self._num_queried = 0
        self._num_hit = 0

    def begin_step(self) -> None:
        """Note that a step is planned: states that earlier steps compute can be found from now."""
        for group in self.state_groups:
            group.begin_step()

    def want_state(self, request: Request, num_tokens: int) -> bool:
        """Hold the recurrent state after these tokens, whole blocks, for requests that will look.

        Returns whether they will find it; True for a model without states, where KV is enough.
        """
        are_held = True
        for group in self.state_groups:
            are_held &= group.want_state(request.seq_id, num_tokens, request)
        return are_held

    @property
    def num_states(self) -> tuple[int, int]:
        """Return the slots for recurrent states, and how many of them requests hold."""
        pools = [group.pool for group in self.state_groups]
        slots = sum(pool.num_blocks - 1 for pool in pools)
        return slots, slots - sum(pool.num_free for pool in pools)

    # Prefixes

    def get_computed_blocks(self, request: Request) -> CachedPrefix:
        """Return the longest cached prefix of a request; nothing if it holds blocks already.

        At most num_tokens - 1 tokens, rounded down to blocks: the last token is always computed,
        for its logits. Changes nothing.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return NO_PREFIX
        if request.seq_id in self._unchanged_below:
            return NO_PREFIX
        return self._coordinator.find_longest_hit(request.block_hashes, request.num_tokens - 1)

    def find_fork(self, source: Request, num_tokens: int) -> CachedPrefix:
        """Return the KV of the first tokens of a request that holds blocks, for another request.

        num_tokens: tokens whose KV was computed in an earlier step, or copied or found in this one.
        Returns nothing if a window of the source has freed what the next token sees, while KV of
        the source is being loaded, or if its recurrent state is that after more tokens. Changes
        nothing.
        """
        if source.seq_id in self._confirmed_until:
            return NO_PREFIX
        if self.has_states and source.num_computed_tokens != num_tokens:
            return NO_PREFIX
        return self._coordinator.find_fork(source.seq_id, num_tokens)

    def fork_blocks(self, request: Request, source: Request, num_tokens: int) -> int:
        """Give the KV of the first tokens of `source` to a request that holds no blocks.

        Returns how many tokens it holds now: only whole blocks if no block is free for the copy of
        the last one, and none if the source holds no blocks.
        """
        if source.seq_id not in self._unchanged_below:
            return 0
        for shared in (num_tokens, num_tokens - num_tokens % self.block_size):
            computed = self.find_fork(source, shared)
            if computed.num_tokens and self._allocate(request, 0, computed, 0) is not None:
                return shared
        return 0

    def pop_copies(self) -> tuple[list[int], list[int]]:
        """Return source, target, source, target …: copies for forks since the last call.

        Of blocks, and of slots of recurrent states. The worker makes them before it computes the
        step for which the forks were given blocks.
        """
        states = self._pending_state_copies.pop_all() if self.has_states else []
        return self._pending_copies.pop_all(), states

    def use_loaded(self, request: Request, computed: CachedPrefix, num_tokens: int) -> CachedPrefix:
        """Return what a request holds of its first tokens if a connector loads the rest of them.

        computed: from `get_computed_blocks`, without changes of the cache since. Pass the result to
        `allocate_slots`, with the tokens that `computed` does not have as external ones.
        """
        if not self.has_states:
            return computed
        return self._coordinator.with_loaded(computed, request.block_hashes, num_tokens)

    def state_ends(self, request: Request, first_token: int) -> frozenset[int]:
        """Return after how many tokens of a request a state is cached, more than `first_token`."""
        first, end = first_token // self.block_size, (request.num_tokens - 1) // self.block_size
        hashes = request.block_hashes[first:end]
        return frozenset(
            (index + 1) * self.block_size
            for group in self.state_groups
            for index, block_hash in enumerate(hashes, first)
            if group.find_state(block_hash) is not None
        )

    # Allocation

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed: CachedPrefix = NO_PREFIX,
        num_lookahead_tokens: int = 0,
        num_external_tokens: int = 0,
    ) -> BlockIds | None:
        """Give a request room for its next tokens.

            0        comp      comp+hit      +external      +new   +lookahead
            |--comp--|---hit---|--external---|-----new------|--lookahead--|
            | in the | touched,|        taken from the free queue         |
            | table  | then in |        where the table has no            |
            |        | table   |        room yet                          |
            |<---- made findable, up to request.num_tokens ----->|

        comp: request.num_computed_tokens, without the hit.
        hit: `computed`, cached or of a fork's source; only with the first allocation since the
            request was added or preempted. If a fork ends within a block, that block is copied
            into the first new one.
        external: tokens whose KV a connector loads into their blocks. Neither they nor what follows
            is findable before `confirm_loaded`. A window gets blocks only for external tokens that
            later tokens see.
        new: tokens computed in this step.
        lookahead: room for tokens that are not verified yet, and so never findable.

        Returns the new block ids per group (without the hit; `block_ids` has the whole table),
        NO_NEW_BLOCKS if there are none, or None if they do not fit. Then nothing has changed,
        except that blocks that no later token needs are freed. Hits are referenced before a new
        block is taken, so none of them is overwritten.
        """
        num_positions = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        # Most calls are a decode within its last block: one comparison decides.
        if num_positions < self._unchanged_below.get(request.seq_id, 0):
            return NO_NEW_BLOCKS
        return self._allocate(
            request, num_new_tokens, computed, num_lookahead_tokens, num_external_tokens
        )

    def num_blocks_needed(
        self, request: Request, num_new_tokens: int, computed: CachedPrefix = NO_PREFIX
    ) -> int:
        """Return how many free blocks `allocate_slots` would use for the same; changes nothing.

        A hit in the free queue counts, because referencing it leaves one free block less.
        """
        num_positions = request.num_computed_tokens + computed.num_tokens + num_new_tokens
        num_new = self._coordinator.num_new_blocks(request.seq_id, num_positions, computed)
        return num_new + self._num_free_hits(computed)

    def max_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request holds at once until it has this many tokens.

        Fewer than `num_blocks_needed` if the groups free blocks on the way.
        """
        return max_blocks_of_request(self._specs, num_tokens, self.block_size, self._longest_chunk)

    def hand_over_blocks(self, request: Request, heir: Request, num_shared_tokens: int) -> None:
        """Give the blocks of a request to one that begins with the same tokens.

        Content after the shared tokens will be overwritten, so it becomes unfindable. Does
        nothing if the request has no blocks.
        """
        unchanged_below = self._unchanged_below.pop(request.seq_id, None)
        self._confirmed_until.pop(request.seq_id, None)
        if unchanged_below is not None:
            self.uncache_after(request, num_shared_tokens)
            self._coordinator.rename_sequence(request.seq_id, heir.seq_id)
            self._unchanged_below[heir.seq_id] = unchanged_below

    def free(self, request: Request) -> None:
        """Free all blocks of a request, last one first; nothing if it has none.

        Full blocks become findable before that: a block may have been filled before the id of its
        last token was known.
        """
        unchanged_below = self._unchanged_below.pop(request.seq_id, None)
        if unchanged_below is None:
            return
        num_verified = min(
            request.num_computed_tokens,
            self._confirmed_until.pop(request.seq_id, request.num_tokens),
            request.num_tokens,
        )
        if num_verified >= unchanged_below:
            self._coordinator.cache_full_blocks(request.seq_id, request, num_verified)
        if self._pending_copies:
            self._pending_copies.cancel(self._pool_blocks(request.seq_id))
        if self._pending_state_copies:
            for group in self.state_groups:
                self._pending_state_copies.cancel(group.block_table(request.seq_id))
        self._coordinator.free_sequence(request.seq_id)

    # Content that is loaded, or wrong

    def confirm_loaded(self, request: Request, num_tokens: int) -> None:
        """Make loaded KV findable, and what was computed on top of it: `num_tokens` in all."""
        if self._confirmed_until.pop(request.seq_id, None) is not None:
            self._coordinator.remove_skipped_blocks(request.seq_id, num_tokens)
            self._unchanged_below[request.seq_id] = self._coordinator.cache_full_blocks(
                request.seq_id, request, min(num_tokens, request.num_tokens)
            )

    def uncache_invalid(self, bad_blocks: Iterable[int], bad_slots: Iterable[int]) -> None:
        """Make blocks and slots of states unfindable whose load has failed; unknown ones pass."""
        self.pool.uncache([block for block in bad_blocks if 0 < block < self.pool.num_blocks])
        for group in self.state_groups:
            group.pool.uncache([slot for slot in bad_slots if 0 < slot < group.pool.num_blocks])

    def num_valid_tokens(
        self, request: Request, bad_blocks: Collection[int], bad_slots: Collection[int] = ()
    ) -> int | None:
        """Return how many leading tokens of a request have no bad block; None: all of them.

        0 if groups have freed what would be needed to compute again from there. bad_slots: of
        recurrent states.
        """
        if not self.caches_all_prefixes:
            seq_id = request.seq_id
            is_bad = any(block in bad_blocks for block in self._pool_blocks(seq_id)) or any(
                slot in bad_slots
                for group in self.state_groups
                for slot in group.block_table(seq_id)
            )
            return 0 if is_bad else None
        found = [group.num_valid_tokens(request.seq_id, bad_blocks) for group in self.groups]
        return min([number for number in found if number is not None], default=None)

    def rewind(self, request: Request, num_valid_tokens: int) -> None:
        """Make content after the first tokens unfindable, also if it is being loaded.

        The request keeps its blocks and computes the tokens again.
        """
        self._confirmed_until.pop(request.seq_id, None)
        self.uncache_after(request, num_valid_tokens)

    def uncache_after(self, request: Request, num_valid_tokens: int) -> None:
        """Make the content of a request's blocks after its first tokens unfindable.

        For content that is wrong or will never be computed. Requests that reference these blocks
        keep them.
        """
        for group in self.groups:
            group.uncache_after(request.seq_id, num_valid_tokens)

    def uncache_content(self, request: Request, first_token: int = 0) -> None:
        """Make every block with content of this request unfindable, whichever request filled it.

        From the block of `first_token` on. Also blocks that were freed. Requests that reference
        these blocks keep them.
        """
        hashes = request.block_hashes[first_token // self.block_size :]
        for group in self.groups:
            group.uncache_hashes(hashes)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, changing nothing, while any request has blocks.

        Blocks that only a copy of a connector references do not prevent it.
        """
        if not self.pool.reset_prefix_cache(self.transfer_refs.num_alone):
            return False
        for group in self.state_groups:
            group.pool.reset_prefix_cache(group.transfer_refs.num_alone)
        return True

    # Copies of a connector

    def hold_for_copies(self, tables: BlockIds) -> None:
        """Reference the blocks and slots of block tables once more, until their copies end."""
        for group, table in zip(self.groups, tables, strict=True):
            self._refs_of(group).hold(table)

    def release_copied(self, tables: BlockIds) -> None:
        """Drop the references taken by `hold_for_copies`."""
        for group, table in zip(self.groups, tables, strict=True):
            self._refs_of(group).release(table)

    def release_all_copied(self) -> None:
        """Drop the references of all copies: none is under way any more."""
        self.transfer_refs.release_all()
        for group in self.state_groups:
            group.transfer_refs.release_all()

    @property
    def num_copied(self) -> int:
        """Number of blocks and slots that copies reference."""
        num_slots = sum(group.transfer_refs.num_blocks for group in self.state_groups)
        return self.transfer_refs.num_blocks + num_slots

    def awaits_copies(self, request: Request) -> bool:
        """Return whether a request lacks blocks or slots that only unfinished copies hold."""
        lacks_blocks = self.max_blocks(request.num_tokens) > self.num_available_blocks
        if lacks_blocks and self.transfer_refs.num_alone:
            return True
        return any(
            group.transfer_refs.num_alone and not group.can_start(()) for group in self.state_groups
        )

    @property
    def state_refs(self) -> TransferRefs:
        """References that copies have on slots of recurrent states."""
        (group,) = self.state_groups
        return group.transfer_refs

    def can_copy_states(self, seq_id: int, *, ends: bool) -> bool:
        """Return whether a copy may reference a state of a sequence; ends: it is about to end."""
        return all(group.can_copy(seq_id, ends=ends) for group in self.state_groups)

    def storable_states(self, seq_id: int, num_tokens: int, *, ends: bool) -> list[tuple[int, int]]:
        """Return (index of the block, slot) of the states of a sequence that are worth storing."""
        return [
            state
            for group in self.state_groups
            for state in group.storable_states(seq_id, num_tokens, ends=ends)
        ]

    def _refs_of(self, group: CacheGroup) -> TransferRefs:
        return group.transfer_refs if isinstance(group, RecurrentStateGroup) else self.transfer_refs

    # Questions and statistics

    def mark_shared_prefix(self, request: Request) -> None:
        """Note that an admitted request has found blocks of another session."""
        for group in self.groups:
            self.pool.mark_shared(group.prefix_blocks(request.seq_id, request.num_cached_tokens))

    def findable_blocks(self, request: Request, first_token: int = 0) -> list[int]:
        """Return the findable blocks of a finished request, before `free` is called.

        Without null blocks, of all groups in the order of their tokens, from the block of
        `first_token` on.
        """
        if request.seq_id not in self._unchanged_below:
            return []
        confirmed = self._confirmed_until.get(request.seq_id, request.num_tokens)
        num_verified = min(request.num_computed_tokens, confirmed, request.num_tokens)
        self._coordinator.cache_full_blocks(request.seq_id, request, num_verified)
        found = [
            (position, number, block)
            for number, group in enumerate(self.groups)
            for position, block in group.cached_blocks(request.seq_id, first_token)
        ]
        return [block for _, _, block in sorted(found)]

    def block_ids(self, seq_id: int) -> BlockIds:
        """Return a copy of the block table of a request, per group."""
        return [group.block_table(seq_id) for group in self.groups]

    def is_cached(self, block_hash: bytes) -> bool:
        return self.pool.index.get(block_hash) is not None

    def pop_prefix_cache_stats(self) -> tuple[int, int]:
        """Return (tokens looked up, tokens found) since the last call.

        Counted when a request is first given blocks, because a request that waits for room is
        looked up again and again, and a preempted one finds its own blocks.
        """
        stats = (self._num_queried, self._num_hit)
        self._num_queried = self._num_hit = 0
        return stats

    def pop_evictions(self) -> list[KVEviction]:
        """Return the lifetimes of sampled blocks that were overwritten since the last call."""
        return self._residency.pop_evictions()

    def violations(self) -> Iterator[list[str]]:
        """Yield, table by table, where the manager and its groups disagree, one sentence each.

        Part of `integrity.check`, which also checks the pool.
        """
        for number, group in enumerate(self.groups):
            tables = group.block_tables()
            if tables.keys() != self._unchanged_below.keys():
                odd = sorted(tables.keys() ^ self._unchanged_below.keys())
                yield [f"sequences: group {number} and the manager disagree on seq_ids {odd}"]
            for seq_id in tables:
                yield group.violations(seq_id, self._unchanged_below.get(seq_id, 0))

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups of the model, in the order of the block ids per group."""
        return self._coordinator.groups

    @property
    def full_attention_group(self) -> FullAttentionGroup | None:
        """The first group that keeps the blocks of all tokens; None if all groups free some.

        The KV cache of a draft model has its block ids.
        """
        for group in self.groups:
            if type(group) is FullAttentionGroup:
                return group
        return None

    @property
    def caches_all_prefixes(self) -> bool:
        """Whether every shorter prefix of a cached prefix is cached too, in all groups."""
        return all(group.caches_all_prefixes for group in self.groups)

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks without the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_sequences(self) -> int:
        """Number of requests that hold blocks."""
        return len(self._unchanged_below)

    @property
    def num_available_blocks(self) -> int:
        """Number of blocks that are free or cached, or would be without retained prefixes."""
        return self.pool.num_available

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks in use, 0 to 1."""
        return self.pool.usage

    def _allocate(
        self,
        request: Request,
        num_new: int,
        computed: CachedPrefix,
        num_lookahead: int,
        num_external: int = 0,
    ) -> BlockIds | None:
        seq_id, coordinator = request.seq_id, self._coordinator
        num_computed = request.num_computed_tokens + computed.num_tokens + num_external
        num_tokens = num_computed + num_new
        num_positions = num_tokens + num_lookahead
        coordinator.remove_skipped_blocks(seq_id, num_computed)
        num_loaded = num_computed if num_external else 0
        num_new_blocks = coordinator.num_new_blocks(seq_id, num_positions, computed, num_loaded)
        num_left = self.pool.num_available - num_new_blocks
        if num_left < 0 or (computed.block_ids and not self._hits_fit(computed, num_left)):
            return None
        is_new = seq_id not in self._unchanged_below
        if self.has_states and is_new and not coordinator.can_start(computed, num_loaded):
            return None
        if is_new:
            coordinator.attach_blocks(seq_id, computed, num_loaded)
            self._count_lookup(request, computed)
            if num_external:
                coordinator.remove_skipped_blocks(seq_id, num_computed)
        new_blocks = NO_NEW_BLOCKS
        if num_new_blocks or self.has_states:
            if num_new_blocks > self.pool.num_free:  # hits are referenced by now
                assert self.reclaim_blocks is not None, (
                    "blocks are retained, but none can be reclaimed"
                )
                self.reclaim_blocks(num_new_blocks - self.pool.num_free)
            new_blocks = coordinator.allocate_blocks(seq_id, num_positions)
        for number, tail in enumerate(computed.tails):
            of_states = self.groups[number].pool is not self.pool
            copies = self._pending_state_copies if of_states else self._pending_copies
            copies.add_fork(tail, new_blocks[number] if new_blocks else ())
        # Drafts and lookahead may still be rejected; only verified tokens are findable.
        if num_external:
            self._confirmed_until[seq_id] = num_computed - num_external
        num_verified = min(
            num_tokens, len(request.all_token_ids), self._confirmed_until.get(seq_id, num_tokens)
        )
        self._unchanged_below[seq_id] = coordinator.cache_full_blocks(seq_id, request, num_verified)
        return new_blocks if any(new_blocks) else NO_NEW_BLOCKS

    def _hits_fit(self, computed: CachedPrefix, num_free: int) -> bool:
        """Return whether at most `num_free` of the hits are blocks that are free now.

        If there are no more hits than that, none is looked at.
        """
        num_hits = sum(map(len, self._hits_of_pool(computed)))
        return num_hits <= num_free or self._num_free_hits(computed) <= num_free

    def _num_free_hits(self, computed: CachedPrefix) -> int:
        return sum(map(self.pool.num_evictable, self._hits_of_pool(computed)))

    def _pool_blocks(self, seq_id: int) -> Iterator[int]:
        """Yield the blocks of the KV pool in the tables of a sequence."""
        return chain.from_iterable(group.block_table(seq_id) for group in self.block_groups)

    def _hits_of_pool(self, computed: CachedPrefix) -> Sequence[list[int]]:
        """Return the hits that are blocks of the KV pool, per group; slots of states are not."""
        if not self.has_states:
            return computed.block_ids
        groups = zip(self.groups, computed.block_ids, strict=False)
        return [blocks for group, blocks in groups if group.pool is self.pool]

    def _count_lookup(self, request: Request, computed: CachedPrefix) -> None:
        """Count a lookup of the prefix cache; forks were not looked up, or counted as a miss."""
        looked_up = self.enable_caching and not request.skip_reading_prefix_cache
        if looked_up and not computed.tails and request.num_preemptions == 0:
            self._num_queried += request.num_tokens
            self._num_hit += computed.num_tokens
