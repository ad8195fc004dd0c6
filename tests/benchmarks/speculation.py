"""Measure what speculation brings to a served model, by what is asked for.

Servers are loaded in turns with the same greedy requests. The first one is the daemon without
speculation; others are the daemon with it, and peers:

    edit     a source file, and the request to write it again with a name replaced
    json     objects of a JSON schema
    agent    a session that has read files with tools, and goes on
    chat     questions
    random   random words

With --shape 1b the model has a billion parameters and goes on in cycles of tokens, so that its
answers are known (cycles_model.py): an edit has another token in about every 24th place of the
prompt, an agent reads one of three parts again, and random words do not occur in the answer. With
--draft-right there is a draft model of a tenth of its size.

A time per token is that of the tokens after the first. Answers of the daemon with speculation are
compared with those of the first server: they must be equal.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.bench.client import BenchClient, BenchRequest, Target, first_model
from deploy.bench.options import BenchParser, at_least_one, several_counts, writable, write
from deploy.bench.servers import ServerSpec, running, tokend
from deploy.bench.stream import RequestResult
from deploy.environment import HostEnvironment
from proto.errors import ConfigError
from tests.benchmarks.command import run
from tests.benchmarks.cycles_model import CYCLE, NUM_CYCLES, SHAPE, cycles_file, successor

ROOT: Final = Path(__file__).resolve().parents[2]
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 16},
        "last_name": {"type": "string", "maxLength": 16},
        "age_in_years": {"type": "integer", "minimum": 1, "maximum": 99},
        "favourite_colour": {"enum": ["red", "green", "blue", "yellow"]},
        "city_of_birth": {"type": "string", "maxLength": 16},
        "is_customer": {"type": "boolean"},
    },
    "required": [
        *("first_name", "last_name", "age_in_years", "favourite_colour"),
        *("city_of_birth", "is_customer"),
    ],
    "additionalProperties": False,
}
_SUBJECTS: Final = (
    *(
        "the sea",
        "bread",
        "a bridge",
        "winter",
        "a clock",
        "the moon",
        "a market",
        "tea",
        "a train",
    ),
    *("gardens", "a river", "maps", "music", "stone", "a library", "rain", "glass", "a mountain"),
)
_QUESTIONS: Final = (
    *("What is known of {}?", "Explain {} to a child.", "Why do people like {}?"),
    *("Write a short story about {}.", "List facts about {}.", "What is the history of {}?"),
)

MakeRequest = Callable[[random.Random], BenchRequest]


def _lines(generator: random.Random, count: int) -> list[str]:
    """Return neighbouring lines of one of the repository's files."""
    files = sorted((ROOT / "engine_core").rglob("*.py"))
    while True:
        lines = generator.choice(files).read_text().splitlines()
        if len(lines) > 2 * count:
            start = generator.randrange(len(lines) - count)
            return lines[start : start + count]


def edit_request(generator: random.Random) -> BenchRequest:
    """A part of a file, to be written again with a name replaced."""
    text = "\n".join(_lines(generator, 40))
    words = [word for word in text.split() if word.isidentifier() and len(word) > 5] or ["self"]
    old = generator.choice(words)
    prompt = (
        f"The file:\n```python\n{text}\n```\n\n"
        f"The same file, with {old} renamed to {old}_value:\n```python\n"
    )
    return BenchRequest("/v1/completions", {"prompt": prompt}, 256, checked=True)


def json_request(generator: random.Random) -> BenchRequest:
    """An object of a schema with six properties."""
    subject = generator.choice(_SUBJECTS)
    message = (
        f"Make up a person who sells {subject} to {generator.randrange(1000)} people, as JSON."
    )
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": _SCHEMA, "strict": True},
    }
    content: dict[str, Any] = {
        "messages": [{"role": "user", "content": message}],
        "response_format": response_format,
    }
    return BenchRequest("/v1/chat/completions", content, 128, checked=True)


def agent_request(generator: random.Random) -> BenchRequest:
    """A session that reads three parts of files, the last one again, and goes on."""
    parts = ["\n".join(_lines(generator, 12)) for _ in range(3)]
    turns = "".join(
        f'Call: read_file(path="part{index}.py")\nResult:\n{part}\n\n'
        for index, part in enumerate(parts)
    )
    prompt = f'{turns}Call: read_file(path="part{generator.randrange(3)}.py")\nResult:\n'
    return BenchRequest("/v1/completions", {"prompt": prompt}, 128, checked=True)


def chat_request(generator: random.Random) -> BenchRequest:
    question = generator.choice(_QUESTIONS).format(generator.choice(_SUBJECTS))
    message = f"{question} Begin with the number {generator.randrange(1000)}."
    content = {"messages": [{"role": "user", "content": message}]}
    return BenchRequest("/v1/chat/completions", content, 128, checked=True)


def random_request(generator: random.Random) -> BenchRequest:
    words = (ROOT / "README.md").read_text().split()
    prompt = " ".join(generator.choices(words, k=150))
    return BenchRequest("/v1/completions", {"prompt": prompt}, 128, checked=True)


def _cycle_part(generator: random.Random, length: int) -> list[int]:
    """Return neighbouring tokens of a cycle, without the one that has tokens that end answers."""
    first = generator.randrange(CYCLE, NUM_CYCLES * CYCLE)
    return [successor(first, steps) for steps in range(length)]


def _cycle_request(prompt: list[int], output_tokens: int) -> BenchRequest:
    return BenchRequest("/v1/completions", {"prompt": prompt}, output_tokens, checked=True)


def edit_in_cycles(generator: random.Random) -> BenchRequest:
    part = _cycle_part(generator, 257)
    old = [generator.randrange(CYCLE) if generator.random() < 1 / 24 else each for each in part]
    return _cycle_request([*old, part[0]], 256)


def agent_in_cycles(generator: random.Random) -> BenchRequest:
    parts = [_cycle_part(generator, 129) for _ in range(3)]
    return _cycle_request([*parts[0], *parts[1], *parts[2], generator.choice(parts)[0]], 128)


def random_in_cycles(generator: random.Random) -> BenchRequest:
    return _cycle_request([_cycle_part(generator, 1)[0] for _ in range(150)], 128)


CYCLE_KINDS: Final[dict[str, MakeRequest]] = {
    "edit": edit_in_cycles,
    "json": json_request,
    "agent": agent_in_cycles,
    "random": random_in_cycles,
}
KINDS: Final[dict[str, MakeRequest]] = {
    "edit": edit_request,
    "json": json_request,
    "agent": agent_request,
    "chat": chat_request,
    "random": random_request,
}


@dataclass
class Measured:
    """What one server did with a load. tokens_per_s: output tokens of all by the whole time.

    token_ms: median time per token after the first. answers: texts, in the order of requests.
    """

    tokens_per_s: float
    token_ms: float
    answers: list[str]


async def _load(client: BenchClient, requests: Sequence[BenchRequest], number: int) -> Measured:
    """Send requests, `number` at a time; raises ConfigError if one fails."""
    waiting = list(enumerate(requests))[::-1]
    results: dict[int, RequestResult] = {}

    async def send_some() -> None:
        while waiting:
            index, request = waiting.pop()
            results[index] = await client.send_request(request)

    await asyncio.gather(*(send_some() for _ in range(number)))
    client.close()
    done = [results[index] for index in range(len(requests))]
    for result in done:
        if result.error:
            raise ConfigError(f"{client.target.url}: {result.error}")
    seconds = max(each.last for each in done) - min(each.started for each in done)
    tokens = sum(each.counted_tokens for each in done)
    times = [
        (each.last - each.first) / (each.counted_tokens - 1)
        for each in done
        if each.counted_tokens > 1
    ]
    answers = ["".join(each.texts) for each in done]
    return Measured(tokens / seconds, statistics.median(times) * 1e3, answers)


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the figures where --json says so."""
    options = _parse(words)
    drafts = {"method": options.method}
    flags, servers, kinds = options.serve_flags, options.server, KINDS
    if options.shape is not None:
        environment = HostEnvironment.of(os.environ)
        model, draft = cycles_file(environment), ""
        if options.draft_right is not None:
            drafts["model"] = draft = cycles_file(environment, "draft", options.draft_right)
        flags, kinds = [model, *flags], CYCLE_KINDS
        servers = [text.replace("{gguf}", model).replace("{draft}", draft) for text in servers]
    specs = [
        tokend("off", [*flags, "--speculative-config", '{"method": "none"}']),
        tokend("on", [*flags, "--speculative-config", json.dumps(drafts)]),
        *(ServerSpec.parse(text, "/health", 600.0) for text in servers),
    ]
    rows: list[dict[str, Any]] = []
    with writable("json", options.json) as files:
        with ExitStack() as stack:
            targets = []
            for spec in specs:
                server = stack.enter_context(running(spec))
                targets.append(Target(server.url, first_model(server.url)))
            for kind in filter(kinds.__contains__, options.kinds):
                for number in options.concurrency:
                    rows += _cells(kind, number, kinds[kind], specs, targets, options)
        write(files, json.dumps(rows, indent=2) + "\n")
    Console(width=150).print(_table(rows, [spec.name for spec in specs]))


def _cells(
    kind: str,
    number: int,
    make_request: MakeRequest,
    specs: Sequence[ServerSpec],
    targets: Sequence[Target],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Measure one kind of requests at one concurrency: a row for each round."""
    rows = []
    for round_number in range(options.rounds):
        generator = random.Random(f"{options.seed} {kind} {number} {round_number}")
        count = max(4, options.requests * number)
        requests = [make_request(generator) for _ in range(count)]
        measured: dict[str, Measured] = {}
        order = list(zip(specs, targets, strict=True))
        for spec, target in order[round_number % len(order) :] + order[: round_number % len(order)]:
            measured[spec.name] = asyncio.run(_load(BenchClient(target), requests, number))
        first = measured["off"]
        different = sum(a != b for a, b in zip(first.answers, measured["on"].answers, strict=True))
        rows.append(
            {
                "kind": kind,
                "concurrency": number,
                "round": round_number,
                "requests": count,
                "different": different,
                "tokens_per_s": {name: each.tokens_per_s for name, each in measured.items()},
                "token_ms": {name: each.token_ms for name, each in measured.items()},
            }
        )
    return rows


def _table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    table = Table(title="medians of the rounds; time per token by that of `off`")
    for column in ("requests", "at once", *(f"{name}, tokens/s" for name in names)):
        table.add_column(column, justify="right")
    for name in names:
        table.add_column(f"{name}, ms a token", justify="right")
    for name in names[1:]:
        table.add_column(f"{name} / off", justify="right")
        table.add_column(f"tokens/s, {name} / off", justify="right")
    table.add_column("different", justify="right")
    cells = dict.fromkeys((row["kind"], row["concurrency"]) for row in rows)
    for kind, number in cells:
        own = [row for row in rows if (row["kind"], row["concurrency"]) == (kind, number)]

        def median(figure: str, name: str, by: str = "", own: Sequence[Any] = own) -> float:
            values: list[float] = [
                row[figure][name] / (row[figure][by] if by else 1.0) for row in own
            ]
            return statistics.median(values)

        table.add_row(
            kind,
            str(number),
            *(f"{median('tokens_per_s', name):.0f}" for name in names),
            *(f"{median('token_ms', name):.2f}" for name in names),
            *(
                f"{median(figure, name, 'off'):.2f}"
                for name in names[1:]
                for figure in ("token_ms", "tokens_per_s")
            ),
            str(sum(row["different"] for row in own)),
        )
    return table


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if not set(kinds) <= set(KINDS):
        raise ValueError
    return kinds


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(
        prog="python -m tests.benchmarks.speculation",
        description="Measure a daemon with and without speculation, by what is asked for.",
    )
    parser.add_argument("--method", default="suffix+grammar", help="of --speculative-config")
    parser.add_argument(
        "--kinds", type=_kinds, default=list(KINDS), help=f"some of {','.join(KINDS)} (all)"
    )
    parser.add_argument(
        "--concurrency", type=several_counts, default=[1, 4, 16], help="at once (1,4,16)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=1, help="of all loads (1)")
    parser.add_argument(
        "--requests", type=at_least_one, default=2, help="of a load, by concurrency (2; 4 at least)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the requests (0)")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="a peer; {gguf} and {draft} are the files of --shape and --draft-right",
    )
    parser.add_argument("--shape", choices=[SHAPE], help="of a model that goes on in cycles")
    parser.add_argument(
        "--draft-right",
        type=at_least_one,
        metavar="PERCENT",
        help="with --shape and a method draft_model: of the tokens, those that it has right",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("serve_flags", nargs="*", help="after --: model and flags of tokend serve")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
