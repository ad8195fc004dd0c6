"""A state machine that applies a scheduler's operations to the KV cache manager and its model.

After every step hits, new ids, free order and content must agree, and the integrity check must find
nothing.
"""

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine_core.kv_cache import integrity
from engine_core.kv_cache.manager import NO_NEW_BLOCKS, NO_PREFIX
from engine_core.request import Request
from tests.fakes.kv_events import CachedHashes, event_log, indexed
from tests.fakes.kv_requests import Requests, make_manager
from tests.fakes.pool_model import PoolModel, Tables

TOKENS = st.sampled_from([0, 0, 0, 1])
INDEX = st.integers(min_value=0, max_value=1000)
WINDOWS = st.sampled_from(
    [(None,), (None,), (4,), (None, 2), (None, 4, 4), (3, None, 8), (2, 5), (1, None), (None, 3, 6)]
)


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        num_usable=st.sampled_from([20, 30, 12, 8, 4, 2, 1]),
        block_size=st.sampled_from([4, 2, 3, 1]),
        caching=st.sampled_from([True, True, True, False]),
        windows=WINDOWS,
    )
    def start(
        self, num_usable: int, block_size: int, caching: bool, windows: tuple[int | None, ...]
    ) -> None:
        num_blocks = num_usable * len(windows) + 1
        self.log = event_log(*windows)
        self.manager = make_manager(
            num_blocks, block_size, caching, windows=windows, observers=[self.log]
        )
        self.known = CachedHashes()
        self.model = PoolModel(num_blocks, block_size, caching, windows)
        self.requests = Requests(self.manager)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.caching = caching

    @rule(
        common=st.sampled_from([12, 8, 16, 20, 0]),
        tail=st.lists(TOKENS, min_size=1, max_size=8),
        salt=st.sampled_from([None] * 5 + ["s"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        twins=st.sampled_from([2, 1, 3]),
    )
    def add(
        self,
        common: int,
        tail: list[int],
        salt: str | None,
        prompt_logprobs: int | None,
        twins: int,
    ) -> None:
        prompt = [0] * common + tail
        for _ in range(twins):
            request = self.requests.make(prompt, cache_salt=salt, prompt_logprobs=prompt_logprobs)
            self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(which=INDEX, chunk=st.sampled_from([20, 9, 5, 2, 1]))
    def admit(self, which: int, chunk: int) -> None:
        request = self.waiting[which % len(self.waiting)]
        computed = self.manager.get_computed_blocks(request)
        hits: Tables = []
        if self.caching and not request.skip_reading_prefix_cache:
            hits = self.model.hits(request.extra_keys.cache_salt, request.all_token_ids)
        assert list(computed.block_ids) == hits
        assert computed.num_tokens == (len(hits[0]) * self.model.size if hits else 0)
        num_new = min(chunk, request.num_tokens - computed.num_tokens)
        if self._allocate(request, num_new, 0, hits):
            request.num_computed_tokens = computed.num_tokens + num_new
            self.waiting.remove(request)
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(which=INDEX, chunk=st.integers(min_value=1, max_value=20), token=TOKENS)
    def advance(self, which: int, chunk: int, token: int) -> None:
        """Compute the next chunk of a prompt, or one decoded token."""
        request = self.running[which % len(self.running)]
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(token)
        num_new = min(chunk, request.num_tokens - request.num_computed_tokens)
        if self._allocate(request, num_new, 0, []):
            request.num_computed_tokens += num_new

    @precondition(lambda self: self.running)
    @rule(
        which=INDEX,
        num_drafts=st.integers(min_value=0, max_value=4),
        accepted=st.lists(TOKENS, max_size=4),
        lookahead=st.integers(min_value=0, max_value=3),
    )
    def speculate(self, which: int, num_drafts: int, accepted: list[int], lookahead: int) -> None:
        """Compute drafts after the verified tokens, of which some are accepted."""
        request = self.running[which % len(self.running)]
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(0)
        num_left = request.num_tokens - request.num_computed_tokens
        if self._allocate(request, num_left + num_drafts, lookahead, []):
            request.all_token_ids += accepted[:num_drafts]
            request.num_computed_tokens = request.num_tokens

    @precondition(lambda self: self.running)
    @rule(which=INDEX, token=TOKENS)
    def run_ahead(self, which: int, token: int) -> None:
        """Compute a token before its id is known."""
        request = self.running[which % len(self.running)]
        num_new = request.num_tokens + 1 - request.num_computed_tokens
        if self._allocate(request, num_new, 0, []):
            request.num_computed_tokens += num_new
            request.all_token_ids.append(token)

    @precondition(lambda self: self.running)
    @rule(
        which=INDEX,
        back=st.sampled_from([0, 1, 1, 2, 5]),
        tail=st.lists(TOKENS, min_size=1, max_size=4),
        chunk=st.sampled_from([20, 1]),
    )
    def fork(self, which: int, back: int, tail: list[int], chunk: int) -> None:
        """Add a request that begins with a computed prefix of a running one."""
        source = self.running[which % len(self.running)]
        num_shared = max(0, source.num_computed_tokens - back)
        shared, tails = self.model.fork(source.seq_id, num_shared)
        computed = self.manager.find_fork(source, num_shared)
        assert list(computed.block_ids) == shared
        assert list(computed.tails) == tails
        if not computed.num_tokens:
            return
        tokens = source.all_token_ids[:num_shared] + tail
        request = self.requests.make(tokens, extra_keys=source.extra_keys)
        expected = self.model.allocate(
            request.seq_id,
            source.extra_keys.cache_salt,
            tokens,
            num_shared,
            min(chunk, len(tail)),
            0,
            shared,
        )
        new_blocks = self.manager.allocate_slots(request, min(chunk, len(tail)), computed)
        copies = self.manager.pop_copies()[0]
        if expected is None:
            assert new_blocks is None
            assert copies == []
            return
        pairs = [(tail, new[0]) for tail, new in zip(tails, expected, strict=True) if tail]
        assert copies == [block for pair in pairs for block in pair]
        request.num_computed_tokens = num_shared + min(chunk, len(tail))
        self.running.append(request)

    @precondition(lambda self: len(self.running) > 1)
    @rule(which=INDEX, other=INDEX)
    def branch(self, which: int, other: int) -> None:
        """Replace tokens and blocks of a running request by those of another one."""
        request = self.running[which % len(self.running)]
        source = self.running[other % len(self.running)]
        if request is source or request.extra_keys.cache_salt != source.extra_keys.cache_salt:
            return
        self._release(request)
        request.copy_tokens(source)
        request.num_computed_tokens = 0
        computed = source.num_computed_tokens
        pairs: list[tuple[int, int]] = []
        for num_shared in (computed, computed - computed % self.model.size, 0):
            shared, tails = self.model.fork(source.seq_id, num_shared)
            new = shared and self.model.allocate(
                request.seq_id,
                source.extra_keys.cache_salt,
                request.all_token_ids,
                num_shared,
                0,
                0,
                shared,
            )
            if new:
                pairs = [(tail, blocks[0]) for tail, blocks in zip(tails, new, strict=True) if tail]
                break
        assert self.manager.fork_blocks(request, source, computed) == num_shared
        assert self.manager.pop_copies()[0] == [block for pair in pairs for block in pair]
        request.num_computed_tokens = num_shared
        if not num_shared:
            self.running.remove(request)
            self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(which=INDEX, input_tokens=st.lists(TOKENS, min_size=1, max_size=8))
    def hand_over(self, which: int, input_tokens: list[int]) -> None:
        """End a turn, whose last token is never computed, and continue with the next one."""
        place = which % len(self.running)
        request = self.running[place]
        if request.num_computed_tokens < request.num_tokens:
            return
        heir = self.requests.make(
            request.all_token_ids + input_tokens, extra_keys=request.extra_keys
        )
        heir.num_computed_tokens = request.num_tokens
        self.manager.hand_over_blocks(request, heir, request.num_tokens)
        self.model.rename(request.seq_id, heir.seq_id)
        self.running[place] = heir

    @precondition(lambda self: self.running)
    @rule(which=INDEX)
    def finish(self, which: int) -> None:
        self._release(self.running.pop(which % len(self.running)))

    @precondition(lambda self: self.waiting)
    @rule(which=INDEX)
    def abort(self, which: int) -> None:
        self._release(self.waiting.pop(which % len(self.waiting)))

    @precondition(lambda self: self.model.found)
    @rule(which=INDEX)
    def lose(self, which: int) -> None:
        """Remove one block from the index, so that prefixes have holes."""
        if which % 3 == 0:
            _, block = self.model.found.pop(which % len(self.model.found))
            self.manager.pool.uncache([block])

    @precondition(lambda self: self.running)
    @rule(which=INDEX, num_valid=st.integers(min_value=0, max_value=40))
    def fail(self, which: int, num_valid: int) -> None:
        """Invalidate the blocks of a request from some token on."""
        request = self.running[which % len(self.running)]
        self.manager.uncache_after(request, num_valid)
        self.model.withdraw(request.seq_id, num_valid)

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        request = self.running.pop()
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    @precondition(lambda self: self.model.found)
    @rule(really=st.sampled_from([False] * 5 + [True]))
    def reset(self, really: bool) -> None:
        idle = not self.model.tables
        if idle and not really:
            return
        assert self.manager.reset_prefix_cache() == idle
        if idle:
            self.model.found.clear()

    def _allocate(self, request: Request, num_new: int, lookahead: int, hits: Tables) -> bool:
        computed = NO_PREFIX
        if hits:
            computed = self.manager.get_computed_blocks(request)
        num_hit = len(hits[0]) * self.model.size if hits else 0
        expected = self.model.allocate(
            request.seq_id,
            request.extra_keys.cache_salt,
            request.all_token_ids,
            request.num_computed_tokens + num_hit,
            num_new,
            lookahead,
            hits,
        )
        new_blocks = self.manager.allocate_slots(request, num_new, computed, lookahead)
        if expected is not None and not any(expected):
            assert new_blocks is NO_NEW_BLOCKS
        else:
            assert new_blocks == expected
        return expected is not None

    def _release(self, request: Request) -> None:
        self.manager.free(request)
        verified = request.all_token_ids[: request.num_computed_tokens]
        self.model.release(request.seq_id, request.extra_keys.cache_salt, verified)

    @invariant()
    def agrees_with_the_model(self) -> None:
        pool = self.manager.pool
        assert list(pool.free_queue) == self.model.free
        assert self.manager.num_available_blocks == len(self.model.free)
        assert len(pool.index) == len({content for content, _ in self.model.found})
        cached = {block for _, block in self.model.found}
        assert {block for block, held in enumerate(pool.hashes) if held} == cached
        for request in self.running:
            assert self.manager.block_ids(request.seq_id) == self.model.tables[request.seq_id]

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        for event in self.log.pop_events():
            self.known.apply(event)
        assert self.known.held == indexed(self.manager.pool.index)

    @invariant()
    def is_storable(self) -> None:
        assert integrity.check(self.manager) == []
