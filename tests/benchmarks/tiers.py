"""Measure the reuse of another daemon's KV, from a disk and a shared store.

For each medium a daemon computes new prompts and ends. A new daemon then gets the same prompts
twice: first their KV is loaded from the medium, then it is on the device. Answers have one token,
so the time is the time to first token.
"""

import argparse
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser, at_least_one, several_counts, writable, write
from deploy.bench.servers import MeasuredDaemon, OwnedProcess
from proto.errors import TokendError
from proto.settings.kv_media import DISK, REMOTE
from proto.settings.kv_transfer_config import DISK_SPEC, REMOTE_SPEC
from tests.benchmarks.command import run

_DISK_BYTES: Final = 16 << 30
_TOKENS: Final = range(1000, 30_000)
_WARM_UP_TOKENS: Final = 300
_ANSWER_SECONDS: Final = 600.0
_QUIET_SECONDS: Final = 0.5
_STORE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02
_STORED: Final = "vllm:kv_offload_store_bytes_total"
_LOADED: Final = "vllm:kv_offload_load_bytes_total"


@dataclass(frozen=True)
class Row:
    """Median milliseconds to the first token by prompt length; ratio: found to computed."""

    medium: str
    num_tokens: int
    rounds: int
    computed_ms: float
    found_ms: float
    device_ms: float
    ratio: float


def main(words: Sequence[str]) -> None:
    """Measure, print the table, write the figures."""
    options = _parse(words)
    rows: list[Row] = []
    with writable("--json", options.json) as files:
        for medium in options.media:
            with tempfile.TemporaryDirectory(dir=options.disk_path) as folder:
                rows += _measure(options, medium, Path(folder))
        Console(width=120).print(_table(rows))
        document = {
            "command": "python -m tests.benchmarks.tiers",
            "rows": [asdict(each) for each in rows],
        }
        write(files, json.dumps(document, indent=2) + "\n")


def _measure(options: argparse.Namespace, medium: str, folder: Path) -> list[Row]:
    draw = random.Random(0)
    prompts = [
        draw.choices(_TOKENS, k=length) for length in options.lengths for _ in range(options.rounds)
    ]
    with _connector(options, medium, folder) as connector:
        flags = [*options.serve_flags, "--kv-transfer-config", json.dumps(connector)]
        with _started(flags) as client:
            computed = [client.ask(prompt) for prompt in prompts]
            client.await_stores()
        with _started(flags) as client:
            found = [client.ask(prompt) for prompt in prompts]
            if not client.daemon.metric(_LOADED):
                raise TokendError(f"nothing was found on the medium {medium}")
            device = [client.ask(prompt) for prompt in prompts]
    rows = []
    for index, length in enumerate(options.lengths):
        part = slice(index * options.rounds, (index + 1) * options.rounds)
        computed_ms, found_ms, device_ms = (
            statistics.median(each[part]) * 1e3 for each in (computed, found, device)
        )
        ratio = found_ms / computed_ms
        rows.append(Row(medium, length, options.rounds, computed_ms, found_ms, device_ms, ratio))
    return rows


@contextmanager
def _connector(options: argparse.Namespace, medium: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Run a medium inside the context; yield its configuration."""
    if medium == DISK:
        keys = {"disk_path": str(folder.resolve()), "disk_bytes_to_use": _DISK_BYTES}
        yield _offloading(DISK_SPEC, keys)
    elif options.redis_url:
        yield _offloading(REMOTE_SPEC, {"remote_url": options.redis_url})
    else:
        with _Redis(folder) as server:
            yield _offloading(REMOTE_SPEC, {"remote_url": server.url})


def _offloading(spec: str, keys: dict[str, Any]) -> dict[str, Any]:
    extra = {"spec_name": spec, **keys}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


class _Redis(OwnedProcess):
    """A redis-server for this measurement, on a Unix socket; raises TokendError without one."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise TokendError("redis-server is not installed: give --redis-url or --media disk")
        path = folder / "socket"
        words = [program, "--port", "0", "--unixsocket", str(path), "--dir", str(folder)]
        words += ["--save", "", "--appendonly", "no"]
        super().__init__(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        self.url = f"unix://{path}"
        while not _answers(path):
            if self._process.poll() is not None:
                raise TokendError("redis-server did not start")
            time.sleep(_POLL_SECONDS)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(str(path)) == 0


class _Client:
    """One client of one daemon."""

    def __init__(self, daemon: MeasuredDaemon, client: httpx.Client) -> None:
        self.daemon = daemon
        self._client = client
        self._model = client.get(f"{daemon.url}/v1/models").json()["data"][0]["id"]

    def ask(self, prompt: list[int]) -> float:
        """Send a prompt; return the seconds to its only token."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        begun = time.perf_counter()
        response = self._client.post(f"{self.daemon.url}/v1/completions", json=body)
        seconds = time.perf_counter() - begun
        if response.status_code != httpx.codes.OK:
            raise TokendError(f"the daemon answers {response.status_code}: {response.text}")
        return seconds

    def await_stores(self) -> None:
        """Wait until no more stores happen."""
        deadline = time.monotonic() + _STORE_SECONDS
        before = -1.0
        while (now := self.daemon.metric(_STORED)) != before:
            if time.monotonic() > deadline:
                raise TokendError(f"stores have not ended in {_STORE_SECONDS:g} s")
            before = now
            time.sleep(_QUIET_SECONDS)


@contextmanager
def _started(flags: Sequence[str]) -> Iterator[_Client]:
    """Yield a client of a new, warmed-up daemon."""
    with MeasuredDaemon(flags) as daemon, httpx.Client(timeout=_ANSWER_SECONDS) as plain:
        client = _Client(daemon, plain)
        for _ in range(2):  # includes late imports and compilation
            client.ask(random.choices(_TOKENS, k=_WARM_UP_TOKENS))
        yield client


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="ms to the first token, by where the prompt's KV is (medians)")
    table.add_column("medium")
    for name in ("prompt tokens", "computed", "after a restart", "device", "found / computed"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.medium,
            str(row.num_tokens),
            f"{row.computed_ms:.0f}",
            f"{row.found_ms:.0f}",
            f"{row.device_ms:.0f}",
            f"{row.ratio:.3f}",
        )
    return table


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.tiers", description=__doc__)
    parser.add_argument(
        "--media", nargs="+", choices=[DISK, REMOTE], default=[DISK, REMOTE], help="(both)"
    )
    parser.add_argument("--disk-path", metavar="FOLDER", help="where the disk's folder is made")
    parser.add_argument("--redis-url", help="a store that runs; by default one is started")
    parser.add_argument(
        "--lengths", type=several_counts, default=[256, 512, 1024, 2048], help="(256..2048)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=3, help="of each length (3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument(
        "serve_flags", nargs="*", help="after --: flags of tokend serve, --cpu-weights bf16, say"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
