"""Long random sequences against a brute-force model that shares no code with the pool.

The model keeps free blocks in a plain list and knows content by the tokens
themselves instead of hashes. After every step hits, new ids, free order and
content agree, and the integrity check finds nothing.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine_core.kv_cache import integrity
from engine_core.kv_cache.manager import NO_NEW_BLOCKS, NOTHING_COMPUTED
from engine_core.request import Request
from tests.fakes.kv_requests import Requests, make_manager

Content = tuple[str | None, tuple[int, ...]]
"""Salt and every token from the start of the prompt to the end of a block."""

TOKENS = st.sampled_from([0, 0, 0, 1])
INDEX = st.integers(min_value=0, max_value=1000)


class BruteForce:
    """What the manager should do, by lists and searches."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.size = block_size
        self.caching = caching
        self.free = list(range(1, num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.found: list[tuple[Content, int]] = []  # cached blocks, first cached first

    def hits(self, salt: str | None, tokens: list[int]) -> list[int]:
        blocks = []
        for end in range(self.size, len(tokens), self.size):
            content = (salt, tuple(tokens[:end]))
            same = [block for known, block in self.found if known == content]
            if not same:
                break
            blocks.append(same[0])
        return blocks

    def allocate(
        self,
        handle: int,
        salt: str | None,
        tokens: list[int],
        num_after: int,
        lookahead: int,
        hits: list[int],
    ) -> list[int] | None:
        """Room for `num_after` tokens and the lookahead; the new ids, or None."""
        table = self.tables.get(handle, hits)
        num_new = max(0, -(-(num_after + lookahead) // self.size) - len(table))
        free = [block for block in self.free if block not in hits]
        if num_new > len(free):
            return None
        new, self.free = free[:num_new], free[num_new:]
        self.found = [entry for entry in self.found if entry[1] not in new]
        self.tables[handle] = table + new
        self._remember(handle, salt, tokens[:num_after])
        return new

    def _remember(self, handle: int, salt: str | None, verified: list[int]) -> None:
        if not self.caching:
            return
        cached = {block for _, block in self.found}
        for number, block in enumerate(self.tables[handle]):
            end = (number + 1) * self.size
            if end <= len(verified) and block not in cached:
                self.found.append(((salt, tuple(verified[:end])), block))

    def release(self, handle: int) -> None:
        for block in reversed(self.tables.pop(handle, [])):
            if not any(block in table for table in self.tables.values()):
                self.free.append(block)


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        num_usable=st.integers(min_value=1, max_value=20),
        block_size=st.sampled_from([1, 2, 3, 4]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_usable: int, block_size: int, caching: bool) -> None:
        self.manager = make_manager(num_usable + 1, block_size, caching)
        self.model = BruteForce(num_usable + 1, block_size, caching)
        self.requests = Requests(self.manager)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.caching = caching

    @rule(
        common=st.sampled_from([0, 4, 8, 12, 16]),
        tail=st.lists(TOKENS, min_size=1, max_size=8),
        salt=st.sampled_from([None] * 5 + ["s"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self, common: int, tail: list[int], salt: str | None, prompt_logprobs: int | None
    ) -> None:
        prompt = [0] * common + tail
        request = self.requests.make(prompt, cache_salt=salt, prompt_logprobs=prompt_logprobs)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(which=INDEX, chunk=st.integers(min_value=1, max_value=20))
    def admit(self, which: int, chunk: int) -> None:
        request = self.waiting[which % len(self.waiting)]
        computed = self.manager.get_computed_blocks(request)
        hits: list[int] = []
        if self.caching and not request.skip_reading_prefix_cache:
            hits = self.model.hits(request.cache_salt, request.all_token_ids)
        assert computed.num_tokens == len(hits) * self.model.size
        assert list(computed.block_ids) == ([hits] if hits else [])
        num_new = min(chunk, request.num_tokens - computed.num_tokens)
        if self._allocate(request, num_new, 0, hits):
            request.num_computed_tokens = computed.num_tokens + num_new
            self.waiting.remove(request)
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(which=INDEX, chunk=st.integers(min_value=1, max_value=20), token=TOKENS)
    def advance(self, which: int, chunk: int, token: int) -> None:
        """The next chunk of a prompt, or one decoded token."""
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
    @rule(which=INDEX)
    def finish(self, which: int) -> None:
        self._release(self.running.pop(which % len(self.running)))

    @precondition(lambda self: self.waiting)
    @rule(which=INDEX)
    def abort(self, which: int) -> None:
        self._release(self.waiting.pop(which % len(self.waiting)))

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        request = self.running.pop()
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    @rule()
    def reset(self) -> None:
        idle = not self.model.tables
        assert self.manager.reset_prefix_cache() == idle
        if idle:
            self.model.found.clear()

    def _allocate(self, request: Request, num_new: int, lookahead: int, hits: list[int]) -> bool:
        computed = NOTHING_COMPUTED
        if hits:
            computed = self.manager.get_computed_blocks(request)
        expected = self.model.allocate(
            request.handle,
            request.cache_salt,
            request.all_token_ids,
            request.num_computed_tokens + len(hits) * self.model.size + num_new,
            lookahead,
            hits,
        )
        new_blocks = self.manager.allocate_slots(request, num_new, computed, lookahead)
        if expected == []:
            assert new_blocks is NO_NEW_BLOCKS
        else:
            assert new_blocks == (None if expected is None else [expected])
        return expected is not None

    def _release(self, request: Request) -> None:
        self.manager.free(request)
        self.model.release(request.handle)

    @invariant()
    def agrees_with_the_model(self) -> None:
        pool = self.manager.pool
        assert list(pool.free_queue) == self.model.free
        assert self.manager.num_free_blocks == len(self.model.free)
        assert len(pool.index) == len({content for content, _ in self.model.found})
        cached = {block for _, block in self.model.found}
        assert {block for block, held in enumerate(pool.hashes) if held} == cached
        for request in self.running:
            assert self.manager.block_ids(request.handle) == [self.model.tables[request.handle]]

    @invariant()
    def is_sound(self) -> None:
        assert integrity.check(self.manager) == []


TestRandomSequences = KVCacheMachine.TestCase
TestRandomSequences.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, derandomize=True
)
