"""An agent's session on a hybrid model, beside llama.cpp: tokens computed again, first tokens.

  python -m tests.benchmarks.states --turns 12 --tokens 8192

The prompt of a turn is that of the turn before, its answer and new tokens, --tokens at the last
turn. Prompts are token ids, so no text is tokenised twice. Each server runs the session once for
each of --variants:

  alone       nothing else happens
  shortened   a prompt has the last half of each answer only: templates leave reasoning out
  others      before the turn in the middle --others sessions send a prompt of --other-tokens each
  restarted   the server is stopped and started before that turn
  killed      tokend's engine is killed before it, llama.cpp's only process

Both have room for the KV of --pool-tokens tokens, and --host-memory for what leaves it. For the
last two variants tokend has a disk tier, and llama.cpp saves the slot after each turn and restores
it. "Computed again" are tokens of a prompt that the turn before had, too, and that were not found;
the last token of a turn is never in a cache. A model's time per token is measured by `sizes`.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.chaos.killer import ENGINE
from deploy.bench.options import (
    BenchParser,
    add_values,
    at_least_one,
    from_zero,
    writable,
    write,
)
from deploy.bench.processes import pids_by_title
from deploy.bench.servers import PORT, ServerSpec, StartedServer
from deploy.environment import HostEnvironment
from proto.errors import ConfigError, TokendError
from proto.settings.config import GIB
from proto.settings.kv_transfer_config import CPU_SPEC, DISK_SPEC
from tests.benchmarks.command import from_zero_number, run
from tests.benchmarks.synthetic import FORMS, SHAPES, HybridShape, synthetic_file

ALONE, SHORTENED, OTHERS, RESTARTED, KILLED = VARIANTS = (
    *("alone", "shortened", "others", "restarted", "killed"),
)
_TOKENS: Final = range(1000, 30_000)
_ANSWER_SECONDS: Final = 600.0
_AGAIN_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.05
_BLOCK: Final = 16
_SLOT_FILE: Final = "session"
_CLIENTS: Final = 4
"""Other sessions that send at the same time, and slots of llama.cpp beside that of the session."""


@dataclass(frozen=True)
class Turn:
    """A turn of a session.

    num_known: first tokens of its prompt that the turn before had, too. num_found: of these and
    the others in the server's caches. answer: token ids.
    """

    num_tokens: int
    num_known: int
    num_found: int
    first_token_ms: float
    answer: list[int]

    @property
    def num_again(self) -> int:
        return max(0, self.num_known - self.num_found)


@dataclass(frozen=True)
class Reply:
    """An answer: token ids, tokens of the prompt that were found, seconds to the first token."""

    tokens: list[int]
    num_found: int
    seconds: float


class MeasuredServer(ABC):
    """A server with one variant's settings, and its caches in a folder of its own."""

    name: str

    def __init__(self, options: argparse.Namespace, variant: str, model: str, folder: Path) -> None:
        self._options = options
        self._variant = variant
        self._model = model
        self._folder = folder
        self._stack = ExitStack()
        # Without connections that a server closes after some seconds.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(timeout=_ANSWER_SECONDS, limits=limits)
        self._server: StartedServer

    def __enter__(self) -> "MeasuredServer":
        self._start()
        return self

    def __exit__(self, *how: object) -> None:
        self._stack.close()
        self._client.close()

    @property
    def outlives(self) -> bool:
        """Whether what it has computed is to be found after its end."""
        return self._variant in (RESTARTED, KILLED)

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Reply:
        """Send a prompt; raises TokendError for an answer that is no stream of tokens."""
        path, body = self._request(prompt, num_tokens)
        tokens: list[int] = []
        first = last = 0.0
        num_found = 0
        begun = time.perf_counter()
        with self._client.stream("POST", self._server.url + path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = response.read().decode(errors="replace")
                raise TokendError(f"{self.name} answers {response.status_code}: {text[:300]}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                new, found = self._read(json.loads(line.removeprefix("data: ")))
                last = time.perf_counter()
                if new and not tokens:
                    first = last
                tokens += new
                num_found = max(num_found, found)
        if not tokens:
            raise TokendError(f"{self.name} answers without tokens")
        return Reply(tokens, num_found, first - begun)

    def end_turn(self) -> None:
        """Wait as for a tool; a server may store meanwhile."""
        time.sleep(self._options.pause)

    def restart(self) -> None:
        """Stop the server and start it again."""
        self._stack.close()
        self._start()

    @abstractmethod
    def kill(self) -> None:
        """Kill what computes; return when requests are answered again."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the command that starts it."""

    @abstractmethod
    def _request(self, prompt: Sequence[int], num_tokens: int) -> tuple[str, dict[str, Any]]:
        """Return path and body of a greedy request of this length."""

    @abstractmethod
    def _read(self, event: Mapping[str, Any]) -> tuple[list[int], int]:
        """Return the tokens of an event, and the number of tokens that were found; 0: not said."""

    def _start(self) -> None:
        cache = f"XDG_CACHE_HOME={self._folder}"
        spec = ServerSpec(self.name, command=("env", cache, *self._command()))
        self._server = self._stack.enter_context(StartedServer(spec))
        self._await_answer()

    def _await_answer(self) -> None:
        """Wait until a short prompt is answered; it warms a new server up, too."""
        deadline = time.monotonic() + _AGAIN_SECONDS
        while True:
            try:
                self.ask(random.choices(_TOKENS, k=_BLOCK), 2)
            except (TokendError, httpx.HTTPError) as error:
                if time.monotonic() > deadline:
                    raise TokendError(f"{self.name} does not answer again: {error}") from None
                time.sleep(_POLL_SECONDS)
            else:
                return


class Tokend(MeasuredServer):
    name = "tokend"

    def kill(self) -> None:
        os.kill(pids_by_title(self._server.pid)[ENGINE], signal.SIGKILL)
        self._await_answer()

    def _command(self) -> list[str]:
        options = self._options
        memory = int(options.host_memory * GIB)
        tier: dict[str, Any] = {"spec_name": CPU_SPEC, "cpu_bytes_to_use": memory}
        if self.outlives:
            disk = str((self._folder / "disk").resolve())
            tier = {"spec_name": DISK_SPEC, "disk_path": disk, "disk_bytes_to_use": 16 * GIB}
        connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": tier}
        return [
            *(str(Path(sys.executable).with_name("tokend")), "serve", self._model),
            *("--port", PORT, "--disable-log-requests"),
            *("--cpu-threads", str(options.cpu_threads)),
            *("--max-model-len", str(longest(options))),
            *("--num-gpu-blocks-override", str(options.pool_tokens // _BLOCK + 1)),
            *(("--kv-transfer-config", json.dumps(connector)) if memory or self.outlives else ()),
            *options.serve_flags,
        ]

    def _request(self, prompt: Sequence[int], num_tokens: int) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def _read(self, event: Mapping[str, Any]) -> tuple[list[int], int]:
        if "error" in event:
            raise TokendError(f"{self.name}: {event['error']}")
        usage = event.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        tokens = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
        return tokens, details.get("cached_tokens") or 0


class LlamaCpp(MeasuredServer):
    """llama-server with its own API, which counts found tokens and returns ids."""

    name = "llama.cpp"
    _slot = 0

    def end_turn(self) -> None:
        if self.outlives:
            self._move_slot("save")
        super().end_turn()

    def restart(self) -> None:
        super().restart()
        self._move_slot("restore")

    def kill(self) -> None:
        os.kill(self._server.pid, signal.SIGKILL)
        self.restart()

    def _move_slot(self, action: str) -> None:
        url = f"{self._server.url}/slots/{self._slot}?action={action}"
        response = self._client.post(url, json={"filename": _SLOT_FILE})
        if response.status_code != httpx.codes.OK:
            raise TokendError(f"{self.name} does not {action} its slot: {response.text[:300]}")

    def _command(self) -> list[str]:
        options = self._options
        slots = self._folder / "slots"
        slots.mkdir(exist_ok=True, parents=True)
        own = options.llama_server.split()
        return [
            *(*own, "-m", self._model, "--port", PORT, "-t", str(options.cpu_threads)),
            *("-np", str(1 + _CLIENTS * (self._variant == OTHERS)), "--kv-unified"),
            *("-c", str(max(options.pool_tokens, longest(options)))),
            *("--cache-ram", str(int(1024 * options.host_memory))),
            *("--ctx-checkpoints", "64", "--checkpoint-min-step", "0"),
            *("--slot-save-path", f"{slots}/"),
        ]

    def _request(self, prompt: Sequence[int], num_tokens: int) -> tuple[str, dict[str, Any]]:
        return "/completion", {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
        }

    def _read(self, event: Mapping[str, Any]) -> tuple[list[int], int]:
        if "error" in event:
            raise TokendError(f"{self.name}: {event['error']}")
        self._slot = event.get("id_slot", self._slot)
        found = (event.get("timings") or {}).get("cache_n", 0)
        return ([] if event.get("stop") else list(event.get("tokens") or ())), max(0, found)


SERVERS: Final[tuple[type[MeasuredServer], ...]] = (Tokend, LlamaCpp)


def longest(options: argparse.Namespace) -> int:
    """Return the tokens that the last turn may have, its answer included, in whole slots."""
    tokens: int = options.tokens + options.answer_tokens + 1
    return -(-tokens // 256) * 256


def run_session(server: MeasuredServer, options: argparse.Namespace, variant: str) -> list[Turn]:
    """Send all turns of a session to a server that has just started."""
    draw = random.Random(options.seed)
    growth = (options.tokens - options.first_tokens) / max(1, options.turns - 1)
    prompt: list[int] = []
    turns: list[Turn] = []
    num_known = 0
    for number in range(options.turns):
        if number == options.turns // 2:
            _interrupt(server, options, variant, draw)
        length = max(len(prompt) + 1, int(options.first_tokens + number * growth))
        prompt += draw.choices(_TOKENS, k=length - len(prompt))
        reply = server.ask(prompt, options.answer_tokens)
        milliseconds = 1e3 * reply.seconds
        turns.append(Turn(len(prompt), num_known, reply.num_found, milliseconds, reply.tokens))
        server.end_turn()
        # Of the last token of an answer nothing is computed.
        num_known = len(prompt) + len(reply.tokens) - 1
        answer = reply.tokens
        if variant == SHORTENED:
            num_known, answer = len(prompt), answer[len(answer) // 2 :]
        prompt += answer
    return turns


def _interrupt(
    server: MeasuredServer, options: argparse.Namespace, variant: str, draw: random.Random
) -> None:
    """Do what a variant does before the turn in the middle."""
    if variant == OTHERS:
        others = [draw.choices(_TOKENS, k=options.other_tokens) for _ in range(options.others)]
        with ThreadPoolExecutor(_CLIENTS) as clients:
            list(clients.map(lambda each: server.ask(each, 2), others))
    elif variant == RESTARTED:
        server.restart()
    elif variant == KILLED:
        server.kill()


@dataclass(frozen=True)
class Figures:
    """A session in short. Times in ms: medians, without the first turn and that in the middle.

    again, most_again: tokens computed again in all turns, and in one. second, last: first tokens
    of these turns. middle, middle_again: of the turn after the interruption.
    """

    variant: str
    server: str
    again: int
    most_again: int
    second_ms: float
    median_ms: float
    last_ms: float
    middle_ms: float
    middle_again: int

    @classmethod
    def of(cls, variant: str, server: str, turns: Sequence[Turn]) -> "Figures":
        middle = turns[len(turns) // 2]
        later = [turn for turn in turns[1:] if turn is not middle] or [middle]
        return cls(
            variant=variant,
            server=server,
            again=sum(turn.num_again for turn in turns),
            most_again=max(turn.num_again for turn in turns),
            second_ms=turns[min(1, len(turns) - 1)].first_token_ms,
            median_ms=statistics.median(turn.first_token_ms for turn in later),
            last_ms=turns[-1].first_token_ms,
            middle_ms=middle.first_token_ms,
            middle_again=middle.num_again,
        )


def table(rows: Sequence[Figures], title: str) -> Table:
    """Return a row for each session, and one with the ratios of two servers."""
    made = Table(title=title)
    titles = ("variant", "server", "computed again", "in one turn", "in the middle one")
    for text in (*titles, "first token, turn 2, ms", "median", "last", "middle"):
        made.add_column(text, justify="left" if text in titles[:2] else "right")
    for variant in dict.fromkeys(row.variant for row in rows):
        group = [row for row in rows if row.variant == variant]
        for row in group:
            counts = (f"{n:,}" for n in (row.again, row.most_again, row.middle_again))
            made.add_row(variant, row.server, *counts, *(f"{each:.0f}" for each in _times(row)))
        for other in group[1:]:
            ratios = (a / b for a, b in zip(_times(group[0]), _times(other), strict=True))
            again = f"{group[0].again / other.again:.3f}" if other.again else "-"
            name = f"{group[0].server} / {other.server}"
            made.add_row("", name, again, "", "", *(f"{each:.3f}" for each in ratios))
        made.add_section()
    return made


def num_equal(sessions: Mapping[str, Sequence[Turn]]) -> int:
    """Return how many tokens of the answers to the first prompt all servers agree in."""
    answers = [turns[0].answer for turns in sessions.values()]
    columns = enumerate(zip(*answers, strict=False))
    return next((i for i, each in columns if len({*each}) > 1), min(map(len, answers)))


def _times(row: Figures) -> tuple[float, float, float, float]:
    return row.second_ms, row.median_ms, row.last_ms, row.middle_ms


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; raises ConfigError for sizes that do not fit each other."""
    parser = BenchParser(
        prog="python -m tests.benchmarks.states",
        description=__doc__,
    )
    hybrids = [name for name, shape in SHAPES.items() if isinstance(shape, HybridShape)]
    parser.add_argument(
        "--synthetic", choices=hybrids, default=hybrids[-1], help=f"({hybrids[-1]})"
    )
    parser.add_argument("--form", choices=FORMS, default="q8_0", help="of the weights (q8_0)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="(all)")
    add_values(
        parser,
        ("--turns", at_least_one, 40, ""),
        ("--tokens", at_least_one, 32_768, "of the last prompt"),
        ("--first-tokens", at_least_one, 2048, "of the first prompt"),
        ("--answer-tokens", at_least_one, 32, ""),
        ("--others", from_zero, 20, "other sessions"),
        ("--other-tokens", at_least_one, 2048, ""),
        ("--pool-tokens", at_least_one, None, "by default one and a half times --tokens"),
        ("--host-memory", from_zero_number, 4.0, "GiB for KV and states that leave the pool"),
        ("--pause", from_zero_number, 0.2, "seconds between two turns"),
        ("--seed", from_zero, 0, ""),
        ("--cpu-threads", at_least_one, len(os.sched_getaffinity(0)), "of each server"),
    )
    parser.add_argument(
        "--llama-server",
        metavar="COMMAND",
        default=shutil.which("llama-server") or "",
        help='llama.cpp\'s server, by default that on PATH; "" for none',
    )
    parser.add_argument("--json", metavar="FILE", help="write all turns there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    options = parser.parse_args(words)
    if options.first_tokens > options.tokens:
        raise ConfigError("--first-tokens must not be more than --tokens")
    if options.pool_tokens is None:
        options.pool_tokens = max(options.tokens * 3 // 2, longest(options)) + _BLOCK
    return options


def main(words: Sequence[str]) -> None:
    """Run all sessions, print the table, write the turns."""
    options = parse(words)
    servers = SERVERS if options.llama_server else SERVERS[:1]
    if not options.llama_server:
        print("llama.cpp is not compared: llama-server is not on PATH", file=sys.stderr)
    environment = HostEnvironment.of(os.environ)
    model = synthetic_file(options.synthetic, options.form, "gguf", environment)
    sessions: dict[str, dict[str, list[Turn]]] = {}
    rows: list[Figures] = []
    with writable("--json", options.json) as files:
        for variant in options.variants:
            for kind in servers:
                with (
                    TemporaryDirectory(
                        prefix="tokend-states-", ignore_cleanup_errors=True
                    ) as folder,
                    kind(options, variant, model, Path(folder)) as server,
                ):
                    turns = run_session(server, options, variant)
                sessions.setdefault(variant, {})[kind.name] = turns
                rows.append(Figures.of(variant, kind.name, turns))
                print(f"{variant}, {kind.name}: {rows[-1].again:,} tokens again", file=sys.stderr)
        title = (
            f"{options.synthetic}, {options.form}: {options.turns} turns to {options.tokens:,} "
            f"tokens, answers of {options.answer_tokens}"
        )
        Console(width=150).print(table(rows, title))
        if len(servers) > 1:
            first = sessions[options.variants[0]]
            print(f"the first {num_equal(first)} tokens of the first answer are the same")
        document = {
            "command": "python -m tests.benchmarks.states",
            "options": vars(options),
            "figures": [asdict(row) for row in rows],
            "turns": {
                variant: {name: [asdict(turn) for turn in turns] for name, turns in found.items()}
                for variant, found in sessions.items()
            },
        }
        write(files, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
