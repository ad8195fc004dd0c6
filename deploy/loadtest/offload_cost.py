"""`tokend bench offload --cost`: what a KV connector takes from those who never hit.

Two daemons, one of them with the connector, answer the same prompts in turn; no prompt begins
like another, so nothing is ever found and all that is computed is stored:

    round 1    without ████████          ████████ without    round 2 …
               with             ████████                             ████████ with …

Each round is a pair of its own. Its ratio of tokens per second is what the clock says; its ratio of
CPU seconds per token says the same with less noise where others use the machine.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import httpx
from rich.table import Table

from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.processes import usage_by_title
from proto.errors import TokendError

_TOKENS: Final = range(1000, 30_000)
_ANSWER_SECONDS: Final = 600.0
_WARM_UP_TOKENS: Final = 16
_LOOK_SECONDS: Final = 1.0
_IDLE_SHARE: Final = 0.05
_REST_SECONDS: Final = 120.0


@dataclass(frozen=True)
class CostLoad:
    """num_clients: each waits for an answer before it sends the next of its num_requests."""

    num_clients: int = 16
    num_requests: int = 2
    prompt_tokens: int = 64
    answer_tokens: int = 128


@dataclass(frozen=True)
class Turn:
    """Of one daemon in one round. cpu_ms: of all its processes, for a token of an answer."""

    tokens_per_second: float
    cpu_ms: float


@dataclass(frozen=True)
class CostRound:
    """The turns of a pair. without: the connector."""

    without: Turn
    connected: Turn

    @property
    def speed(self) -> float:
        """Tokens per second, connected by without: 1 costs nothing."""
        return self.connected.tokens_per_second / self.without.tokens_per_second

    @property
    def cpu(self) -> float:
        """CPU seconds for a token, connected by without."""
        return self.connected.cpu_ms / self.without.cpu_ms


@dataclass(frozen=True)
class Cost:
    """speed, cpu: medians of the rounds' ratios. loads: copies from the medium, which are to be
    none. stores: copies to it."""

    rounds: Sequence[CostRound]
    loads: int
    stores: int

    @property
    def speed(self) -> float:
        return statistics.median(each.speed for each in self.rounds)

    @property
    def cpu(self) -> float:
        return statistics.median(each.cpu for each in self.rounds)


TakeTurn = Callable[[Sequence[Sequence[int]]], Turn]
"""Sends prompts to one of the daemons, and returns what it took."""


def play_rounds(
    without: TakeTurn, connected: TakeTurn, num_rounds: int, load: CostLoad
) -> list[CostRound]:
    """Both get the same prompts; who begins changes from round to round."""
    draw = random.Random(0)
    rounds = []
    for number in range(num_rounds):
        count = load.num_clients * load.num_requests
        prompts = [draw.choices(_TOKENS, k=load.prompt_tokens) for _ in range(count)]
        if number % 2:
            second = connected(prompts)
            rounds.append(CostRound(without(prompts), second))
        else:
            first = without(prompts)
            rounds.append(CostRound(first, connected(prompts)))
    return rounds


def measure_cost(
    flags: Sequence[str], connector_flags: Sequence[str], num_rounds: int, load: CostLoad
) -> Cost:
    """Raises TokendError where anything was loaded, or nothing stored: that measures little."""
    with (
        MeasuredDaemon(flags) as plain,
        MeasuredDaemon([*flags, *connector_flags]) as connected,
        _Clients(plain, load) as without,
        _Clients(connected, load) as others,
    ):
        for clients in (without, others):
            clients.warm_up()
        rounds = play_rounds(without.turn, others.turn, num_rounds, load)
        loads = int(connected.metric("tokend:kv_offload_loads_total"))
        stores = int(connected.metric("tokend:kv_offload_stores_total"))
    if loads or not stores:
        raise TokendError(f"{loads} loads and {stores} stores: there were to be stores alone")
    return Cost(rounds, loads, stores)


class _Clients:
    """All clients of one daemon, a thread each."""

    def __init__(self, daemon: MeasuredDaemon, load: CostLoad) -> None:
        self._daemon = daemon
        self._load = load
        limits = httpx.Limits(max_connections=load.num_clients)
        self._client = httpx.Client(timeout=_ANSWER_SECONDS, limits=limits)
        self._threads = ThreadPoolExecutor(load.num_clients)
        self._model = self._client.get(f"{daemon.url}/v1/models").json()["data"][0]["id"]

    def __enter__(self) -> "_Clients":
        return self

    def __exit__(self, *how: object) -> None:
        self._threads.shutdown()
        self._client.close()

    def warm_up(self) -> None:
        """What is imported and compiled late is paid for here."""
        draw = random.Random(1)
        for _ in range(2):
            prompts = [
                draw.choices(_TOKENS, k=self._load.prompt_tokens)
                for _ in range(self._load.num_clients)
            ]
            list(self._threads.map(lambda each: self._ask(each, _WARM_UP_TOKENS), prompts))
        self._await_rest()

    def turn(self, prompts: Sequence[Sequence[int]]) -> Turn:
        """All prompts, as many at a time as there are clients."""
        length = self._load.answer_tokens
        cpu, begun = self._cpu_seconds(), time.perf_counter()
        num_tokens = sum(self._threads.map(lambda each: self._ask(each, length), prompts))
        seconds = time.perf_counter() - begun
        cpu_ms = (self._cpu_seconds() - cpu) * 1e3
        return Turn(num_tokens / seconds, cpu_ms / num_tokens)

    def _await_rest(self) -> None:
        """Until what a start leaves for idle moments is done."""
        deadline = time.monotonic() + _REST_SECONDS
        before = -1.0
        while (now := self._cpu_seconds()) - before > _IDLE_SHARE * _LOOK_SECONDS:
            if time.monotonic() > deadline:
                raise TokendError(f"the daemon is not at rest after {_REST_SECONDS:g} s")
            before = now
            time.sleep(_LOOK_SECONDS)

    def _cpu_seconds(self) -> float:
        return sum(each.cpu_seconds for each in usage_by_title(self._daemon.pid).values())

    def _ask(self, prompt: Sequence[int], length: int) -> int:
        """Tokens of the answer."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": 0,
        }
        response = self._client.post(f"{self._daemon.url}/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            raise TokendError(f"the daemon answers {response.status_code}: {response.text}")
        num_tokens = response.json()["usage"]["completion_tokens"]
        if num_tokens != length:
            raise TokendError(f"an answer of {num_tokens} tokens instead of {length}")
        return int(num_tokens)


def cost_table(cost: Cost) -> Table:
    """A line for each round, and the medians."""
    table = Table(
        title=f"the cost of a connector that never hits; {cost.stores} stores, {cost.loads} loads"
    )
    for name in ("round", "tokens/s without", "tokens/s with", "with / without", "CPU ms / token"):
        table.add_column(name, justify="right")
    table.add_column("CPU ms / token with", justify="right")
    table.add_column("with / without", justify="right")
    for number, each in enumerate(cost.rounds, 1):
        table.add_row(
            str(number),
            f"{each.without.tokens_per_second:.1f}",
            f"{each.connected.tokens_per_second:.1f}",
            f"{each.speed:.4f}",
            f"{each.without.cpu_ms:.3f}",
            f"{each.connected.cpu_ms:.3f}",
            f"{each.cpu:.4f}",
        )
    table.add_section()
    table.add_row("median", "", "", f"{cost.speed:.4f}", "", "", f"{cost.cpu:.4f}")
    return table
