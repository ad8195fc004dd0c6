"""Sessions of agents and chats, drawn from published shapes.

Agents: a median of 43 turns, 86.5 % of next turns within 1 s and 95 % within 10 s, subagents in
44 % of sessions, as published for coding agents; contexts have a fifth of the published length, and
grow by some 4 % a turn. A subagent begins with a system prompt of its own, or with the context of
its parent. The shape of chats, three for each agent, is an assumption.

The content of a block is a number: that of its chain (a system prompt, or what a session adds) and
its place in the prompt. Each of its tokens has that number.

    |- system prompt, a chain that sessions share -|- the session's own chain ---------------|
                                                   |- shared by a subagent -|- its own chain -
"""

import itertools
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import log
from typing import Final

from api_server.engine.router import RoutedRequest, blocks_of
from proto.messages.engine_io import AgentHint, EngineCoreRequest
from proto.messages.sampling_params import SamplingParams
from tests.benchmarks.simulator.recording import Tokens
from tests.benchmarks.simulator.rig import EPOCH

BLOCK_SIZE: Final = 16
NO_PARAMS: Final = SamplingParams(max_tokens=1)
AGENTS_PER_MINUTE: Final = 0.28
"""Sessions of agents that begin in a minute, for each engine."""
CHATS_PER_AGENT: Final = 3.0
NUM_TENANTS: Final = 20
"""Tenant k has 1 / k of the sessions of the first (Zipf's law)."""
MEDIAN_TURNS: Final = 43
SUBAGENT_SHARE: Final = 0.44
"""Share of agents' sessions with subagents."""
MAX_CONTEXT: Final = 48_000
"""Tokens from which on a session has no further turn."""
MEAN_CONTEXT: Final = 16_000
"""Tokens of the context of a turn, about."""
LONGEST_TURN: Final = 8_192
"""No turn adds more tokens to the context than this, answer included."""
WARM_SECONDS: Final = 3_000.0
"""Sessions that began this long before the start, or later, may be in progress at the start."""
_PLACE_BITS: Final = 12
_RUN_ENDS: Final = [
    blocks_of(number + 1) for number in range((MAX_CONTEXT + LONGEST_TURN) // BLOCK_SIZE // 32 + 15)
]


@dataclass(frozen=True)
class Turn:
    """Tokens that a turn adds to the context and of its answer; seconds until the next turn."""

    num_new: int
    answer: int
    pause: float


@dataclass(eq=False)
class Session:
    """A session of an agent or a chat.

    chain: number of its own chain. shared: chains that its context begins with, and their blocks.
    arrival: second at which turn `first_turn` arrives; earlier turns were before the start.
    subagents: sessions that begin with a turn.
    """

    name: str
    is_agent: bool
    tenant: int
    chain: int
    shared: tuple[tuple[int, int], ...]
    turns: list[Turn]
    arrival: float
    first_turn: int = 0
    subagents: dict[int, list["Session"]] = field(default_factory=dict)

    @cached_property
    def num_shared(self) -> int:
        """Blocks of the shared chains."""
        return sum(blocks for _, blocks in self.shared)

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """Tokens of the prompt of each turn."""
        lengths, length = [], self.num_shared * BLOCK_SIZE
        for turn in self.turns:
            lengths.append(length + turn.num_new)
            length = lengths[-1] + turn.answer
        return lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of the context at the end."""
        return self.prompt_lengths[-1] + self.turns[-1].answer

    @cached_property
    def content(self) -> Tokens:
        """Token ids of the context at the end."""
        numbers: list[int] = []
        for chain, blocks in (*self.shared, (self.chain, -(-self.num_tokens // BLOCK_SIZE))):
            end = min(len(numbers) + blocks, -(-self.num_tokens // BLOCK_SIZE))
            numbers += [chain << _PLACE_BITS | place for place in range(len(numbers), end)]
        return Tokens(numbers, BLOCK_SIZE, 0)

    @cached_property
    def token_ids(self) -> list[int]:
        return self.content.first(self.num_tokens)

    @cached_property
    def keys(self) -> list[int]:
        """The router's keys of the runs of blocks, without hashing tokens."""
        bounds, end = [], 0
        for chain, blocks in self.shared:
            end += blocks
            bounds.append((end, chain))
        num_runs = bisect_right(_RUN_ENDS, self.num_tokens // BLOCK_SIZE)
        return [
            hash((next((chain for bound, chain in bounds if end <= bound), self.chain), end))
            for end in _RUN_ENDS[:num_runs]
        ]


@dataclass(frozen=True)
class Traffic:
    """Sessions over a number of seconds, drawn by a seed.

    num_engines: to which the rate is proportional. token_seconds: time of an output token, by which
    sessions before the start proceed.
    """

    num_engines: int
    seconds: float
    seed: int
    token_seconds: float
    agents_per_minute: float = AGENTS_PER_MINUTE

    def sessions(self) -> list[Session]:
        """Return the sessions that arrive before the end, in the order of their beginnings."""
        rng, chains = random.Random(self.seed), itertools.count()

        def systems(number: int, low: int, high: int) -> list[tuple[int, int]]:
            return [(next(chains), rng.randrange(low, high)) for _ in range(number)]

        of_agents, of_subagents = systems(4, 94, 250), systems(2, 60, 150)
        of_chats = systems(3, 20, 80)
        tenants = range(1, NUM_TENANTS + 1)
        weights = [1 / tenant for tenant in tenants]
        rate = self.agents_per_minute / 60 * self.num_engines * (1 + CHATS_PER_AGENT)
        began, found = -WARM_SECONDS, list[Session]()
        while (began := began + rng.expovariate(rate)) < self.seconds:
            is_agent = rng.random() * (1 + CHATS_PER_AGENT) < 1
            shared = (rng.choice(of_agents if is_agent else of_chats),)
            turns = _agent_turns(rng, MEDIAN_TURNS, 0.5) if is_agent else _chat_turns(rng)
            session = Session(
                name=f"s{len(found)}",
                is_agent=is_agent,
                tenant=rng.choices(tenants, weights)[0],
                chain=next(chains),
                shared=shared,
                turns=_fitting(turns, shared),
                arrival=began,
            )
            if is_agent and rng.random() < SUBAGENT_SHARE:
                _add_subagents(rng, session, chains, of_subagents)
            if began >= 0 or _proceed(session, self.token_seconds):
                found.append(session)
        return found


def _agent_turns(rng: random.Random, median: int, sigma: float) -> Iterator[Turn]:
    for _ in range(max(4, round(rng.lognormvariate(log(median), sigma)))):
        num_new = min(4000, max(1, round(rng.lognormvariate(5.3, 0.9))))
        answer = min(2000, max(16, round(rng.lognormvariate(5.6, 0.8))))
        draw, pause = rng.random(), rng.uniform(0.05, 1.0)
        if draw > 0.865:
            pause = rng.uniform(1.0, 10.0) if draw < 0.95 else rng.uniform(10.0, 90.0)
        yield Turn(num_new, answer, pause)


def _chat_turns(rng: random.Random) -> Iterator[Turn]:
    for _ in range(1 + int(rng.expovariate(1 / 3))):
        num_new = min(4000, max(4, round(rng.lognormvariate(4.4, 0.9))))
        if rng.random() < 0.1:  # a document
            num_new += rng.randrange(1000, 4000)
        answer = min(1500, max(16, round(rng.lognormvariate(5.3, 0.6))))
        yield Turn(num_new, answer, min(600.0, rng.lognormvariate(log(25.0), 0.8)))


def _fitting(turns: Iterator[Turn], shared: tuple[tuple[int, int], ...]) -> list[Turn]:
    """Return the turns until the context is full."""
    length, kept = BLOCK_SIZE * sum(blocks for _, blocks in shared), list[Turn]()
    for turn in turns:
        if kept and length >= MAX_CONTEXT:
            break
        kept.append(turn)
        length += turn.num_new + turn.answer
    return kept


def _add_subagents(
    rng: random.Random, parent: Session, chains: Iterator[int], systems: list[tuple[int, int]]
) -> None:
    """Let turns of a session begin one or two subagents, half of which know its context."""
    for index in range(rng.randrange(1, 3)):
        number = rng.randrange(1, len(parent.turns))
        shared: tuple[tuple[int, int], ...] = (rng.choice(systems),)
        if rng.random() < 0.5:
            known = parent.prompt_lengths[number] - parent.turns[number].num_new
            own = known // BLOCK_SIZE - parent.num_shared
            shared = (*parent.shared, (parent.chain, own))
        turns = _fitting(_agent_turns(rng, 9, 0.4), shared)
        name, chain = f"{parent.name}.{index}", next(chains)
        child = Session(name, True, parent.tenant, chain, shared, turns, 0.0)
        parent.subagents.setdefault(number, []).append(child)


def _proceed(session: Session, token_seconds: float) -> bool:
    """Let a session that began before the start proceed until then; False if it has ended."""
    now = session.arrival
    for number, turn in enumerate(session.turns):
        if now >= 0:
            session.first_turn, session.arrival = number, now
            return True
        now += turn.answer * token_seconds + turn.pause
    return False


@dataclass(eq=False)
class TurnRequest:
    """A turn as a request. Times are seconds of the virtual clock, None before they come.

    num_tokens: of its prompt, of which num_cached were cached. answer: tokens that it generates.
    """

    request_id: int
    session: Session
    number: int
    arrived: float
    num_tokens: int
    answer: int
    engine: int = 0
    num_cached: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None

    @property
    def num_blocks(self) -> int:
        """Full blocks of prompt and answer."""
        return (self.num_tokens + self.answer) // BLOCK_SIZE


class RequestWithoutTokens(RoutedRequest):
    """A turn as the router sees it, whose keys are known without its tokens."""

    def __init__(self, turn: TurnRequest, *, named: bool) -> None:
        session = turn.session
        self.request_id = turn.request_id
        self.num_tokens = turn.num_tokens
        self.num_choices = 1
        self.tenant = session.tenant
        self.session = session.name if named and session.is_agent else ""
        self.keys = session.keys[: bisect_right(_RUN_ENDS, turn.num_tokens // BLOCK_SIZE)]
        text = self.session or f"chain {session.shared[0][0]}"
        self.affinity = int.from_bytes(blake2b(text.encode(), digest_size=7).digest())


def engine_request(
    request_id: int, tokens: list[int], session: str = "", tenant: int = 0
) -> EngineCoreRequest:
    return EngineCoreRequest(
        epoch=EPOCH,
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=NO_PARAMS,
        seed=0,
        arrival_time=0.0,
        tenant=tenant,
        agent=AgentHint(session) if session else None,
    )


def request_with_tokens(turn: TurnRequest, *, named: bool) -> RoutedRequest:
    session = turn.session
    name = session.name if named and session.is_agent else ""
    tokens = session.token_ids[: turn.num_tokens]
    request = engine_request(turn.request_id, tokens, name, session.tenant)
    return RoutedRequest(request, BLOCK_SIZE)
