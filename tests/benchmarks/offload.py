"""Measure the benefit of KV offloading.

First the times: a prompt is sent to a daemon three times: when it is unknown, when only the KV
connector has its KV (the prefix cache is reset), and when the device has it. Then hit rates: the
share of agent prompts that every eviction policy finds, on a trace with scans that never repeat,
without a model.

With --cost instead: the overhead of the connector for prompts that never hit, by pairs of daemons.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser, at_least_one, several_counts, share, writable, write
from deploy.bench.servers import MeasuredDaemon
from proto.codec import to_json
from proto.errors import TokendError
from tests.benchmarks.command import run
from tests.benchmarks.line_program import LineProgram
from tests.benchmarks.messages import OffloadHits, OffloadHitsOfAll, OffloadTimes, OffloadWorkload
from tests.benchmarks.usage import usage_by_title

# `python -m tests.benchmarks.offload --cost`: the overhead of a KV connector without hits.
#
# Two daemons, one of them with the connector, answer the same prompts alternately. Prompts share no
# prefix, so there are no hits and all computed blocks are stored:
#
#     round 1    without ████████          ████████ without    round 2 …
#                with             ████████                             ████████ with …
#
# Every round is a pair. The ratio of tokens per second is the direct figure; the ratio of CPU
# seconds per token has less noise on a shared machine.


_WARM_UP_TOKENS: Final = 16
_RESCAN_SECONDS: Final = 1.0
_IDLE_SHARE: Final = 0.05
_REST_SECONDS: Final = 120.0


@dataclass(frozen=True)
class CostLoad:
    """num_clients: concurrent clients, which send num_requests one after another."""

    num_clients: int = 16
    num_requests: int = 2
    prompt_tokens: int = 64
    answer_tokens: int = 128


@dataclass(frozen=True)
class Turn:
    """One daemon's run in a round. cpu_ms: CPU time of all its processes per output token."""

    tokens_per_second: float
    cpu_ms: float


@dataclass(frozen=True)
class CostRound:
    """The runs of a pair: without and with the connector."""

    without: Turn
    connected: Turn

    @property
    def speed(self) -> float:
        """Ratio of tokens per second, with to without the connector; 1 means no overhead."""
        return self.connected.tokens_per_second / self.without.tokens_per_second

    @property
    def cpu(self) -> float:
        """Ratio of CPU seconds per token, with to without the connector."""
        return self.connected.cpu_ms / self.without.cpu_ms


@dataclass(frozen=True)
class Cost:
    """speed, cpu: medians of the rounds' ratios. loads: copies from the medium, which must be zero.
    stores: copies to the medium."""

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
"""Sends prompts to one of the daemons and returns its figures."""


def play_rounds(
    without: TakeTurn, connected: TakeTurn, num_rounds: int, load: CostLoad
) -> list[CostRound]:
    """Run rounds in which both daemons get the same prompts and alternate in starting."""
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
    """Measure the cost; raise TokendError if blocks were loaded, or none were stored."""
    with (
        MeasuredDaemon(flags) as plain,
        MeasuredDaemon([*flags, *connector_flags]) as connected,
        _Clients(plain, load) as without,
        _Clients(connected, load) as others,
    ):
        for clients in (without, others):
            clients.warm_up()
        rounds = play_rounds(without.turn, others.turn, num_rounds, load)
        loads = int(connected.metric("vllm:kv_offload_load_size_count"))
        stores = int(connected.metric("vllm:kv_offload_store_size_count"))
    if loads or not stores:
        raise TokendError(f"{loads} loads and {stores} stores: there were to be stores alone")
    return Cost(rounds, loads, stores)


class _Clients:
    """All clients of one daemon, each in a thread."""

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
        """Send requests that trigger late imports and compilation."""
        draw = random.Random(1)
        for _ in range(2):
            prompts = [
                draw.choices(_TOKENS, k=self._load.prompt_tokens)
                for _ in range(self._load.num_clients)
            ]
            list(self._threads.map(lambda each: self._ask(each, _WARM_UP_TOKENS), prompts))
        self._await_rest()

    def turn(self, prompts: Sequence[Sequence[int]]) -> Turn:
        """Send all prompts, with as many concurrent requests as clients."""
        length = self._load.answer_tokens
        cpu, begun = self._cpu_seconds(), time.perf_counter()
        num_tokens = sum(self._threads.map(lambda each: self._ask(each, length), prompts))
        seconds = time.perf_counter() - begun
        cpu_ms = (self._cpu_seconds() - cpu) * 1e3
        return Turn(num_tokens / seconds, cpu_ms / num_tokens)

    def _await_rest(self) -> None:
        """Wait until work deferred by the start is done."""
        deadline = time.monotonic() + _REST_SECONDS
        before = -1.0
        while (now := self._cpu_seconds()) - before > _IDLE_SHARE * _RESCAN_SECONDS:
            if time.monotonic() > deadline:
                raise TokendError(f"the daemon is not at rest after {_REST_SECONDS:g} s")
            before = now
            time.sleep(_RESCAN_SECONDS)

    def _cpu_seconds(self) -> float:
        return sum(each.cpu_seconds for each in usage_by_title(self._daemon.pid).values())

    def _ask(self, prompt: Sequence[int], length: int) -> int:
        """Send a prompt; return the number of tokens of the answer."""
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
    """Return a table with a line for each round, and the medians."""
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


POLICIES: Final = ("none", "lru", "arc", "lru+2", "arc+2")
_CONNECTOR: Final = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30},
}
_FLAG: Final = "--kv-transfer-config"
_TOKENS: Final = range(1000, 30_000)
_ANSWER_SECONDS: Final = 600.0
_QUIET_SECONDS: Final = 0.3
_STORE_SECONDS: Final = 60.0


def main(words: Sequence[str]) -> None:
    """Measure, print the tables, write the figures."""
    options = _parse(words)
    with writable("--json", options.json) as files:
        if options.cost:
            cost = measure_cost(*_flags(options), options.rounds, CostLoad(options.clients))
            Console(width=120).print(cost_table(cost))
            write(files, json.dumps(_cost_document(cost), indent=2) + "\n")
            return
        times = [] if options.only_trace else measure(options)
        hits = [] if options.only_times else trace(options.scan_share)
        console = Console(width=120)
        if times:
            console.print(_times_table(times))
        if hits:
            console.print(_hits_table(hits))
        write(files, json.dumps(_document(times, hits), indent=2) + "\n")


def measure(options: argparse.Namespace) -> list[OffloadTimes]:
    """Return a row for each prompt length; raise TokendError if nothing was loaded."""
    flags, connector_flags = _flags(options)
    with (
        MeasuredDaemon([*flags, *connector_flags]) as daemon,
        httpx.Client(timeout=_ANSWER_SECONDS) as client,
    ):
        asker = _Asker(daemon, client)
        asker.ask(asker.prompt(64))  # includes late imports and compilation
        return [asker.row(length, options.rounds) for length in options.lengths]


def _flags(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the flags of tokend serve: those without the connector, and the connector's."""
    flags = list(options.serve_flags)
    for at, word in enumerate(flags):
        if word == _FLAG:
            return flags[:at] + flags[at + 2 :], flags[at : at + 2]
        if word.startswith(f"{_FLAG}="):
            return flags[:at] + flags[at + 1 :], [word]
    return flags, [_FLAG, json.dumps(_CONNECTOR)]


def trace(scan_share: float) -> list[OffloadHits]:
    """Return a row for each policy."""
    workload = OffloadWorkload(policies=list(POLICIES), scan_share=scan_share)
    command = [sys.executable, "-m", "tests.benchmarks.offload_program"]
    with LineProgram(command) as program:
        return program.play(workload, OffloadHitsOfAll, "the trace").rows


class _Asker:
    """One client of one daemon, whose prompts share no prefix."""

    def __init__(self, daemon: MeasuredDaemon, client: httpx.Client) -> None:
        self._daemon = daemon
        self._client = client
        self._model = client.get(f"{daemon.url}/v1/models").json()["data"][0]["id"]
        self._draw = random.Random(0)

    def prompt(self, length: int) -> list[int]:
        return self._draw.choices(_TOKENS, k=length)

    def row(self, length: int, rounds: int) -> OffloadTimes:
        computed, medium, device = [], [], []
        for _ in range(rounds):
            prompt = self.prompt(length)
            computed.append(self.ask(prompt))
            self._await_stores()
            self._forget_device()
            loads = self._daemon.metric("vllm:kv_offload_load_size_count")
            medium.append(self.ask(prompt))
            device.append(self.ask(prompt))
            if self._daemon.metric("vllm:kv_offload_load_size_count") == loads:
                raise TokendError(f"nothing was loaded of a prompt of {length} tokens")
        medians = [statistics.median(each) * 1e3 for each in (computed, medium, device)]
        return OffloadTimes(
            num_tokens=length,
            rounds=rounds,
            computed_ms=medians[0],
            medium_ms=medians[1],
            device_ms=medians[2],
            ratio=medians[1] / medians[0],
        )

    def ask(self, prompt: list[int]) -> float:
        """Send a prompt; return the seconds to its only token."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        begun = time.perf_counter()
        response = self._client.post(f"{self._daemon.url}/v1/completions", json=body)
        seconds = time.perf_counter() - begun
        if response.status_code != httpx.codes.OK:
            raise TokendError(f"the daemon answers {response.status_code}: {response.text}")
        return seconds

    def _await_stores(self) -> None:
        """Wait until nothing more is stored; deferred stores need a step or two."""
        deadline = time.monotonic() + _STORE_SECONDS
        stored = -1.0
        while time.monotonic() < deadline:
            now = self._daemon.metric("vllm:kv_offload_store_size_count")
            if now == stored:
                return
            stored = now
            time.sleep(_QUIET_SECONDS)
        raise TokendError(f"stores have not ended in {_STORE_SECONDS:g} s")

    def _forget_device(self) -> None:
        response = self._client.post(f"{self._daemon.url}/reset_prefix_cache")
        if response.status_code != httpx.codes.OK:
            raise TokendError(f"the prefix cache was not reset: {response.text}")


def _times_table(rows: Sequence[OffloadTimes]) -> Table:
    table = Table(title="milliseconds to the first token, by where the prompt's KV is (median)")
    for name in ("prompt tokens", "computed", "connector", "device", "connector / computed"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.num_tokens),
            f"{row.computed_ms:.0f}",
            f"{row.medium_ms:.0f}",
            f"{row.device_ms:.0f}",
            f"{row.ratio:.3f}",
        )
    return table


def _hits_table(rows: Sequence[OffloadHits]) -> Table:
    table = Table(title="blocks of agents' prompts, scans between them: where they are found")
    table.add_column("policy")
    for name in ("device", "medium", "computed", "computed / none", "blocks stored"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.policy,
            f"{row.device:.1%}",
            f"{row.medium:.1%}",
            f"{row.computed:.1%}",
            f"{row.computed / rows[0].computed:.2f}",
            str(row.num_stored),
        )
    return table


def _document(times: Sequence[OffloadTimes], hits: Sequence[OffloadHits]) -> dict[str, Any]:
    return {
        "command": "python -m tests.benchmarks.offload",
        "times": [json.loads(to_json(each)) for each in times],
        "hits": [json.loads(to_json(each)) for each in hits],
    }


def _cost_document(cost: Cost) -> dict[str, Any]:
    medians = {"speed": cost.speed, "cpu": cost.cpu}
    return {"command": "python -m tests.benchmarks.offload --cost", **medians, **asdict(cost)}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.offload", description=__doc__)
    parser.add_argument(
        "--lengths", type=several_counts, default=[256, 512, 1024, 2048], help="(256..2048)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=5, help="of each length (5)")
    parser.add_argument("--scan-share", type=share, default=0.5, help="of all requests (0.5)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only-times", action="store_true", help="leave the trace out")
    which.add_argument("--only-trace", action="store_true", help="start no daemon")
    which.add_argument("--cost", action="store_true", help="pairs of daemons, nothing ever found")
    parser.add_argument("--clients", type=at_least_one, default=16, help="for --cost (16)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
