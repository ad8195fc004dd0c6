"""How well and how fast the router chooses engines, beside other policies.

    decisions   the router with 64 engines that hold prefixes of the prompts, prompts of 8,192
                tokens. Hashing of the prompt, the decision, and the notes about the request that
                was sent, apart. Wall time, and time of the thread, which other programs do not
                lengthen as much.
    hour        an hour of agents' and chat sessions over 4 engines on a virtual clock: the router,
                and the scheduler and the KV cache of each engine, are the real ones; a step takes
                as long as a linear model says. Hits are compared with those of one engine with the
                whole pool, which is as fast as all together.
    fleets      more engines: the real router over a model of an engine, whose step times are
                fitted to those of the hour. The hour is thinned to some minutes; sessions are in
                progress at the start, with their KV where the policy puts it. The same model runs
                over the hour, too, which shows its error.

`fleet/` has the sessions, the engines and the policies.
"""

import argparse
import gc
import heapq
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Final, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.bench.limits import percentile
from deploy.bench.options import BenchParser, at_least_one, positive, writable, write
from engine_core.compiled import use_compiled

if __name__ == "__main__":
    use_compiled()  # before the import of any module with a compiled form

from api_server.engine.router import RoutedRequest, Router
from proto.errors import ConfigError
from tests.benchmarks.agents import MACHINES, Machine
from tests.benchmarks.command import run
from tests.benchmarks.fleet.engines import (
    ModelEngine,
    RealEngine,
    SimulatedEngine,
    StepSample,
    faster,
    fit_steps,
    prefill_rate,
    without_context,
)
from tests.benchmarks.fleet.policies import POLICIES, ROUTER, ByRouter, Fleet, Policy
from tests.benchmarks.fleet.traffic import (
    AGENTS_PER_MINUTE,
    BLOCK_SIZE,
    MEAN_CONTEXT,
    RequestWithoutTokens,
    Session,
    Traffic,
    TurnRequest,
    engine_request,
    request_with_tokens,
)

Result = TypeVar("Result")

LIMIT_US: Final = 50.0
"""Most microseconds that a decision may take, at p99."""
HITS_PROMISED: Final = 0.95
"""Least hits of the router's engines, as a share of those of one engine with the whole pool."""
UNLIMITED: Final = 1 << 40
"""Blocks of a pool that holds everything."""


# ---- Decisions ----


def measure_decisions(num_engines: int, num_tokens: int, number: int) -> dict[str, list[float]]:
    """Return wall and thread microseconds of the parts of a decision."""
    rng = random.Random(1)
    router = Router(num_engines, time.monotonic)
    for engine in range(num_engines):
        router.note_up(engine, BLOCK_SIZE, 20_000)
    prefixes = [_random_tokens(rng, num_tokens) for _ in range(50)]
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
        tokens = [*shared, *_random_tokens(rng, num_tokens - len(shared))]
        request = router.describe(engine_request(request_id, tokens, tenant=request_id % 5))
        timed("hash", _hashed, request)
        engine = timed("choose", router.choose, request, usable)
        timed("note", router.note_sent, request, engine)
        router.note_token(request_id - num_engines * 2)
        router.note_finished(request_id - num_engines * 8)
    return {name: values[-number:] for name, values in times.items()}


def _random_tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(number)]


def _hashed(request: RoutedRequest) -> tuple[Sequence[int], int]:
    return request.keys, request.affinity


# ---- Replay ----


@dataclass(frozen=True)
class Outcome:
    """What a policy achieved. Times of first tokens in seconds; of a turn that has none, until now.

    hit_rate: cached tokens of the prompts that were computed. balance: most tokens that an engine
    computed, over the mean. p50_us, p99_us: thread time of decisions, hashing apart.
    """

    hit_rate: float
    p50_first_token: float
    p99_first_token: float
    balance: float
    p50_us: float
    p99_us: float
    num_turns: int


class Replay:
    """Sessions over equal engines, from second 0 to a time.

    num_blocks: of the pool of each engine. kind: the real engines, or the model. turns: all that
    arrived.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        num_engines: int,
        num_blocks: int,
        machine: Machine,
        policy: type[Policy],
        kind: Callable[[Machine, int], SimulatedEngine],
    ) -> None:
        self.now = 0.0
        self.engines = [kind(machine, num_blocks) for _ in range(num_engines)]
        self.turns: list[TurnRequest] = []
        fleet = Fleet(num_engines, num_blocks, prefill_rate(machine), lambda: self.now)
        self._policy = policy(fleet)
        self._describe = request_with_tokens if kind is RealEngine else RequestWithoutTokens
        self._microseconds: list[float] = []
        self._ends = [inf] * num_engines
        self._num_events = self._num_requests = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._warm([session for session in sessions if session.first_turn])
        for session in sessions:
            self._at(session.arrival, partial(self._begin, session, session.first_turn))

    def run(self, until: float) -> Outcome:
        gc.collect()  # earlier replays; during this one it would count as time of decisions
        self._microseconds.clear()
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until
        begun = [turn for turn in self.turns if turn.first_token_at is not None]
        waits = [
            (until if turn.first_token_at is None else turn.first_token_at) - turn.arrived
            for turn in self.turns
        ]
        computed = [0] * len(self.engines)
        for turn in begun:
            computed[turn.engine] += turn.num_tokens - turn.num_cached + turn.answer
        return Outcome(
            hit_rate=sum(turn.num_cached for turn in begun) / sum(t.num_tokens for t in begun),
            p50_first_token=statistics.median(waits),
            p99_first_token=percentile(waits, 99),
            balance=max(computed) / statistics.mean(computed),
            p50_us=statistics.median(self._microseconds),
            p99_us=percentile(self._microseconds, 99),
            num_turns=len(begun),
        )

    def _warm(self, sessions: Sequence[Session]) -> None:
        """Let engines have the KV of sessions in progress, as if all of them were open at once."""
        turns = []
        for session in sessions:
            turn = self._request(session, session.first_turn - 1)
            turn.num_tokens, turn.answer = turn.num_tokens + turn.answer, 1
            self._send(turn)
            self.engines[turn.engine].warm(turn)
            turns.append(turn)
        for turn in turns:
            self._policy.note_token(turn)
            self._policy.note_finished(turn)

    def _at(self, moment: float, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (moment, self._num_events, event))

    def _request(self, session: Session, number: int) -> TurnRequest:
        self._num_requests += 1
        length, answer = session.prompt_lengths[number], session.turns[number].answer
        return TurnRequest(self._num_requests, session, number, self.now, length, answer)

    def _begin(self, session: Session, number: int) -> None:
        """A turn arrives, and the subagents that it begins."""
        for child in session.subagents.get(number, ()):
            self._at(self.now, partial(self._begin, child, 0))
        turn = self._request(session, number)
        self.turns.append(turn)
        self._send(turn)
        self.engines[turn.engine].submit(turn, self.now)
        self._watch(turn.engine)

    def _send(self, turn: TurnRequest) -> None:
        policy = self._policy
        request = self._describe(turn, named=policy.names_sessions)
        _hashed(request)
        began = time.thread_time()
        turn.engine = policy.choose(turn, request)
        self._microseconds.append((time.thread_time() - began) * 1e6)
        policy.note_sent(turn, request)

    def _watch(self, index: int) -> None:
        """Look at an engine when it ends what it computes, which an arrival may have changed."""
        end = self.engines[index].next_end
        if end != self._ends[index]:
            self._ends[index] = end
            if end < inf:
                self._at(end, partial(self._advance, index, end))

    def _advance(self, index: int, end: float) -> None:
        engine = self.engines[index]
        if engine.next_end != end:
            return
        for turn, has_ended in engine.advance(self.now):
            if has_ended:
                self._end(turn)
            else:
                turn.first_token_at = self.now
                self._policy.note_token(turn)
        self._policy.note_load(index, engine.load(self.now))
        self._watch(index)

    def _end(self, turn: TurnRequest) -> None:
        turn.ended_at = self.now
        self._policy.note_finished(turn)
        session, number = turn.session, turn.number + 1
        if number < len(session.turns):
            pause = session.turns[turn.number].pause
            self._at(self.now + pause, partial(self._begin, session, number))


def working_set(turns: Sequence[TurnRequest]) -> int:
    """Return the most blocks of live sessions, of their own chains, from their turns."""
    changes: list[tuple[float, int]] = []
    sizes: dict[str, int] = {}
    for turn in turns:
        session = turn.session
        size = turn.num_blocks - session.num_shared
        changes.append((turn.arrived, size - sizes.get(session.name, 0)))
        sizes[session.name] = size
        if turn.number + 1 == len(session.turns) and turn.ended_at is not None:
            changes.append((turn.ended_at, -size))
    return max(itertools.accumulate(change for _, change in sorted(changes)))


# ---- The hour, and the fleets ----


@dataclass(frozen=True)
class Hour:
    """Outcomes of the hour by policy, and of the model of engines.

    num_blocks: of the pool of an engine. machine: the fitted one. step_error: median error of its
    steps, as a share. whole: one engine with the whole pool.
    """

    num_blocks: int
    machine: Machine
    step_error: float
    whole: Outcome
    real: dict[str, Outcome]
    model: dict[str, Outcome]


def run_hour(traffic: Traffic, machine: Machine, share: float, console: Console) -> Hour:
    """Run each policy. share: of the working set, that all pools have together."""
    number, seconds, sessions = traffic.num_engines, traffic.seconds, traffic.sessions()
    even = without_context(machine)
    replay = Replay(sessions, number, UNLIMITED, even, ByRouter, ModelEngine)
    replay.run(seconds)
    needed = working_set(replay.turns)
    num_blocks = int(needed * share) // number
    longest = max(turn.session.num_tokens for turn in replay.turns)
    if num_blocks * BLOCK_SIZE < longest:
        raise ConfigError(
            f"a session of {longest} tokens does not fit into {num_blocks} blocks: more "
            "--replay-engines or a larger --share make the pools larger"
        )
    console.print(f"working set: {needed} blocks; {num_blocks} for each of {number} engines")
    fast = faster(machine, number)
    replay = Replay(sessions, 1, num_blocks * number, fast, ByRouter, RealEngine)
    whole = replay.run(seconds)
    real: dict[str, Outcome] = {}
    samples: list[StepSample] = []
    for name, policy in POLICIES.items():
        replay = Replay(sessions, number, num_blocks, machine, policy, RealEngine)
        real[name] = replay.run(seconds)
        if name == ROUTER:
            engines = [engine for engine in replay.engines if isinstance(engine, RealEngine)]
            samples = [sample for engine in engines for sample in engine.samples]
    step_model, error = fit_steps(samples)
    fitted = replace(machine, step_model=step_model)
    model = run_model(traffic, sessions, fitted, num_blocks)
    return Hour(num_blocks, fitted, error, whole, real, model)


def run_model(
    traffic: Traffic, sessions: Sequence[Session], machine: Machine, num_blocks: int
) -> dict[str, Outcome]:
    """Return the outcome of each policy with models of engines."""
    number, seconds = traffic.num_engines, traffic.seconds
    return {
        name: Replay(sessions, number, num_blocks, machine, policy, ModelEngine).run(seconds)
        for name, policy in POLICIES.items()
    }


def fleets(text: str) -> list[tuple[int, float]]:
    """Parse numbers of engines and their minutes, as in "64:10,1000:0.5"; for `type=`."""
    found = []
    for part in filter(None, text.split(",")):
        number, _, minutes = part.partition(":")
        found.append((at_least_one(number), positive(minutes)))
    return found


def parser() -> argparse.ArgumentParser:
    parser = BenchParser(prog="routing", description=__doc__)
    add = parser.add_argument
    add("--engines", type=at_least_one, default=64, help="of the decisions (64)")
    add("--tokens", type=at_least_one, default=8192, help="of a prompt (8192)")
    add("--decisions", type=at_least_one, default=2000, help="(2000)")
    add("--replay-engines", type=at_least_one, default=4, help="of the hour (4)")
    add("--minutes", type=positive, default=60.0, help="of the hour (60)")
    add(
        "--fleets",
        type=fleets,
        default=fleets("64:10,1000:0.5"),
        metavar="N:MINUTES,…",
        help="engines and minutes of the fleets (64:10,1000:0.5)",
    )
    add("--agents-per-minute", type=positive, default=AGENTS_PER_MINUTE, help="of an engine (0.28)")
    add("--share", type=positive, default=1.5, help="of the working set, all pools together (1.5)")
    add("--machine", choices=list(MACHINES), default="assumed-70b", help="step times (assumed-70b)")
    add("--seed", type=at_least_one, default=1, help="of the sessions (1)")
    add("--json", metavar="FILE", help="write the figures as one JSON object")
    return parser


def main(words: Sequence[str]) -> int:
    """Print the tables; return 1 if decisions are too slow, or the router finds too little."""
    gc.disable()
    options, console = parser().parse_args(words), Console()
    machine = MACHINES[options.machine]
    traffic = Traffic(
        options.replay_engines,
        60 * options.minutes,
        options.seed,
        machine.step_model.seconds(8, 8, 8 * MEAN_CONTEXT),
        options.agents_per_minute,
    )
    with writable("--json", options.json) as files:
        times = measure_decisions(options.engines, options.tokens, options.decisions)
        show_times(times, console)
        hour = run_hour(traffic, machine, options.share, console)
        show_hour(hour, traffic, console)
        found: dict[str, dict[str, Outcome]] = {}
        for number, minutes in options.fleets:
            fleet = replace(traffic, num_engines=number, seconds=60 * minutes)
            outcomes = run_model(fleet, fleet.sessions(), hour.machine, hour.num_blocks)
            found[f"{number} engines, {minutes:g} minutes"] = outcomes
            show_outcomes(
                f"{number} engines, a model of them, {minutes:g} minutes", outcomes, console
            )
        figures = {
            "microseconds": {
                name: [statistics.median(values), percentile(values, 99)]
                for name, values in times.items()
            },
            "num_blocks": hour.num_blocks,
            "step_model": msgspec.to_builtins(hour.machine.step_model),
            "step_error": hour.step_error,
            "one engine": vars(hour.whole),
            "hour": {name: vars(outcome) for name, outcome in hour.real.items()},
            "hour, model": {name: vars(outcome) for name, outcome in hour.model.items()},
            "fleets": {
                title: {name: vars(outcome) for name, outcome in outcomes.items()}
                for title, outcomes in found.items()
            },
        }
        write(files, json.dumps(figures))
    is_quick = percentile(times["choose (thread)"], 99) <= LIMIT_US
    finds_enough = hour.real[ROUTER].hit_rate >= HITS_PROMISED * hour.whole.hit_rate
    return 0 if is_quick and finds_enough else 1


def show_times(times: dict[str, list[float]], console: Console) -> None:
    table = Table("µs", "p50", "p99")
    for name, values in times.items():
        table.add_row(name, f"{statistics.median(values):.1f}", f"{percentile(values, 99):.1f}")
    console.print(table)


def show_hour(hour: Hour, traffic: Traffic, console: Console) -> None:
    number, minutes = traffic.num_engines, traffic.seconds / 60
    outcomes = {"one engine": hour.whole, **hour.real}
    show_outcomes(f"{number} engines, {minutes:g} minutes", outcomes, console)
    show_outcomes(f"the same, a model of the engines, {minutes:g} minutes", hour.model, console)
    model = hour.machine.step_model
    console.print(
        f"a step of the model takes {model.base_ms:.4g} ms + {model.per_token_ms:.4g} a token + "
        f"{model.per_row_ms:.4g} a row; half of the steps differ by more than "
        f"{100 * hour.step_error:.1f} %"
    )


def show_outcomes(title: str, outcomes: dict[str, Outcome], console: Console) -> None:
    heads = ("", "hits", "first token p50, s", "p99, s", "balance", "µs p50", "p99", "turns")
    table = Table(*heads, title=title)
    for name, each in outcomes.items():
        table.add_row(
            name,
            f"{each.hit_rate:.4f}",
            f"{each.p50_first_token:.2f}",
            f"{each.p99_first_token:.2f}",
            f"{each.balance:.2f}",
            f"{each.p50_us:.0f}",
            f"{each.p99_us:.0f}",
            str(each.num_turns),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(run(main))
