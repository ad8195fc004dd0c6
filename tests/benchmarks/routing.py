"""What a decision of the router costs, and which prefixes meet at one engine because of it.

    decisions   64 engines that hold prefixes of the prompts, prompts of 8,192 tokens. Hashing of
                the prompt, the decision, and the notes about the request that was sent, apart.
                Wall time, and time of the thread, which other programs do not lengthen as much.
    replay      agents' sessions over some engines on a virtual clock: the router is the real one,
                and so is the KV cache of each engine (blocks, hashes, evictions). An engine
                computes prompts one after the other and decodes any number of requests. Hits are
                compared with those of one engine with the whole pool, whose speed is that of all.

A session has a system prompt that it shares with others, then turns: each appends the result of a
tool, and the answer to it. Some sessions begin a subagent, which has another system prompt and the
task. Number of turns and pauses are as published for coding agents (a median of 43 turns, 86.5 % of
next turns within 1 s and 95 % within 10 s, subagents in 44 % of sessions); tokens are fewer.
"""

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from rich.console import Console
from rich.table import Table

from api_server.engine.router import EngineLoad, RoutedRequest, Router
from deploy.bench.limits import percentile
from deploy.bench.options import BenchParser, at_least_one, positive, writable, write
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from proto.errors import ConfigError
from proto.messages.engine_io import AgentHint, EngineCoreRequest
from proto.messages.sampling_params import SamplingParams
from tests.benchmarks.command import run

Result = TypeVar("Result")

BLOCK_SIZE: Final = 16
VOCAB_SIZE: Final = 50_000
LIMIT_US: Final = 50.0
"""Most microseconds that a decision may take, at p99."""
HITS_PROMISED: Final = 0.95
"""Least hits of the router's engines, as a share of those of one engine with the whole pool."""
TOKENS_PER_SECOND: Final = 4000.0
"""Of prompts, by one of the engines."""
DECODES_PER_SECOND: Final = 40.0
"""Tokens of each request that decodes."""
MAX_CONTEXT: Final = 48_000
"""Tokens at which a session ends; it must fit into the pool of one engine."""
NO_PARAMS: Final = SamplingParams(max_tokens=1)


def engine_request(
    request_id: int, tokens: list[int], session: str = "", tenant: int = 0
) -> EngineCoreRequest:
    return EngineCoreRequest(
        epoch=1,
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=NO_PARAMS,
        seed=0,
        arrival_time=0.0,
        tenant=tenant,
        agent=AgentHint(session) if session else None,
    )


# ---- Decisions ----


def measure_decisions(num_engines: int, num_tokens: int, number: int) -> dict[str, list[float]]:
    """Return wall and thread microseconds of the parts of a decision."""
    rng = random.Random(1)
    router = Router(num_engines, time.monotonic)
    for engine in range(num_engines):
        router.note_up(engine, BLOCK_SIZE, 20_000)
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(50)]
    usable = range(num_engines)
    times: dict[str, list[float]] = {
        f"{part}{clock}": [] for part in ("hash", "choose", "note") for clock in ("", " (thread)")
    }

    def timed(part: str, function: Callable[..., Result], *arguments: object) -> Result:
        wall, thread = time.perf_counter(), time.thread_time()
        result = function(*arguments)
        times[f"{part} (thread)"].append((time.thread_time() - thread) * 1e6)
        times[part].append((time.perf_counter() - wall) * 1e6)
        return result

    for request_id in range(number + num_engines * 8):
        shared = rng.choice(prefixes)[: rng.randrange(num_tokens)]
        tokens = [*shared, *(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens - len(shared)))]
        request = router.describe(engine_request(request_id, tokens, tenant=request_id % 5))
        timed("hash", _hashed, request)
        engine = timed("choose", router.choose, request, usable)
        timed("note", router.note_sent, request, engine)
        router.note_token(request_id - num_engines * 2)
        router.note_finished(request_id - num_engines * 8)
    return {name: values[-number:] for name, values in times.items()}


def _hashed(request: RoutedRequest) -> tuple[Sequence[int], int]:
    return request.keys, request.affinity


# ---- Replay ----


@dataclass(frozen=True)
class Turn:
    """Tokens that a turn adds to the context of its session, and the pause after its answer."""

    new_tokens: list[int]
    answer: list[int]
    pause: float


@dataclass(frozen=True)
class Session:
    """A session of an agent. arrival: seconds. parent: turn of another session that begins it."""

    name: str
    system: list[int]
    turns: list[Turn]
    arrival: float
    subagents: dict[int, "Session"] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        turns = sum(len(turn.new_tokens) + len(turn.answer) for turn in self.turns)
        return len(self.system) + turns


@dataclass(frozen=True)
class Traffic:
    """num_sessions: without subagents. rate: sessions in a second."""

    num_sessions: int
    rate: float
    seed: int

    def sessions(self) -> list[Session]:
        rng = random.Random(self.seed)
        systems = [_tokens(rng, rng.randrange(1500, 4000)) for _ in range(6)]
        arrival, found = 0.0, []
        for number in range(self.num_sessions):
            arrival += rng.expovariate(self.rate)
            num_turns = max(4, round(rng.lognormvariate(3.76, 0.5)))  # a median of 43
            session = _session(rng, f"s{number}", rng.choice(systems[:4]), num_turns, arrival)
            if rng.random() < 0.44:
                for index in range(rng.randrange(1, 3)):
                    name, system = f"s{number}.{index}", rng.choice(systems[4:])
                    child = _session(rng, name, system, rng.randrange(4, 16), 0.0)
                    session.subagents[rng.randrange(num_turns)] = child
            found.append(session)
        return found


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(number)]


def _session(
    rng: random.Random, name: str, system: list[int], num_turns: int, arrival: float
) -> Session:
    turns: list[Turn] = []
    length = len(system)
    while len(turns) < num_turns and length < MAX_CONTEXT:
        new = _tokens(rng, min(4000, round(rng.lognormvariate(5.3, 0.9))))
        answer = _tokens(rng, max(8, min(400, round(rng.lognormvariate(4.2, 0.7)))))
        draw = rng.random()
        pause = rng.uniform(0.05, 1.0)
        if draw > 0.865:
            pause = rng.uniform(1.0, 10.0) if draw < 0.95 else rng.uniform(10.0, 90.0)
        turns.append(Turn(new, answer, pause))
        length += len(new) + len(answer)
    return Session(name, system, turns, arrival)


class Engine:
    """The KV cache of an engine, and a queue before its prompts.

    speed: prompt tokens in a second. free_at: when the prompts that it has are computed.
    """

    def __init__(self, num_blocks: int, speed: float) -> None:
        self.cache = KVCacheManager(num_blocks + 1, BLOCK_SIZE, True, bytes(32))
        self.speed = speed
        self.free_at = 0.0
        self.num_running = 0
        self.waiting: deque[TurnRequest] = deque()

    def start(self, turn: "TurnRequest", now: float) -> bool:
        """Give a turn blocks and compute its prompt; False if the pool has too few."""
        request = Request(
            seq_id=turn.request_id,
            request_id=turn.request_id,
            prompt_token_ids=turn.tokens,
            sampling_params=NO_PARAMS,
            hasher=self.cache.hasher,
        )
        cached = self.cache.get_computed_blocks(request)
        num_new = len(turn.tokens) - cached.num_tokens
        lookahead = len(turn.answer)
        if self.cache.allocate_slots(request, num_new, cached, lookahead) is None:
            return False
        turn.num_cached = cached.num_tokens
        request.num_computed_tokens = len(turn.tokens)
        turn.request = request
        self.free_at = max(now, self.free_at) + num_new / self.speed
        turn.first_token_at = self.free_at
        self.num_running += 1
        return True

    def finish(self, turn: "TurnRequest") -> None:
        request = turn.request
        assert request is not None
        request.all_token_ids.extend(turn.answer)
        self.cache.allocate_slots(request, len(turn.answer) - 1)
        request.num_computed_tokens += len(turn.answer) - 1
        self.cache.free(request)
        self.num_running -= 1


@dataclass
class TurnRequest:
    """A turn as a request. arrived: seconds of the virtual clock."""

    request_id: int
    session: Session
    number: int
    tokens: list[int]
    arrived: float
    engine: int = 0
    num_cached: int = 0
    first_token_at: float = 0.0
    request: Request | None = None

    @property
    def answer(self) -> list[int]:
        return self.session.turns[self.number].answer


@dataclass(frozen=True)
class Outcome:
    """What a policy achieved. balance: most prompt tokens computed by an engine, over the mean."""

    hit_rate: float
    p50_first_token: float
    p99_first_token: float
    seconds: float
    balance: float
    num_turns: int


Policy = Callable[["Replay", RoutedRequest], int]


def by_router(replay: "Replay", request: RoutedRequest) -> int:
    return replay.router.choose(request, range(len(replay.engines)))


def round_robin(replay: "Replay", request: RoutedRequest) -> int:
    return request.request_id % len(replay.engines)


def least_load(replay: "Replay", request: RoutedRequest) -> int:
    """vLLM's balancer: waiting requests count four times."""
    loads = [len(engine.waiting) * 4 + engine.num_running for engine in replay.engines]
    return min(range(len(loads)), key=loads.__getitem__)


class Replay:
    """Sessions over engines. names_sessions: the clients name their sessions."""

    def __init__(
        self,
        sessions: Sequence[Session],
        num_engines: int,
        num_blocks: int,
        speed: float,
        policy: Policy,
        *,
        names_sessions: bool,
    ) -> None:
        self.now = 0.0
        self.engines = [Engine(num_blocks, speed) for _ in range(num_engines)]
        self.router = Router(num_engines, lambda: self.now)
        for index in range(num_engines):
            self.router.note_up(index, BLOCK_SIZE, num_blocks)
        self._policy = policy
        self._names_sessions = names_sessions
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._num_requests = 0
        self._done: list[TurnRequest] = []
        for session in sessions:
            self._at(session.arrival, partial(self._begin, session, 0, []))

    def run(self) -> Outcome:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        done = self._done
        waits = [turn.first_token_at - turn.arrived for turn in done]
        computed = [0] * len(self.engines)
        for turn in done:
            computed[turn.engine] += len(turn.tokens) - turn.num_cached
        num_tokens = sum(len(turn.tokens) for turn in done)
        return Outcome(
            hit_rate=sum(turn.num_cached for turn in done) / num_tokens,
            p50_first_token=statistics.median(waits),
            p99_first_token=percentile(waits, 99),
            seconds=self.now,
            balance=max(computed) / statistics.mean(computed),
            num_turns=len(done),
        )

    def _at(self, moment: float, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (moment, self._num_events, event))

    def _begin(self, session: Session, number: int, context: list[int]) -> None:
        """A turn arrives, and the subagent that it begins."""
        turn, tokens = session.turns[number], context or list(session.system)
        tokens = [*tokens, *turn.new_tokens]
        child = session.subagents.get(number)
        if child is not None:
            self._begin(child, 0, [])
        self._num_requests += 1
        request = TurnRequest(self._num_requests, session, number, tokens, self.now)
        name = session.name if self._names_sessions else ""
        routed = self.router.describe(engine_request(request.request_id, tokens, name))
        for index, engine in enumerate(self.engines):
            if engine.num_running:
                self.router.note_load(index, EngineLoad(timestamp=self.now))
        request.engine = self._policy(self, routed)
        self.router.note_sent(routed, request.engine)
        chosen = self.engines[request.engine]
        chosen.waiting.append(request)
        self._start_waiting(chosen)

    def _start_waiting(self, engine: Engine) -> None:
        while engine.waiting and engine.start(engine.waiting[0], self.now):
            turn = engine.waiting.popleft()
            self._at(turn.first_token_at, partial(self._first_token, turn))

    def _first_token(self, turn: TurnRequest) -> None:
        self.router.note_token(turn.request_id)
        self._at(self.now + len(turn.answer) / DECODES_PER_SECOND, partial(self._finish, turn))

    def _finish(self, turn: TurnRequest) -> None:
        engine = self.engines[turn.engine]
        engine.finish(turn)
        self.router.note_finished(turn.request_id)
        self._done.append(turn)
        if turn.number + 1 < len(turn.session.turns):
            context = [*turn.tokens, *turn.answer]
            pause = turn.session.turns[turn.number].pause
            self._at(self.now + pause, partial(self._begin, turn.session, turn.number + 1, context))
        turn.request, turn.tokens = None, range(len(turn.tokens))  # type: ignore[assignment]
        self._start_waiting(engine)


def working_set(sessions: Sequence[Session], num_engines: int) -> int:
    """Return the most blocks of live sessions, with a pool that holds everything."""
    changes: list[tuple[float, int]] = []
    total = sum(session.num_tokens for session in _all(sessions))
    replay = Replay(
        sessions,
        1,
        total // BLOCK_SIZE + 1000,
        num_engines * TOKENS_PER_SECOND,
        by_router,
        names_sessions=True,
    )
    replay.run()
    began: dict[str, float] = {}
    for turn in replay._done:
        began.setdefault(turn.session.name, turn.arrived)
    ended = {turn.session.name: turn for turn in replay._done}
    for name, last in ended.items():
        size = (len(last.tokens) + len(last.answer)) // BLOCK_SIZE
        changes += [(began[name], size), (last.first_token_at, -size)]
    live = most = 0
    for _, change in sorted(changes):
        live += change
        most = max(most, live)
    return most


def _all(sessions: Sequence[Session]) -> Iterator[Session]:
    for session in sessions:
        yield session
        yield from session.subagents.values()


def replay_policies(
    traffic: Traffic, num_engines: int, share: float, console: Console
) -> dict[str, Outcome]:
    """Return the outcome of one engine with the whole pool, and of each policy."""
    sessions = traffic.sessions()
    needed = working_set(sessions, num_engines)
    num_blocks = int(needed * share) // num_engines
    longest = max(session.num_tokens for session in _all(sessions))
    if num_blocks * BLOCK_SIZE < longest:
        raise ConfigError(
            f"a session of {longest} tokens does not fit into {num_blocks} blocks: more "
            "--sessions or a larger --share make the pools larger"
        )
    console.print(f"working set: {needed} blocks; {num_blocks} for each of {num_engines} engines")
    cases: dict[str, tuple[int, Policy, bool]] = {
        "one engine": (1, by_router, True),
        "router": (num_engines, by_router, True),
        "router, sessions unnamed": (num_engines, by_router, False),
        "least load": (num_engines, least_load, True),
        "round robin": (num_engines, round_robin, True),
    }
    outcomes = {}
    for name, (number, policy, names_sessions) in cases.items():
        factor = num_engines // number
        outcomes[name] = Replay(
            sessions,
            number,
            num_blocks * factor,
            TOKENS_PER_SECOND * factor,
            policy,
            names_sessions=names_sessions,
        ).run()
    return outcomes


def parser() -> argparse.ArgumentParser:
    parser = BenchParser(prog="routing", description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=at_least_one, default=64, help="of the decisions")
    parser.add_argument("--tokens", type=at_least_one, default=8192, help="of a prompt")
    parser.add_argument("--decisions", type=at_least_one, default=2000)
    parser.add_argument("--replay-engines", type=at_least_one, default=4)
    parser.add_argument("--sessions", type=at_least_one, default=30)
    parser.add_argument("--rate", type=positive, default=0.5, help="sessions in a second")
    parser.add_argument("--share", type=positive, default=0.5, help="of the working set, all pools")
    parser.add_argument("--seed", type=at_least_one, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the figures as one JSON object")
    return parser


def main(words: Sequence[str]) -> int:
    options, console = parser().parse_args(words), Console()
    with writable("--json", options.json) as files:
        times = measure_decisions(options.engines, options.tokens, options.decisions)
        show_times(times, console)
        traffic = Traffic(options.sessions, options.rate, options.seed)
        outcomes = replay_policies(traffic, options.replay_engines, options.share, console)
        show_outcomes(outcomes, console)
        figures = {
            "microseconds": {
                name: [statistics.median(values), percentile(values, 99)]
                for name, values in times.items()
            },
            "replay": {name: vars(outcome) for name, outcome in outcomes.items()},
        }
        write(files, json.dumps(figures))
    whole, routed = outcomes["one engine"].hit_rate, outcomes["router"].hit_rate
    is_quick = percentile(times["choose (thread)"], 99) <= LIMIT_US
    return 0 if is_quick and routed >= HITS_PROMISED * whole else 1


def show_times(times: dict[str, list[float]], console: Console) -> None:
    table = Table("µs", "p50", "p99")
    for name, values in times.items():
        table.add_row(name, f"{statistics.median(values):.1f}", f"{percentile(values, 99):.1f}")
    console.print(table)


def show_outcomes(outcomes: dict[str, Outcome], console: Console) -> None:
    whole = outcomes["one engine"].hit_rate
    table = Table("", "hits", "of one engine", "first token p50", "p99", "balance", "seconds")
    for name, each in outcomes.items():
        first = (f"{each.p50_first_token:.2f}", f"{each.p99_first_token:.2f}")
        shares = (f"{each.hit_rate:.4f}", f"{each.hit_rate / whole:.4f}")
        table.add_row(name, *shares, *first, f"{each.balance:.2f}", f"{each.seconds:.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(run(main))
