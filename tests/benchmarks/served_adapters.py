"""Measure adapters through daemons: 200 by Zipf's law, and loads while 16 requests stream.

The loads take turns on the same server, 16 requests at once:

    base      requests of the model alone
    zipf      each request has one of the adapters, the n-th one n times more rarely than the first
    loading   requests of the model alone, while adapters are loaded and unloaded all the time

--server adds another server with vLLM's routes for adapters, as NAME=URL or NAME='COMMAND {port}'.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from deploy import flags
from deploy.bench.client import BenchRequest, Target, first_model
from deploy.bench.datasets import Session, random_ids, single
from deploy.bench.figures import RunFigures, figures_of
from deploy.bench.limits import percentile
from deploy.bench.load import LoadPattern, measure
from deploy.bench.options import BenchParser, at_least_one
from deploy.bench.servers import ServerSpec, running, tokend
from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from tests.benchmarks.adapters import write_adapter
from tests.benchmarks.command import run

_AT_ONCE: Final = 16
_LOADS: Final = ("base", "zipf", "loading")


def zipf(number: int, rng: random.Random) -> Iterator[int]:
    """Yield numbers from 1 to `number` by Zipf's law with the exponent 1."""
    weights = [1 / rank for rank in range(1, number + 1)]
    while True:
        yield from rng.choices(range(1, number + 1), weights, k=64)


def requests_of(load: str, options: argparse.Namespace, seed: int, model: str) -> Iterator[Session]:
    """Yield the requests of a load, with prompts that no other run has."""
    rng = random.Random(seed)
    numbers = zipf(options.adapters, rng)
    make_prompt = random_ids()
    while True:
        name = f"adapter-{next(numbers)}" if load == "zipf" else model
        content = {
            "model": name,
            "prompt": make_prompt(rng, options.input_tokens),
            "ignore_eos": True,
        }
        yield single(BenchRequest("/v1/completions", content, options.output_tokens))


def post(url: str, path: str, **fields: object) -> None:
    """Send a call about adapters; raises HTTPError if it is refused."""
    request = urllib.request.Request(
        url + path, json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=600).close()


@contextmanager
def loading(url: str, folder: Path, number: int) -> Iterator[list[int]]:
    """Load and unload adapters, one after the other; yields a list that gets one item for each."""
    ended, done = threading.Event(), list[int]()

    def load_all() -> None:
        for each in itertools.cycle(range(1, number + 1)):
            if ended.is_set():
                return
            path = str(folder / f"adapter-{each}")
            post(url, "/v1/load_lora_adapter", lora_name="loading", lora_path=path)
            post(url, "/v1/unload_lora_adapter", lora_name="loading")
            done.append(each)

    thread = threading.Thread(target=load_all)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


def run_load(
    load: str, url: str, options: argparse.Namespace, seed: int, folder: Path
) -> tuple[RunFigures, int]:
    """Run one load; return its figures, and how many adapters were loaded meanwhile."""
    model = first_model(url)
    sessions = requests_of(load, options, seed, model)
    pattern = LoadPattern(concurrency=_AT_ONCE, max_requests=options.requests)
    target, loads = Target(url, model), list[int]()
    if load == "loading":
        with loading(url, folder, options.adapters) as loads:
            result = measure(target, sessions, pattern, load, sys.stderr)
    else:
        result = measure(target, sessions, pattern, load, sys.stderr)
    figures = figures_of(load, result)
    if figures.num_failed:
        raise SystemExit(f"{load}: {figures.num_failed} requests failed: {figures.errors}")
    return figures, len(loads)


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the figures where --json says so."""
    options = _parse(words)
    around = HostEnvironment.of(os.environ)
    config = flags.build(flags.parse(options.serve_flags), around.settings)
    with closing(open_display(sys.stderr)) as display:
        prepared = prepared_model(config.model.model, around, display)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="tokend-adapters-") as name:
        folder = Path(name)
        for number in range(1, options.adapters + 1):
            write_adapter(folder / f"adapter-{number}", prepared, options.rank, number)
        own = tokend(
            "tokend",
            [
                *options.serve_flags,
                *("--enable-lora", "--lora-dir", name),
                *("--max-loras", str(_AT_ONCE), "--max-cpu-loras", str(_AT_ONCE)),
            ],
        )
        others = [ServerSpec.parse(text, "/health", 600.0) for text in options.server or ()]
        for spec in (own, *others):
            found[spec.name] = {load: [] for load in _LOADS}
            with running(spec) as server:
                if spec is not own:
                    for number in range(1, options.adapters + 1):
                        path = str(folder / f"adapter-{number}")
                        named = {"lora_name": f"adapter-{number}", "lora_path": path}
                        post(server.url, "/v1/load_lora_adapter", **named)
                for turn in range(options.rounds + 1):
                    for load in _LOADS:
                        seed = 10 * turn + _LOADS.index(load)
                        figures, loads = run_load(load, server.url, options, seed, folder)
                        if turn:  # the first one warms up
                            found[spec.name][load].append(_row(figures, loads))
    for name, loads_of in found.items():
        Console(width=120).print(_table(name, loads_of, options))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


def _row(figures: RunFigures, loads: int) -> dict[str, float]:
    return {
        "tokens_per_s": figures.output_tokens_per_s,
        "ttft_p99_ms": percentile(figures.times["ttft"], 99),
        "gap_p99_ms": percentile(figures.times["itl"], 99),
        "loads": loads,
    }


def _table(
    name: str, found: dict[str, list[dict[str, float]]], options: argparse.Namespace
) -> Table:
    """Return medians over the rounds, and the median ratio to the base in the same round."""
    table = Table(title=f"{name}: {_AT_ONCE} at once, {options.adapters} adapters")
    for column in ("", "tokens/s", "×", "p99 first token, ms", "×", "p99 gap, ms", "×", "loads"):
        table.add_column(column, justify="left" if not column else "right")
    for load, rows in found.items():
        cells = []
        for figure in ("tokens_per_s", "ttft_p99_ms", "gap_p99_ms"):
            ratios = [
                row[figure] / base[figure] for row, base in zip(rows, found["base"], strict=True)
            ]
            cells += [f"{statistics.median(row[figure] for row in rows):.1f}"]
            cells += [f"{statistics.median(ratios):.2f}"]
        table.add_row(load, *cells, f"{statistics.median(row['loads'] for row in rows):.0f}")
    return table


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.served_adapters", description=__doc__)
    parser.add_argument("--adapters", type=at_least_one, default=200, help="in all (200)")
    parser.add_argument("--rank", type=at_least_one, default=16, help="of each (16)")
    parser.add_argument("--input-tokens", type=at_least_one, default=256, help="of a prompt (256)")
    parser.add_argument("--output-tokens", type=at_least_one, default=128, help="of each (128)")
    parser.add_argument("--requests", type=at_least_one, default=64, help="of a load (64)")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="of all loads (5)")
    parser.add_argument("--server", action="append", help="another server, with vLLM's routes")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("serve_flags", nargs="*", help="flags of tokend serve, after --")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
