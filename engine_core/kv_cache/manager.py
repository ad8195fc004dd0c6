"""The KV cache manager: what the scheduler asks for and gives back.

Owns the pool and the groups, and the statistics of prefix hits. Knows requests
only by their counters, token ids and hashes, which it never changes. It does
not decide which request waits or is preempted.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Final, Protocol

from engine_core.kv_cache.block import BlockIds
from engine_core.kv_cache.coordinator import (
    NOTHING_COMPUTED,
    ComputedBlocks,
    blocks_of_request,
    make_coordinator,
)
from engine_core.kv_cache.events import (
    NO_RESIDENCY,
    ObservedBlockPool,
    PoolObserver,
    ResidencyMeter,
)
from engine_core.kv_cache.fork import BlockCopies, fork_of
from engine_core.kv_cache.groups import FullAttentionGroup
from engine_core.kv_cache.hashing import BlockHasher, Hasher, NoHashing
from engine_core.kv_cache.pool import BlockPool, TransferRefs
from engine_core.request import Request
from proto.lifecycle import KVGroup as KVGroupSpec
from proto.stats import KVEviction

__all__ = ["NOTHING_COMPUTED", "NO_NEW_BLOCKS", "ComputedBlocks", "KVCacheManager"]

NO_NEW_BLOCKS: Final[BlockIds] = []
"""Returned, always this very object, where no group needed a block. Never changed."""


class Reserve(Protocol):
    """Holds blocks that can be reclaimed; they count as free."""

    def give_back(self, num_blocks: int) -> None:
        """Free so many blocks more; there are as many that only pins keep."""
        ...


class KVCacheManager:
    """Block tables for all requests of one engine.

    num_blocks counts the null block. fingerprint: covers everything that changes
    KV values; root of the block hashes. Requests are built with `hasher`.
    groups: of the model's layers. longest_chunk: most tokens of a request in one
    step, None for all of them. observers: told what happens to blocks.
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
        observers: Sequence[PoolObserver] = (),
        residency: ResidencyMeter = NO_RESIDENCY,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.hasher: Hasher = (
            BlockHasher(block_size, fingerprint) if enable_caching else NoHashing()
        )
        if residency.one_in:
            observers = (*observers, residency)
        self.pool = (
            ObservedBlockPool(num_blocks, enable_caching, observers)
            if observers
            else BlockPool(num_blocks, enable_caching)
        )
        self._specs = tuple(groups)
        self._longest_chunk = longest_chunk
        self._residency = residency
        self._coordinator = make_coordinator(self.pool, groups, block_size)
        self._copies = BlockCopies()
        self.transfer_refs = TransferRefs(self.pool)
        self.reserve: Reserve | None = None
        self._recheck_after: dict[int, int] = {}
        self._confirmed_until: dict[int, int] = {}  # those with KV that is still to be loaded
        self._num_queried = 0
        self._num_hit = 0

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix of a request; nothing for one that holds blocks already.

        At most num_tokens - 1 tokens, rounded down to blocks: the last token is
        always computed, for its logits. Changes nothing.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return NOTHING_COMPUTED
        if request.seq_id in self._recheck_after:
            return NOTHING_COMPUTED
        return self._coordinator.find_longest_hit(request.block_hashes, request.num_tokens - 1)

    def fork(self, source: Request, num_tokens: int) -> ComputedBlocks:
        """The first tokens of a request that holds blocks, for another one to start from.

        num_tokens: computed in an earlier step, or copied or found in this one. Nothing
        where a window of the source has passed what the next token sees, or where it is not known
        yet whether its KV was loaded. Changes nothing.
        """
        if source.seq_id in self._confirmed_until:
            return NOTHING_COMPUTED
        return fork_of(self.groups, source.seq_id, num_tokens)

    def branch(self, request: Request, source: Request, num_tokens: int) -> int:
        """Give a request that holds no blocks the first tokens of another one, at once.

        Returns how many tokens it holds now: whole blocks only where there is none for the
        copy of the last one, and nothing where the source holds nothing itself.
        """
        if source.seq_id not in self._recheck_after:
            return 0
        for shared in (num_tokens, num_tokens - num_tokens % self.block_size):
            computed = self.fork(source, shared)
            if computed.num_tokens and self._allocate(request, 0, computed, 0) is not None:
                return shared
        return 0

    def take_block_copies(self) -> list[int]:
        """Source, copy, source, copy …: what forks since the last call need done by the worker.

        They are to be made before the step is computed whose tokens the forks were
        given blocks for.
        """
        return self._copies.take()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed: ComputedBlocks = NOTHING_COMPUTED,
        num_lookahead_tokens: int = 0,
        num_external_tokens: int = 0,
    ) -> BlockIds | None:
        """Give a request room for its next tokens.

            0          comp      comp+hit     comp+hit+new   +lookahead
            |---comp---|---hit---|----new-----|--lookahead---|
            |  in the  | touched,|  taken from the free      |
            |  table   | then in |  queue where the table    |
            |          | table   |  has no room yet          |
            |<---- made findable, up to ---->|
                   request.num_tokens

        external: between hit and new, tokens whose KV is loaded into their blocks; neither
        they nor what follows is findable before `confirm_loaded`. A window has blocks only for what
        the tokens behind them see.
        comp: request.num_computed_tokens, without the hits. hit: `computed`, cached or
        forked (then its end, if it is part of a block, is copied into the first new
        one), only with the first allocation since the request was added or preempted. new:
        `num_new_tokens`, computed in this step. lookahead: room for tokens that
        are not verified yet and so never findable.

        Returns the new block ids per group (the hits are not among them;
        `block_ids` has the whole table), NO_NEW_BLOCKS if there are none, or None if
        they do not fit. Then nothing is changed, but for blocks of window groups that
        no token to come needs: they are given back first, and the null block stands
        in their place. Hits are referenced before a new block is taken, so none of
        them is overwritten by it.
        """
        num_slots = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        # Most calls are a decode inside its last block: one comparison decides.
        if num_slots < self._recheck_after.get(request.seq_id, 0):
            return NO_NEW_BLOCKS
        return self._allocate(
            request, num_new_tokens, computed, num_lookahead_tokens, num_external_tokens
        )

    def num_blocks_needed(
        self, request: Request, num_new_tokens: int, computed: ComputedBlocks = NOTHING_COMPUTED
    ) -> int:
        """Free blocks that allocate_slots would use up for the same; changes nothing.

        A hit that lies in the free queue counts: referencing it makes free space
        smaller just as taking a new block does.
        """
        num_slots = request.num_computed_tokens + computed.num_tokens + num_new_tokens
        num_new = self._coordinator.num_new_blocks(request.seq_id, num_slots, computed)
        return num_new + self._num_free_hits(computed)

    def confirm_loaded(self, request: Request, num_tokens: int) -> None:
        """What was loaded for a request holds what it should.

        It may be found from now on, with what is computed on top of it: up to `num_tokens`.
        """
        if self._confirmed_until.pop(request.seq_id, None) is not None:
            self._coordinator.release_passed(request.seq_id, num_tokens)
            self._recheck_after[request.seq_id] = self._coordinator.register_full_blocks(
                request.seq_id, request, min(num_tokens, request.num_tokens)
            )

    def num_sound_tokens(self, request: Request, bad_blocks: Collection[int]) -> int | None:
        """Leading tokens of a request none of whose blocks is bad; None where all are sound.

        None of them where there are windows: they have passed what would be needed.
        """
        has_windows = self.has_windows
        for group in self.groups:
            for index, block in enumerate(group.tables().get(request.seq_id, ())):
                if block in bad_blocks:
                    return 0 if has_windows else index * group.block_size
        return None

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Only the first tokens of a request have the KV that they should; it keeps the blocks."""
        self._confirmed_until.pop(request.seq_id, None)
        self.withdraw(request, num_tokens)

    def withdraw(self, request: Request, num_valid_tokens: int) -> None:
        """Make what a request computed after its first tokens unfindable.

        For blocks whose content is wrong or will never be computed. The request keeps
        them until it is freed, and so does whoever found them before; none of them
        offers them again.
        """
        for group in self.groups:
            group.withdraw(request.seq_id, num_valid_tokens)

    def forget(self, request: Request) -> None:
        """Make every block with content of this request unfindable, whichever filled it.

        Also those that a window has passed or that were freed. Whoever references
        such a block keeps it.
        """
        for group in self.groups:
            group.forget(request.block_hashes)

    def hand_over(self, request: Request, heir: Request, num_shared_tokens: int) -> None:
        """Give the blocks of a request to one that begins with the same tokens.

        What the blocks hold after these tokens will be overwritten, so nobody is to
        find it. Nothing happens where the request has no blocks.
        """
        recheck_after = self._recheck_after.pop(request.seq_id, None)
        self._confirmed_until.pop(request.seq_id, None)
        if recheck_after is not None:
            self.withdraw(request, num_shared_tokens)
            self._coordinator.rename(request.seq_id, heir.seq_id)
            self._recheck_after[heir.seq_id] = recheck_after

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, last one first; nothing if it has none.

        First they become findable as far as they are computed and their tokens are
        known: a block may have filled before the id of its last token was.
        """
        recheck_after = self._recheck_after.pop(request.seq_id, None)
        if recheck_after is None:
            return
        num_verified = min(
            request.num_computed_tokens,
            self._confirmed_until.pop(request.seq_id, request.num_tokens),
            request.num_tokens,
        )
        if num_verified >= recheck_after:
            self._coordinator.register_full_blocks(request.seq_id, request, num_verified)
        if self._copies.pending:
            self._copies.cancel(chain.from_iterable(self.block_ids(request.seq_id)))
        self._coordinator.free(request.seq_id)

    def mark_found(self, request: Request) -> None:
        """Note that an admitted request has found blocks that another request computed."""
        for group in self.groups:
            num_found = request.num_cached_tokens // group.block_size
            self.pool.mark_shared(group.table(request.seq_id)[:num_found])

    def findable_blocks(self, request: Request, first_token: int = 0) -> list[int]:
        """Return the findable blocks of a finished request, without the null block.

        Of all groups, in the order of their tokens, from the one of `first_token` on. To be asked
        before `free`, which would make them findable.
        """
        if request.seq_id not in self._recheck_after:
            return []
        proven = self._confirmed_until.get(request.seq_id, request.num_tokens)
        num_verified = min(request.num_computed_tokens, proven, request.num_tokens)
        self._coordinator.register_full_blocks(request.seq_id, request, num_verified)
        hashes = self.pool.hashes
        tables = [group.table(request.seq_id) for group in self.groups]
        sizes = [group.block_size for group in self.groups]
        if len(tables) == 1:
            own = tables[0][first_token // sizes[0] :]
            return [block for block in own if hashes[block] is not None]
        found = [
            (index * sizes[number], number, block)
            for number, table in enumerate(tables)
            for index, block in enumerate(table)
            if hashes[block] is not None and (index + 1) * sizes[number] > first_token
        ]
        return [block for _, _, block in sorted(found)]

    def block_ids(self, seq_id: int) -> BlockIds:
        """A copy of the block table of a request, per group."""
        return [group.table(seq_id) for group in self.groups]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, changing nothing, while any block is in use.

        Blocks that are only held, for a copy, do not count as in use.
        """
        return self.pool.reset_prefix_cache(self.transfer_refs.num_alone)

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether a block with this content can be found now."""
        return self.pool.index.get(block_hash) is not None

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request holds at once until it has this many tokens.

        Less than num_blocks_needed says where a window passes blocks on the way.
        """
        return blocks_of_request(self._specs, num_tokens, self.block_size, self._longest_chunk)

    def take_prefix_cache_stats(self) -> tuple[int, int]:
        """(tokens looked up, tokens found) since the last call.

        Counted when a request is first given blocks: one that waits for room is
        looked up again and again, and one that was preempted finds itself.
        """
        taken = (self._num_queried, self._num_hit)
        self._num_queried = self._num_hit = 0
        return taken

    def take_evictions(self) -> list[KVEviction]:
        """Residency of the sampled blocks that were overwritten since the last call."""
        return self._residency.take()

    def violations(self) -> Iterator[list[str]]:
        """Where the manager and its groups disagree with themselves, a sentence each.

        Table by table, as long as nothing changes. The pool is checked by `integrity`,
        which calls this too.
        """
        for number, group in enumerate(self.groups):
            tables = group.tables()
            if tables.keys() != self._recheck_after.keys():
                odd = sorted(tables.keys() ^ self._recheck_after.keys())
                yield [f"sequences: group {number} and the manager disagree on seq_ids {odd}"]
            for seq_id, table in tables.items():
                found = group.violations(seq_id)
                room = len(table) * group.block_size
                recheck_after = self._recheck_after.get(seq_id, 0)
                if recheck_after > room + 1:
                    found.append(
                        f"room: sequence {seq_id} has {room} slots in group {number}, but is "
                        f"not looked at before {recheck_after} are wanted"
                    )
                yield found

    @property
    def groups(self) -> tuple[FullAttentionGroup, ...]:
        """In the order of the block ids per group."""
        return self._coordinator.groups

    @property
    def has_windows(self) -> bool:
        """A prefix may be gone although what follows it is there."""
        return not all(group.has_prefixes for group in self.groups)

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_sequences(self) -> int:
        """Requests that hold blocks."""
        return len(self._recheck_after)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are free, cached content included, or would be if pins were given up."""
        return self.pool.num_available

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks in use, 0 to 1."""
        return self.pool.usage

    def _allocate(
        self,
        request: Request,
        num_new: int,
        computed: ComputedBlocks,
        num_lookahead: int,
        num_external: int = 0,
    ) -> BlockIds | None:
        seq_id, coordinator = request.seq_id, self._coordinator
        num_computed = request.num_computed_tokens + computed.num_tokens + num_external
        num_tokens = num_computed + num_new
        num_slots = num_tokens + num_lookahead
        coordinator.release_passed(seq_id, num_computed)
        num_elsewhere = num_computed if num_external else 0
        num_new_blocks = coordinator.num_new_blocks(seq_id, num_slots, computed, num_elsewhere)
        room = self.pool.num_available - num_new_blocks
        if room < 0 or (computed.num_tokens and not self._fit(computed, room)):
            return None
        if seq_id not in self._recheck_after:
            coordinator.attach(seq_id, computed)
            self._count_lookup(request, computed)
            if num_external:
                coordinator.release_passed(seq_id, num_computed)
        new_blocks = NO_NEW_BLOCKS
        if num_new_blocks:
            if num_new_blocks > self.pool.num_free:  # hits are referenced by now
                assert self.reserve is not None, "blocks are pinned, but nothing can give them back"
                self.reserve.give_back(num_new_blocks - self.pool.num_free)
            new_blocks = coordinator.extend(seq_id, num_slots)
        if computed.tails:
            self._copies.promise(computed, new_blocks)
        # Drafts and lookahead may still be rejected; only verified tokens are findable.
        if num_external:
            self._confirmed_until[seq_id] = num_computed - num_external
        num_verified = min(
            num_tokens, len(request.all_token_ids), self._confirmed_until.get(seq_id, num_tokens)
        )
        self._recheck_after[seq_id] = coordinator.register_full_blocks(
            seq_id, request, num_verified
        )
        return new_blocks if any(new_blocks) else NO_NEW_BLOCKS

    def _fit(self, computed: ComputedBlocks, num_free: int) -> bool:
        """Whether so many free blocks allow for the hits; counted one by one only in need."""
        num_hits = sum(map(len, computed.block_ids))
        return num_hits <= num_free or self._num_free_hits(computed) <= num_free

    def _num_free_hits(self, computed: ComputedBlocks) -> int:
        return sum(map(self.pool.num_evictable, computed.block_ids))

    def _count_lookup(self, request: Request, computed: ComputedBlocks) -> None:
        """Forks were not looked up, or in vain: their siblings count for them."""
        looked_up = self.enable_caching and not request.skip_reading_prefix_cache
        if looked_up and not computed.tails and request.num_preemptions == 0:
            self._num_queried += request.num_tokens
            self._num_hit += computed.num_tokens
