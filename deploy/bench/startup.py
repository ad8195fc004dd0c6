"""`tokend bench startup`: time from the command to readiness, and to the first token.

Each server is started, gets one short request and is stopped, in turn, several times. A server is
ready when its health path answers. Phases are read from its output: lines such as
"tokend: starting ..." with the time at which they were printed, and lines with "start" and
durations ("started in 2.1 s: command 0.2 s; worker 0: imports 0.8 s, weights 0.4 s; ...").
"""

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.bench.client import Target, first_model
from deploy.bench.datasets import add_prompts, prompts_of
from deploy.bench.load import first_token_time
from deploy.bench.options import BenchParser, at_least_one, writable, write
from deploy.bench.servers import (
    PrintedLine,
    ServerSpec,
    StartedServer,
    add_servers,
    given_servers,
    tokend,
)
from proto.errors import ConfigError

_PROGRESS_LINE: Final = re.compile(r"^(?P<process>[\w ]+): (?P<what>.+) …$")
_DURATIONS: Final = re.compile(r"(?P<what>[A-Za-z][\w '/+-]*?):? (?P<seconds>\d+(?:\.\d+)?) s\b")
_START: Final = re.compile(r"\bstart(?:ed|[- ]?up)?\b[^:]*:", re.IGNORECASE)
_PROCESS: Final = re.compile(r"\s*(?P<process>[A-Za-z][\w -]*: )(?=[A-Za-z])")


@dataclass
class StartTimes:
    """Times of one server in seconds, one per round. phases: by name in the output."""

    ready: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ready_s": self.ready,
            "ready_s_median": statistics.median(self.ready),
            "first_token_s": self.first_token,
            "first_token_s_median": statistics.median(self.first_token),
            "phases_s": self.phases,
        }


def main(words: Sequence[str]) -> None:
    options = _parse(words)
    specs = _specs(options)
    with writable("--json", options.json) as files:
        starts = {spec.name: StartTimes() for spec in specs}
        for number in range(options.rounds):
            for spec in specs:
                _start(options, spec, number, starts[spec.name])
        Console(width=120).print(_table(starts))
        document = {
            "command": "tokend bench startup",
            "servers": {name: times.to_dict() for name, times in starts.items()},
        }
        write(files, json.dumps(document, indent=2) + "\n")


def phases(lines: Iterable[PrintedLine]) -> dict[str, float]:
    """Return phases and their seconds, read from the output of a server."""
    found: dict[str, float] = {}
    for line in lines:
        progress = _PROGRESS_LINE.match(line.text)
        if progress:
            found.setdefault(f"{progress['process']}: {progress['what']}, at", line.seconds)
        elif (begin := _START.search(line.text)) is not None:
            for part in line.text[begin.end() :].split(";"):
                process = _PROCESS.match(part)
                for duration in _DURATIONS.finditer(part, process.end() if process else 0):
                    name = (process["process"] if process else "") + duration["what"].strip()
                    found.setdefault(name, float(duration["seconds"]))
    return found


def _start(options: argparse.Namespace, spec: ServerSpec, number: int, starts: StartTimes) -> None:
    with StartedServer(spec) as server:
        target = Target(server.url, options.model or first_model(server.url))
        token = first_token_time(target, prompts_of(options), options.seed + number)
        starts.ready.append(server.seconds_to_ready)
        starts.first_token.append(token - server.started_at)
        for name, seconds in phases(list(server.lines)).items():
            starts.phases.setdefault(name, []).append(seconds)


def _table(starts: dict[str, StartTimes]) -> Table:
    table = Table(title="seconds from the command: median (minimum to maximum)")
    table.add_column("server")
    table.add_column("until")
    table.add_column("s", justify="right")
    for name, times in starts.items():
        table.add_row(name, "ready", _spread(times.ready))
        table.add_row("", "first token", _spread(times.first_token))
        for phase, seconds in times.phases.items():
            table.add_row("", f"  {phase}", _spread(seconds))
    return table


def _spread(seconds: Sequence[float]) -> str:
    low, high = min(seconds), max(seconds)
    return f"{statistics.median(seconds):.2f} ({low:.2f} to {high:.2f})"


def _specs(options: argparse.Namespace) -> list[ServerSpec]:
    """Return tokend and the other servers; raises ConfigError."""
    peers = given_servers(options)
    for peer in peers:
        if peer.url:
            raise ConfigError(f"--server {peer.name}: a start is measured from its command")
    flags = ["--log-level", "debug", *options.serve_flags]  # prints the phases
    ours = tokend("tokend", flags, options.start_seconds)
    if ours.name in [peer.name for peer in peers]:
        raise ConfigError(f"--server {ours.name}: the name is taken")
    return [ours, *peers]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="tokend bench startup", description=__doc__)
    add_servers(parser, "NAME=COMMAND", "another server; {port} is replaced by a free port")
    parser.add_argument("--model", help="model name; by default the first in /v1/models")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="starts per server (3)")
    add_prompts(parser)
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)
