"""`tokend bench offload`: what KV beyond the device is worth.

First by the clock: a prompt is sent to a daemon three times, once when nobody knows it, once when
only the KV connector has its KV (the prefix cache is reset), and once when the device has it.
Then by counting: how much of the prompts of agents each eviction policy finds, with scans between
them that nobody repeats, on a trace without a model.

With --cost something else: what the connector takes from those who never hit, by pairs of daemons.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.line_program import LineProgram
from deploy.loadtest.offload_cost import Cost, CostLoad, cost_table, measure_cost
from deploy.loadtest.options import Parser, at_least_one, several_counts, share, writable, write
from proto.benchmark import OffloadHits, OffloadHitsOfAll, OffloadTimes, OffloadWorkload
from proto.codec import to_json
from proto.errors import TokendError

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
    """A row for each length of a prompt; raises TokendError where nothing was loaded."""
    flags, connector_flags = _flags(options)
    with (
        MeasuredDaemon([*flags, *connector_flags]) as daemon,
        httpx.Client(timeout=_ANSWER_SECONDS) as client,
    ):
        asker = _Asker(daemon, client)
        asker.ask(asker.prompt(64))  # what is imported and compiled late is paid for here
        return [asker.row(length, options.rounds) for length in options.lengths]


def _flags(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Of tokend serve: those beside the connector, and the connector's."""
    flags = list(options.serve_flags)
    for at, word in enumerate(flags):
        if word == _FLAG:
            return flags[:at] + flags[at + 2 :], flags[at : at + 2]
        if word.startswith(f"{_FLAG}="):
            return flags[:at] + flags[at + 1 :], [word]
    return flags, [_FLAG, json.dumps(_CONNECTOR)]


def trace(scan_share: float) -> list[OffloadHits]:
    """A row for each policy."""
    workload = OffloadWorkload(policies=list(POLICIES), scan_share=scan_share)
    command = [sys.executable, "-P", "-m", "engine_core.bench.offload"]
    with LineProgram(command) as program:
        return program.play(workload, OffloadHitsOfAll, "the trace").rows


class _Asker:
    """One client of one daemon; no prompt begins like another."""

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
            loads = self._daemon.metric("tokend:kv_offload_loads_total")
            medium.append(self.ask(prompt))
            device.append(self.ask(prompt))
            if self._daemon.metric("tokend:kv_offload_loads_total") == loads:
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
        """Seconds until the one token that is wanted is here."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        begun = time.perf_counter()
        response = self._client.post(f"{self._daemon.url}/v1/completions", json=body)
        seconds = time.perf_counter() - begun
        if response.status_code != httpx.codes.OK:
            raise TokendError(f"the daemon answers {response.status_code}: {response.text}")
        return seconds

    def _await_stores(self) -> None:
        """Until no more is stored; what is put off needs a step or two."""
        deadline = time.monotonic() + _STORE_SECONDS
        stored = -1.0
        while time.monotonic() < deadline:
            now = self._daemon.metric("tokend:kv_offload_stores_total")
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
        "command": "tokend bench offload",
        "times": [json.loads(to_json(each)) for each in times],
        "hits": [json.loads(to_json(each)) for each in hits],
    }


def _cost_document(cost: Cost) -> dict[str, Any]:
    medians = {"speed": cost.speed, "cpu": cost.cpu}
    return {"command": "tokend bench offload --cost", **medians, **asdict(cost)}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokend bench offload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
