"""Which engine gets a request, if several engines serve the model. Start at `Router.choose`.

    prompt ─▶ keys of its blocks ─▶ which engines have how many of them ─┐
    what was sent and has not finished, statistics of the engines ───────┴▶ cost of each engine

The cost of an engine is in tokens, as the time that they take: prompt tokens of the request that
the engine does not have, prompt tokens that it still has to compute for others, and DECODE_TOKENS
for each choice that it generates. If the pool of an engine is full, each new token evicts another
one, and costs up to a token more, the more recently that one was used: so the engines evict KV of
equal age, as one engine with all pools would. The lowest cost wins, unless the engine of the agent
session, or an engine with most of the prompt, costs little more: what it has need not be computed,
and not be kept twice.

What an engine has is known from what this front end has sent: the last blocks that fit into its
pool, and into the media that its connector copies to. Pure: no I/O, and time comes from a clock.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from math import inf
from typing import Final

from proto.messages.engine_io import EngineCoreRequest
from proto.messages.stats import KVTier

CREDITS: Final = (1.0, 0.75, 0.25)
"""Worth of a token whose KV is in the pool, in host memory, or on a disk."""
DECODE_TOKENS: Final = 64
"""Cost of a choice that generates, which takes a token of each step: tokens of a prompt."""
PENALTY_TOKENS: Final = 1024
"""Most that affinity may cost, in tokens, for a short prompt; for a longer one, its tokens."""
AFFINE_SHARE: Final = 0.8
"""Share of a prompt that an engine must have for affinity."""
MISS_SHARE: Final = 0.5
"""A prompt of which every engine has less counts as a miss."""
MANY_WAITING: Final = 8
"""Waiting choices from which on an engine is overloaded, if others have fewer."""
HIGH_USAGE: Final = 0.95
"""Used share of the KV pool from which on an engine is overloaded, if others use less."""
STALL_SECONDS: Final = 2.0
"""Time without a step, although there are requests, after which an engine counts as stalled."""
STALL_CHECK_SECONDS: Final = 0.05
"""Least time between two checks for stalled engines."""
WARM_BLOCKS: Final = 1024
"""Blocks after which a new engine is no longer preferred for misses."""
MISSES_PER_NEW: Final = 4
"""A new engine gets one of this many misses."""
EXPLORE_ONE_IN: Final = 100
"""One of this many requests is sent without regard to affinity of its prompt."""
FULL_SHARE: Final = 0.95
"""Share of a pool from which on new blocks count as evicting others."""
REUSE_SECONDS: Final = 10.0
"""Time without use after which the eviction of a token costs half as much as one in use."""
MAX_SESSIONS: Final = 1 << 16
"""Most agent sessions whose engine is known; the one that is idle longest is forgotten."""
MAX_BLOCKS: Final = 1 << 17
"""Most blocks that are known of an engine and a medium, which bounds memory."""


class RoutedRequest:
    """What the router knows of a request.

    block_size: tokens of a block of the engines. session: name of the agent session, "" for none.
    tenant: 0 for none.
    """

    def __init__(self, request: EngineCoreRequest, block_size: int) -> None:
        self._request = request
        self._block_size = block_size
        self.request_id = request.request_id
        self.num_tokens = len(request.prompt_token_ids)
        self.num_choices = request.n - len(request.finished_choices)
        self.tenant = request.tenant
        self.session = "" if request.agent is None else request.agent.session

    @cached_property
    def keys(self) -> Sequence[int]:
        """The keys of the prompt's runs of blocks."""
        return prefix_keys(self._request, self._block_size)

    @cached_property
    def affinity(self) -> int:
        """A number that is the same in every front end, for a session or the first block."""
        text = self.session.encode()
        if not text:
            first = array("I", self._request.prompt_token_ids[: self._block_size])
            text = first.tobytes() + (self._request.cache_salt or "").encode()
        return int.from_bytes(blake2b(text, digest_size=7).digest())


RUNS: Final = (1,) * 8 + (8,) * 7
"""Blocks of the first runs of a prompt; all later ones have LONG_RUN.

    blocks  |0|1|2|3|4|5|6|7|8 … 15|16 … 23| … |64 … 95|96 …
"""
LONG_RUN: Final = 32
RUN_ENDS: Final = tuple(accumulate(RUNS, initial=0))


def blocks_of(num_runs: int) -> int:
    """Return how many blocks the first runs of a prompt have together."""
    num_long = num_runs - len(RUNS)
    return RUN_ENDS[num_runs] if num_long <= 0 else RUN_ENDS[-1] + LONG_RUN * num_long


def prefix_keys(request: EngineCoreRequest, block_size: int) -> list[int]:
    """Return a key for each run of full blocks of a prompt, for all tokens up to its end.

    Tokens, adapter, salt, embeddings and images count, as in the block hashes of an engine. Keys
    are secret to this process and only decide where a request is sent, so 64 bits suffice.
    """
    lora = request.lora_request
    adapter = None if lora is None else (lora.digest, lora.scale)
    images = [(image.offset, image.mm_hash) for image in reversed(request.mm_features)]
    tokens = array("I", request.prompt_token_ids)
    content, item_size = tokens.tobytes(), tokens.itemsize
    keys: list[int] = []
    key, start = hash((request.cache_salt, adapter, request.prompt_embeds)), 0
    while (end := blocks_of(len(keys) + 1) * block_size) <= len(tokens):
        key = hash((key, content[start * item_size : end * item_size]))
        while images and images[-1][0] < end:
            key = hash((key, images.pop()))
        keys.append(key)
        start = end
    return keys


_NO_KEY: Final = -1
"""Not the key of a run: hash() never returns it."""


class PrefixIndex:
    """Which engines have which runs of blocks on one medium; a set of engines is a bit mask.

    The runs of an engine are in the order of their last use, those of a prompt from its end. So an
    engine that has a run has all runs of the prompt before it.
    """

    def __init__(self, num_engines: int) -> None:
        self._masks: dict[int, int] = {}
        self._runs: list[OrderedDict[int, tuple[int, float]]] = [
            OrderedDict() for _ in range(num_engines)
        ]
        self._num_blocks = [0] * num_engines

    def add(self, engine: int, keys: Sequence[int], capacity: int, now: float) -> float:
        """Note that an engine has the runs of a prompt, and at most `capacity` blocks in all.

        now: seconds. Returns when the blocks were last used that are evicted next; -inf if some
        are free.
        """
        runs, masks, bit = self._runs[engine], self._masks, 1 << engine
        long = (LONG_RUN, now)
        for index in range(len(keys) - 1, -1, -1):
            key = keys[index]
            size = long if index >= len(RUNS) else (RUNS[index], now)
            if key in runs:
                runs.move_to_end(key)
            else:
                self._num_blocks[engine] += size[0]
                masks[key] = masks.get(key, 0) | bit
            runs[key] = size
        while self._num_blocks[engine] > capacity:
            key, size = runs.popitem(last=False)
            self._num_blocks[engine] -= size[0]
            self._remove(key, bit)
        if self._num_blocks[engine] < FULL_SHARE * capacity:
            return -inf
        return next(iter(runs.values()))[1]

    def forget(self, engine: int) -> None:
        """Note that an engine has no block."""
        for key in self._runs[engine]:
            self._remove(key, 1 << engine)
        self._runs[engine].clear()
        self._num_blocks[engine] = 0

    def tokens(self, keys: Sequence[int], block_size: int) -> dict[int, float]:
        """Return the leading tokens of a prompt that each engine has, if it has some."""
        found: dict[int, float] = {}
        get, mask = self._masks.get, -1
        for num_runs, key in enumerate((*keys, _NO_KEY)):
            left = get(key, 0)
            if left != mask:
                if num_runs:
                    tokens = blocks_of(num_runs) * block_size
                    for engine in engines_of(mask ^ left):
                        found[engine] = tokens
                if not left:
                    break
                mask = left
        return found

    def tokens_of(self, engine: int, keys: Sequence[int], block_size: int) -> int:
        """Return the leading tokens of a prompt that an engine has."""
        runs, num_runs = self._runs[engine], 0
        for key in keys:
            if key not in runs:
                break
            num_runs += 1
        return blocks_of(num_runs) * block_size

    def _remove(self, key: int, bit: int) -> None:
        left = self._masks[key] & ~bit
        if left:
            self._masks[key] = left
        else:
            del self._masks[key]


def engines_of(mask: int) -> list[int]:
    """Return the engines of a mask, in a time that depends on their number, not on the highest."""
    if mask.bit_count() == 1:
        return [mask.bit_length() - 1]
    bits = bin(mask)  # engine 0 is the last digit
    last = len(bits) - 1
    engines: list[int] = []
    place = bits.find("1")
    while place > 0:
        engines.append(last - place)
        place = bits.find("1", place + 1)
    return engines


@dataclass(slots=True)
class _Sent:
    """A request that an engine has. prefill: tokens of its prompt still to be computed there."""

    engine: int
    prefill: int
    num_choices: int
    tenant: int

    @property
    def cost(self) -> int:
        return self.prefill or self.num_choices * DECODE_TOKENS


@dataclass(slots=True)
class EngineLoad:
    """What an engine has to do, as its statistics say.

    num_running, num_waiting: choices. num_queued_tokens: prompt tokens of choices before their
    first step. kv_usage: used share of the pool, 0 to 1. timestamp: monotonic seconds.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    kv_usage: float = 0.0
    timestamp: float = 0.0


@dataclass(slots=True)
class _Engine:
    """What is known of an engine.

    capacities: blocks on the device, and with those of host and disk, each with the one before.
    prefill, num_choices: of the requests that this front end has sent; num_open: their number.
    num_new_blocks: that it got since it is up. load: as reported.
    """

    capacities: tuple[int, ...] = ()
    prefill: int = 0
    num_choices: int = 0
    num_open: int = 0
    num_new_blocks: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)

    @property
    def is_warm(self) -> bool:
        return bool(self.capacities) and self.num_new_blocks >= min(WARM_BLOCKS, self.capacities[0])


@dataclass(slots=True)
class _Tenant:
    """A tenant with open requests. costs: of them, by engine. num_open: their number."""

    costs: "array[float]"
    num_open: int = 0


class Router:
    """Chooses the engine of each request, and keeps what that depends on.

    num_engines: their number. clock: monotonic seconds.

    What decisions read of all engines is in arrays, by engine, which lie in a few cache lines:
        _costs: what it has to do, in tokens.
        _tails_used_at: last use of the blocks that it evicts next; -inf if some are free.
        _pressures: cost of a token that evicts one, 0 to 1, from _tails_used_at.
        _active_at: its last step, or when it got a request while it was idle; inf if it is idle.
    """

    def __init__(self, num_engines: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._engines = [_Engine() for _ in range(num_engines)]
        self._costs = array("d", [0.0]) * num_engines
        self._tails_used_at = array("d", [-inf]) * num_engines
        self._pressures = array("d", [0.0]) * num_engines
        self._active_at = array("d", [inf]) * num_engines
        self._stalled: set[int] = set()
        self._high: set[int] = set()
        self._new: set[int] = set()
        self._stalls_checked_at = 0.0
        self._indexes = [PrefixIndex(num_engines)]
        self._sent: dict[int, _Sent] = {}
        self._sessions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._tenants: dict[int, _Tenant] = {}
        self._num_misses = 0
        self._block_size = 1

    def describe(self, request: EngineCoreRequest) -> RoutedRequest:
        return RoutedRequest(request, self._block_size)

    # The decision

    def choose(self, request: RoutedRequest, usable: Sequence[int]) -> int:
        """Return the engine that should get a request, one of `usable`, which is not empty."""
        if len(usable) == 1:
            return usable[0]
        usable, num_tokens = self._unloaded(usable), request.num_tokens
        pressures, tenant = self._pressures, self._tenants.get(request.tenant)
        costs = [
            cost + num_tokens * pressure
            for cost, pressure in zip(self._costs, pressures, strict=True)
        ]
        if tenant is not None:  # fairness: a tenant competes with itself first
            costs = [cost + own for cost, own in zip(costs, tenant.costs, strict=True)]
        if len(usable) < len(costs):
            left_in = frozenset(usable)
            costs = [cost if index in left_in else inf for index, cost in enumerate(costs)]
        credits = self._credits(request.keys)
        for index, credit in credits.items():
            costs[index] -= credit * (1.0 + pressures[index])
        lowest = min(costs)
        most = lowest + max(PENALTY_TOKENS, num_tokens)
        most_found = max(credits.values(), default=0.0)
        favoured, num_known = self._sessions.get(request.session, (0, inf))
        if costs[favoured] < most and credits.get(favoured, 0.0) >= AFFINE_SHARE * num_known:
            return favoured
        if self._new and most_found < MISS_SHARE * num_tokens:
            new = self._new.intersection(usable)
            self._num_misses += 1
            if new and not self._num_misses % MISSES_PER_NEW:
                return min(new, key=costs.__getitem__)
        enough = AFFINE_SHARE * num_tokens
        if most_found >= enough and _mixed(request.request_id) % EXPLORE_ONE_IN:
            affine = [
                index
                for index, credit in credits.items()
                if credit >= enough and costs[index] < most
            ]
            if affine:
                lowest = min(costs[index] for index in affine)
                return self._best([index for index in affine if costs[index] <= lowest], request)
        if costs.count(lowest) == 1:
            return costs.index(lowest)
        return self._best([index for index in usable if costs[index] <= lowest], request)

    def _unloaded(self, usable: Sequence[int]) -> Sequence[int]:
        """Leave out engines that are stalled or overloaded, as long as others remain."""
        now = self._clock()
        if now >= self._stalls_checked_at + STALL_CHECK_SECONDS:
            self._stalls_checked_at = now
            span = REUSE_SECONDS + now
            self._pressures = array(
                "d", [REUSE_SECONDS / (span - used_at) for used_at in self._tails_used_at]
            )
            latest, self._stalled = now - STALL_SECONDS, set()
            if min(self._active_at) <= latest:
                actives = enumerate(self._active_at)
                self._stalled = {index for index, active_at in actives if active_at <= latest}
        for left_out in (self._stalled, self._high):
            if left_out:
                usable = [index for index in usable if index not in left_out] or usable
        return usable

    def _credits(self, keys: Sequence[int]) -> dict[int, float]:
        """Return, by engine, the tokens of a prompt that it need not compute, by their media."""
        device, *others = self._indexes
        credits = device.tokens(keys, self._block_size)
        known = dict(credits) if others else credits
        for worth, index in zip(CREDITS[1:], others, strict=False):
            for engine, tokens in index.tokens(keys, self._block_size).items():
                more = tokens - known.get(engine, 0)
                if more > 0:
                    credits[engine] = credits.get(engine, 0.0) + more * worth
                    known[engine] = tokens
        return credits

    def _credit(self, engine: int, keys: Sequence[int]) -> float:
        """Return the tokens of a prompt that an engine need not compute, by their media."""
        credit, known = 0.0, 0
        for worth, index in zip(CREDITS, self._indexes, strict=False):
            tokens = index.tokens_of(engine, keys, self._block_size)
            if tokens > known:
                credit += (tokens - known) * worth
                known = tokens
        return credit

    def _best(self, engines: Sequence[int], request: RoutedRequest) -> int:
        """Return one of several engines of equal cost, the same one in every front end."""
        if len(engines) == 1:
            return engines[0]
        affinity = request.affinity
        return max(engines, key=lambda index: _mixed(affinity + index * _ODD))

    # What happened

    def note_up(self, engine: int, block_size: int, num_blocks: int) -> None:
        """Note that an engine is ready and has nothing, and how many KV blocks there are."""
        self.note_down(engine)
        self._block_size = block_size
        self._engines[engine].capacities = (min(num_blocks, MAX_BLOCKS),)
        if any(other.is_warm for other in self._engines):
            self._new.add(engine)
        self._update_cost(engine)

    def note_down(self, engine: int) -> None:
        """Forget what an engine had, because it is gone."""
        self.forget_prefixes(engine)
        for request_id, sent in list(self._sent.items()):
            if sent.engine == engine:
                self.note_finished(request_id)
        self._engines[engine] = _Engine()
        self._tails_used_at[engine] = -inf
        self._new.discard(engine)
        self._high.discard(engine)
        self._update_cost(engine)

    def forget_prefixes(self, engine: int) -> None:
        """Note that the prefix cache of an engine is empty."""
        for index in self._indexes:
            index.forget(engine)

    def note_sent(self, request: RoutedRequest, engine: int) -> None:
        """Note that an engine has got a request."""
        if len(self._engines) == 1:
            return
        self.note_finished(request.request_id)
        keys, known = request.keys, self._engines[engine]
        prefill = max(1, request.num_tokens - int(self._credit(engine, keys)))
        sent = _Sent(engine, prefill, request.num_choices, request.tenant)
        self._sent[request.request_id] = sent
        now = self._clock()
        if not known.num_open:
            self._active_at[engine] = now
        known.num_open += 1
        known.prefill += prefill
        if sent.tenant:
            tenant = self._tenants.get(sent.tenant)
            if tenant is None:
                tenant = _Tenant(array("d", [0.0]) * len(self._engines))
                self._tenants[sent.tenant] = tenant
            tenant.num_open += 1
            tenant.costs[engine] += sent.cost
        self._update_cost(engine)
        for index, capacity in zip(self._indexes, known.capacities, strict=False):
            self._tails_used_at[engine] = index.add(engine, keys, capacity, now)
        known.num_new_blocks += prefill // self._block_size
        if engine in self._new and known.is_warm:
            self._new.discard(engine)
        if request.session:
            self._sessions[request.session] = engine, blocks_of(len(keys)) * self._block_size
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def note_token(self, request_id: int) -> None:
        """Note that a request has a token, so its prompt is computed."""
        sent = self._sent.get(request_id)
        if sent is None or not sent.prefill:
            return
        known = self._engines[sent.engine]
        known.prefill -= sent.prefill
        known.num_choices += sent.num_choices
        before, sent.prefill = sent.cost, 0
        if sent.tenant:
            self._tenants[sent.tenant].costs[sent.engine] += sent.cost - before
        self._update_cost(sent.engine)

    def note_finished(self, request_id: int) -> None:
        """Note that an engine does not have a request any more."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        known = self._engines[sent.engine]
        known.num_open -= 1
        if not known.num_open:
            self._active_at[sent.engine] = inf
            self._stalled.discard(sent.engine)
        known.prefill -= sent.prefill
        known.num_choices -= 0 if sent.prefill else sent.num_choices
        if sent.tenant:
            tenant = self._tenants[sent.tenant]
            tenant.num_open -= 1
            tenant.costs[sent.engine] -= sent.cost
            if not tenant.num_open:
                del self._tenants[sent.tenant]
        self._update_cost(sent.engine)

    def note_load(self, engine: int, load: EngineLoad) -> None:
        """Note the statistics of an engine, which any front end may have received."""
        known = self._engines[engine]
        known.load = load
        if known.num_open and load.timestamp > self._active_at[engine]:
            self._active_at[engine] = load.timestamp
            self._stalled.discard(engine)
        if load.num_waiting >= MANY_WAITING or load.kv_usage >= HIGH_USAGE:
            self._high.add(engine)
        else:
            self._high.discard(engine)
        self._update_cost(engine)

    def note_tiers(self, engine: int, tiers: Sequence[KVTier]) -> None:
        """Note the sizes of the media that an engine's connector copies to."""
        known = self._engines[engine]
        sizes = {tier.medium: tier.num_blocks for tier in tiers}
        host, disk = sizes.get("CPU", 0), sizes.get("disk", 0)
        if not known.capacities or not (host or disk):
            return
        device = known.capacities[0]
        ends = (device, device + host, device + host + disk)
        known.capacities = tuple(min(end, MAX_BLOCKS) for end in ends)
        while len(self._indexes) < len(ends):
            self._indexes.append(PrefixIndex(len(self._engines)))

    def _update_cost(self, engine: int) -> None:
        """Set what an engine has to do: as far as this front end knows, or as reported."""
        known, load = self._engines[engine], self._engines[engine].load
        self._costs[engine] = max(known.prefill, load.num_queued_tokens) + DECODE_TOKENS * max(
            known.num_choices, load.num_running
        )


_ODD: Final = 0x9E3779B97F4A7C15


def _mixed(number: int) -> int:
    """Return 32 bits that depend on all bits of a number, the same in every process."""
    number = (number ^ number >> 31) * _ODD
    return (number >> 29 ^ number) * _ODD >> 32 & 0xFFFFFFFF
