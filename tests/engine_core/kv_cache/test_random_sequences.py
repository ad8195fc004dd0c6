"""Long random sequences against a brute-force model that shares no code with the pool.

The model keeps free blocks in a plain list, knows content by the tokens
themselves instead of hashes, and finds a hit by trying every length. After every step
hits, new ids, free order and content agree, and the integrity check finds nothing.
"""

import random
from collections import Counter

import pytest
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
from engine_core.kv_cache.event_log import KVEventLog
from engine_core.kv_cache.manager import NO_NEW_BLOCKS, NOTHING_COMPUTED
from engine_core.request import Request
from tests.fakes.kv_events import CachedHashes, indexed
from tests.fakes.kv_requests import Requests, make_manager

Content = tuple[int, str | None, tuple[int, ...]]
"""Group, salt and every token from the start of the prompt to the end of a block."""

Tables = list[list[int]]
"""Block ids per group."""

TOKENS = st.sampled_from([0, 0, 0, 1])
INDEX = st.integers(min_value=0, max_value=1000)


class BruteForce:
    """What the manager should do, by lists and searches."""

    def __init__(
        self, num_blocks: int, block_size: int, caching: bool, windows: list[int | None]
    ) -> None:
        self.size = block_size
        self.caching = caching
        self.windows = windows
        self.free = list(range(1, num_blocks))
        self.tables: dict[int, Tables] = {}
        self.offered: dict[int, list[int]] = {}
        self.found: list[tuple[Content, int]] = []  # cached blocks, first cached first

    def hits(self, salt: str | None, tokens: list[int]) -> Tables:
        """The longest prefix of which each group holds what it still needs."""
        for count in range((len(tokens) - 1) // self.size, 0, -1):
            tables = [self._hits_of(group, salt, tokens, count) for group in range(self.groups)]
            if all(tables):
                return tables
        return []

    @property
    def groups(self) -> int:
        return len(self.windows)

    def _hits_of(self, group: int, salt: str | None, tokens: list[int], count: int) -> list[int]:
        window = self.windows[group]
        seen = count * self.size if window is None else max(1, window - 1)
        table = []
        for number in range(count):
            end = (number + 1) * self.size
            if end <= count * self.size - seen:
                table.append(0)
                continue
            content = (group, salt, tuple(tokens[:end]))
            same = [block for known, block in self.found if known == content]
            if not same:
                return []
            table.append(same[0])
        return table

    def release_passed(self, handle: int, num_computed: int) -> None:
        for table, window in zip(self.tables.get(handle, []), self.windows, strict=False):
            if window is None:
                continue
            first_seen = num_computed - window + 1
            passed = [
                number
                for number, block in enumerate(table)
                if block and (number + 1) * self.size <= first_seen
            ]
            for number in reversed(passed):
                block, table[number] = table[number], 0
                self._drop(block)

    def fork(self, handle: int, num_tokens: int) -> tuple[Tables, list[int]]:
        """Per group the full blocks to share, and the block in which the tokens end, or 0.

        Nothing at all when a group has given back what the next token sees.
        """
        shared, tails = [], []
        for table, window in zip(self.tables[handle], self.windows, strict=True):
            first_seen = 0 if window is None else num_tokens - window + 1
            blocks = [
                block if (number + 1) * self.size > first_seen else 0
                for number, block in enumerate(table)
                if number * self.size < num_tokens
            ]
            needed = [number for number, _ in enumerate(blocks) if self._end(number) > first_seen]
            if num_tokens == 0 or not all(blocks[number] for number in needed):
                return [], []
            num_full = num_tokens // self.size
            shared.append(blocks[:num_full])
            tails.append(blocks[num_full] if num_full < len(blocks) else 0)
        return shared, tails

    def _end(self, number: int) -> int:
        return (number + 1) * self.size

    def allocate(
        self,
        handle: int,
        salt: str | None,
        tokens: list[int],
        num_computed: int,
        num_new: int,
        lookahead: int,
        hits: Tables,
    ) -> Tables | None:
        """Room for the new tokens and the lookahead; the new ids per group, or None."""
        self.release_passed(handle, num_computed)
        tables = self.tables.get(handle) or hits or [[] for _ in self.windows]
        num_blocks = -(-(num_computed + num_new + lookahead) // self.size)
        wanted = [max(0, num_blocks - len(table)) for table in tables]
        found = {block for table in hits for block in table}
        free = [block for block in self.free if block not in found]
        if sum(wanted) > len(free):
            return None
        new = []
        for count in wanted:
            new.append(free[:count])
            free = free[count:]
        self.free = free
        taken = {block for blocks in new for block in blocks}
        self.found = [entry for entry in self.found if entry[1] not in taken]
        if handle not in self.tables:
            self.offered[handle] = [len(table) for table in tables]
        self.tables[handle] = [table + blocks for table, blocks in zip(tables, new, strict=True)]
        self._remember(handle, salt, tokens[: num_computed + num_new])
        return new

    def _remember(self, handle: int, salt: str | None, verified: list[int]) -> None:
        if not self.caching:
            return
        num_full = len(verified) // self.size
        for group, table in enumerate(self.tables[handle]):
            for number in range(self.offered[handle][group], num_full):
                if table[number]:
                    content = (group, salt, tuple(verified[: (number + 1) * self.size]))
                    self.found.append((content, table[number]))
            self.offered[handle][group] = max(self.offered[handle][group], num_full)

    def withdraw(self, handle: int, num_valid: int) -> None:
        for group, table in enumerate(self.tables[handle]):
            kept = num_valid // self.size
            gone = table[kept : self.offered[handle][group]]
            self.found = [entry for entry in self.found if entry[1] not in gone]

    def rename(self, handle: int, new_handle: int) -> None:
        self.tables[new_handle] = self.tables.pop(handle)
        self.offered[new_handle] = self.offered.pop(handle)

    def release(self, handle: int, salt: str | None, verified: list[int]) -> None:
        if handle in self.tables:
            self._remember(handle, salt, verified)
        for table in self.tables.pop(handle, []):
            for number in reversed(range(len(table))):
                block, table[number] = table[number], 0
                self._drop(block, table)

    def _drop(self, block: int, *others: list[int]) -> None:
        tables = [table for each in self.tables.values() for table in each]
        if block and not any(block in table for table in [*tables, *others]):
            self.free.append(block)


WINDOWS = st.sampled_from(
    [
        [None],
        [None],
        [4],
        [None, 2],
        [None, 4, 4],
        [3, None, 8],
        [2, 5],
        [1, None],
        [None, None, 3, 6],
    ]
)


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        num_usable=st.sampled_from([20, 30, 12, 8, 4, 2, 1]),
        block_size=st.sampled_from([4, 2, 3, 1]),
        caching=st.sampled_from([True, True, True, False]),
        windows=WINDOWS,
    )
    def start(
        self, num_usable: int, block_size: int, caching: bool, windows: list[int | None]
    ) -> None:
        num_blocks = num_usable * len(windows) + 1
        self.log = KVEventLog()
        self.manager = make_manager(
            num_blocks, block_size, caching, windows=windows, observers=[self.log]
        )
        self.known = CachedHashes()
        self.model = BruteForce(num_blocks, block_size, caching, windows)
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
            hits = self.model.hits(request.cache_salt, request.all_token_ids)
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
        """A new request that begins with what a running one has computed, but for the end."""
        source = self.running[which % len(self.running)]
        num_shared = max(0, source.num_computed_tokens - back)
        shared, tails = self.model.fork(source.handle, num_shared)
        computed = self.manager.fork(source, num_shared)
        assert list(computed.block_ids) == shared
        assert list(computed.tails) == tails
        if not computed.num_tokens:
            return
        tokens = source.all_token_ids[:num_shared] + tail
        request = self.requests.make(tokens, cache_salt=source.cache_salt)
        expected = self.model.allocate(
            *(request.handle, source.cache_salt, tokens),
            *(num_shared, min(chunk, len(tail)), 0, shared),
        )
        new_blocks = self.manager.allocate_slots(request, min(chunk, len(tail)), computed)
        copies = self.manager.take_block_copies()
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
        """A running request gets tokens and blocks of another one in place of its own."""
        request = self.running[which % len(self.running)]
        source = self.running[other % len(self.running)]
        if request is source or request.cache_salt != source.cache_salt:
            return
        self._release(request)
        request.take_over(source)
        request.num_computed_tokens = 0
        computed = source.num_computed_tokens
        pairs: list[tuple[int, int]] = []
        for num_shared in (computed, computed - computed % self.model.size, 0):
            shared, tails = self.model.fork(source.handle, num_shared)
            new = shared and self.model.allocate(
                *(request.handle, source.cache_salt, request.all_token_ids),
                *(num_shared, 0, 0, shared),
            )
            if new:
                pairs = [(tail, blocks[0]) for tail, blocks in zip(tails, new, strict=True) if tail]
                break
        assert self.manager.branch(request, source, computed) == num_shared
        assert self.manager.take_block_copies() == [block for pair in pairs for block in pair]
        request.num_computed_tokens = num_shared
        if not num_shared:
            self.running.remove(request)
            self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(which=INDEX, input_tokens=st.lists(TOKENS, min_size=1, max_size=8))
    def hand_over(self, which: int, input_tokens: list[int]) -> None:
        """A turn ends, after a token that is never computed, and the next one goes on."""
        place = which % len(self.running)
        request = self.running[place]
        if request.num_computed_tokens < request.num_tokens:
            return
        heir = self.requests.make(
            request.all_token_ids + input_tokens, cache_salt=request.cache_salt
        )
        heir.num_computed_tokens = request.num_tokens
        self.manager.hand_over(request, heir, request.num_tokens)
        self.model.rename(request.handle, heir.handle)
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
        """One block is not found any more; prefixes get holes."""
        if which % 3 == 0:
            _, block = self.model.found.pop(which % len(self.model.found))
            self.manager.pool.uncache([block])

    @precondition(lambda self: self.running)
    @rule(which=INDEX, num_valid=st.integers(min_value=0, max_value=40))
    def fail(self, which: int, num_valid: int) -> None:
        """What a request computed from some token on is wrong."""
        request = self.running[which % len(self.running)]
        self.manager.withdraw(request, num_valid)
        self.model.withdraw(request.handle, num_valid)

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
        computed = NOTHING_COMPUTED
        if hits:
            computed = self.manager.get_computed_blocks(request)
        num_hit = len(hits[0]) * self.model.size if hits else 0
        expected = self.model.allocate(
            request.handle,
            request.cache_salt,
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
        self.model.release(request.handle, request.cache_salt, verified)

    @invariant()
    def agrees_with_the_model(self) -> None:
        pool = self.manager.pool
        assert list(pool.free_queue) == self.model.free
        assert self.manager.num_free_blocks == len(self.model.free)
        assert len(pool.index) == len({content for content, _ in self.model.found})
        cached = {block for _, block in self.model.found}
        assert {block for block, held in enumerate(pool.hashes) if held} == cached
        for request in self.running:
            assert self.manager.block_ids(request.handle) == self.model.tables[request.handle]

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        for event in self.log.take():
            self.known.apply(event)
        assert self.known.held == indexed(self.manager.pool.index)

    @invariant()
    def is_sound(self) -> None:
        assert integrity.check(self.manager) == []


TestRandomSequences = KVCacheMachine.TestCase
TestRandomSequences.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, derandomize=True
)


# What a busy engine does, as often as it does it.
WEIGHTS = {
    "add": 12,
    "admit": 25,
    "advance": 40,
    "speculate": 6,
    "run_ahead": 6,
    "fork": 6,
    "hand_over": 4,
    "branch": 4,
    "finish": 9,
    "abort": 1,
    "preempt": 2,
    "fail": 2,
    "lose": 2,
    "reset": 1,
}


def busy_life(machine: KVCacheMachine, draw: random.Random, num_steps: int) -> Counter[str]:
    """Drive the machine by hand, so that the pool is mostly full and prefixes are shared.

    Every step is compared with the model; returns how many there were of each kind.
    """
    details = {
        "add": lambda: {
            "common": draw.choice([8, 16, 24, 40]),
            "tail": draw.choices([0, 0, 0, 1], k=draw.randint(1, 12)),
            "salt": draw.choice([None] * 9 + ["s"]),
            "prompt_logprobs": draw.choice([None] * 9 + [0]),
            "twins": draw.randint(1, 2),
        },
        "admit": lambda: {"which": 0, "chunk": draw.choice([60, 20, 7, 1])},
        "advance": lambda: {
            "which": draw.randrange(1000),
            "chunk": draw.choice([20, 7, 1]),
            "token": draw.choice([0, 0, 0, 1]),
        },
        "speculate": lambda: {
            "which": draw.randrange(1000),
            "num_drafts": draw.randint(0, 4),
            "accepted": draw.choices([0, 0, 0, 1], k=draw.randint(0, 4)),
            "lookahead": draw.randint(0, 3),
        },
        "run_ahead": lambda: {"which": draw.randrange(1000), "token": draw.choice([0, 0, 0, 1])},
        "fork": lambda: {
            "which": draw.randrange(1000),
            "back": draw.choice([0, 1, 1, 2, 5]),
            "tail": draw.choices([0, 0, 0, 1], k=draw.randint(1, 4)),
            "chunk": draw.choice([20, 1]),
        },
        "hand_over": lambda: {
            "which": draw.randrange(1000),
            "input_tokens": draw.choices([0, 0, 0, 1], k=draw.randint(1, 12)),
        },
        "branch": lambda: {"which": draw.randrange(1000), "other": draw.randrange(1000)},
        "fail": lambda: {"which": draw.randrange(1000), "num_valid": draw.randint(0, 60)},
        "lose": lambda: {"which": 3 * draw.randrange(300)},
        "preempt": dict,
        "reset": lambda: {"really": True},
    }
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    needs = {"admit": "waiting", "abort": "waiting", "add": None, "reset": None, "lose": None}
    done: Counter[str] = Counter()
    while done.total() < num_steps:
        (name,) = draw.choices(names, weights)
        needed = needs.get(name, "running")
        possible = machine.model.found if name in ("lose", "reset") else True
        crowded = name == "add" and len(machine.waiting) > 6
        if crowded or not possible or (needed and not getattr(machine, needed)):
            continue
        if name == "branch" and len(machine.running) < 2:
            continue
        getattr(machine, name)(**details.get(name, lambda: {"which": draw.randrange(1000)})())
        machine.agrees_with_the_model()
        machine.events_tell_what_is_cached()
        machine.is_sound()
        done[name] += 1
    return done


ONE_GROUP = [([None], 4, 40), ([None], 1, 60), ([6], 2, 24)]
SEVERAL_GROUPS = [
    ([None, 6], 2, 30),
    ([None, 8, 8], 4, 16),
    ([9, None, 4], 3, 20),
    ([3, 12], 2, 20),
    ([None, None, 5, 10], 4, 14),
]
STEPS_EACH = 4000


@pytest.mark.parametrize(("windows", "block_size", "num_usable"), ONE_GROUP + SEVERAL_GROUPS)
def test_a_busy_life(windows, block_size, num_usable):
    machine = KVCacheMachine()
    machine.start(num_usable=num_usable, block_size=block_size, caching=True, windows=windows)
    done = busy_life(machine, random.Random(len(windows) * block_size), STEPS_EACH)
    _, num_hit = machine.manager.take_prefix_cache_stats()
    print(f"{done.total()} steps, {num_hit} tokens found: {dict(done)}")
    assert done.keys() == WEIGHTS.keys()
    assert num_hit > 500


@pytest.mark.parametrize("lives", [ONE_GROUP, SEVERAL_GROUPS])
def test_the_pool_and_the_hybrid_coordinator_are_each_compared_over_10_000_steps(lives):
    assert len(lives) * STEPS_EACH >= 10_000
