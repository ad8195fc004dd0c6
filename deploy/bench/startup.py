"""`tokend bench startup`: from the command to ready, and to the first token.

Each server is started, asked once and ended, in turns, several times. Ready is when its health
path answers; the first token is that of a short request sent then. Phases are what the server
prints on its way: lines "tokend: starting ..." with the second at which they came, and any line
with "start" and durations in it ("started in 2.1 s: command 0.2 s; worker 0: imports 0.8 s, weights
0.4 s; ...") with what it says: of each process one after the other, and all of them side by side.
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
from deploy.bench.dataset_options import add_prompts, material_of
from deploy.bench.load import first_token
from deploy.bench.options import Parser, at_least_one, positive, writable, write
from deploy.bench.servers import Line, ServerSpec, StartedServer, tokend
from proto.errors import ConfigError

_UNDER_WAY: Final = re.compile(r"^(?P<who>[\w ]+): (?P<what>.+) …$")
_DURATIONS: Final = re.compile(r"(?P<what>[A-Za-z][\w '/+-]*?):? (?P<seconds>\d+(?:\.\d+)?) s\b")
_START: Final = re.compile(r"\bstart(?:ed|[- ]?up)?\b[^:]*:", re.IGNORECASE)
_WHO: Final = re.compile(r"\s*(?P<who>[A-Za-z][\w -]*: )(?=[A-Za-z])")


@dataclass
class Starts:
    """Of one server, in seconds, one a round. phases: by what was printed."""

    ready: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {
            "ready_s": self.ready,
            "ready_s_median": statistics.median(self.ready),
            "first_token_s": self.first_token,
            "first_token_s_median": statistics.median(self.first_token),
            "phases_s": self.phases,
        }


def main(words: Sequence[str]) -> None:
    """Measure, print the table, write the figures."""
    options = _parse(words)
    specs = _specs(options)
    with writable("--json", options.json) as files:
        starts = {spec.name: Starts() for spec in specs}
        for number in range(options.rounds):
            for spec in specs:
                _start(options, spec, number, starts[spec.name])
        Console(width=120).print(_table(starts))
        document = {
            "command": "tokend bench startup",
            "servers": {name: each.plain() for name, each in starts.items()},
        }
        write(files, json.dumps(document, indent=2) + "\n")


def phases(lines: Iterable[Line]) -> dict[str, float]:
    """Seconds by what was printed: the first line of each kind, and durations that are told."""
    found: dict[str, float] = {}
    for line in lines:
        under_way = _UNDER_WAY.match(line.text)
        if under_way:
            found.setdefault(f"{under_way['who']}: {under_way['what']}, at", line.seconds)
        elif (begin := _START.search(line.text)) is not None:
            for part in line.text[begin.end() :].split(";"):
                who = _WHO.match(part)
                for each in _DURATIONS.finditer(part, who.end() if who else 0):
                    name = (who["who"] if who else "") + each["what"].strip()
                    found.setdefault(name, float(each["seconds"]))
    return found


def _start(options: argparse.Namespace, spec: ServerSpec, number: int, starts: Starts) -> None:
    with StartedServer(spec) as server:
        target = Target(server.url, options.model or first_model(server.url))
        token = first_token(target, material_of(options), options.seed + number)
        starts.ready.append(server.seconds_to_ready)
        starts.first_token.append(token - server.begun)
        for name, seconds in phases(list(server.lines)).items():
            starts.phases.setdefault(name, []).append(seconds)


def _table(starts: dict[str, Starts]) -> Table:
    table = Table(title="seconds from the command: median (lowest to highest)")
    table.add_column("server")
    table.add_column("until")
    table.add_column("s", justify="right")
    for name, each in starts.items():
        table.add_row(name, "ready", _spread(each.ready))
        table.add_row("", "first token", _spread(each.first_token))
        for phase, seconds in each.phases.items():
            table.add_row("", f"  {phase}", _spread(seconds))
    return table


def _spread(seconds: Sequence[float]) -> str:
    low, high = min(seconds), max(seconds)
    return f"{statistics.median(seconds):.2f} ({low:.2f} to {high:.2f})"


def _specs(options: argparse.Namespace) -> list[ServerSpec]:
    """tokend itself, and what else is named."""
    peers = [
        ServerSpec.parse(each, options.ready_path, options.start_seconds) for each in options.server
    ]
    for peer in peers:
        if peer.url:
            raise ConfigError(f"--server {peer.name}: a start is measured from its command")
    ours = tokend("tokend", options.serve_flags, options.start_seconds)
    if ours.name in [peer.name for peer in peers]:
        raise ConfigError(f"--server {ours.name}: the name is taken")
    return [ours, *peers]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokend bench startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another one beside tokend; {port} in it is a free port",
    )
    parser.add_argument("--ready-path", default="/health", help="200 when it is up (/health)")
    parser.add_argument("--start-seconds", type=positive, default=600.0, help="at most (600)")
    parser.add_argument("--model", help="by default the first that a server names")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="(3)")
    add_prompts(parser)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)
