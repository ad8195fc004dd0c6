"""`tokend bench compare`: one setting against another, in turns, on one machine.

Both daemons run all the time and one of them works: a round gives each the same small loads,
and who goes first alternates. A machine that is slower for a minute is slower for both, so the
ratio of each round says more than the figures do.
"""

import argparse
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from deploy.loadtest.client import Figures, Load, run_load
from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.options import Parser, at_least_one

WARM_UP: Final = Load(4, 4, 64, 16, seed=1)
FIRST_SEED: Final = 100


@dataclass(frozen=True)
class Pairs:
    """A figure of both settings, one pair a round; at least one."""

    ours: list[float]
    others: list[float]

    def ratios(self) -> list[float]:
        """Of the other setting to the first."""
        return [other / ours for ours, other in zip(self.ours, self.others, strict=True)]

    def difference(self) -> float:
        """Median of what the other setting has more."""
        return statistics.median(
            other - ours for ours, other in zip(self.ours, self.others, strict=True)
        )

    def row(self) -> list[str]:
        """Medians of both, median difference, median ratio, lowest and highest ratio."""
        ratios = self.ratios()
        return [
            f"{statistics.median(self.ours):.2f}",
            f"{statistics.median(self.others):.2f}",
            f"{self.difference():+.2f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
        ]


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    options = _parse(words)
    other_flags = shlex.split(options.other)
    with (
        MeasuredDaemon(options.serve_flags) as ours,
        MeasuredDaemon([*options.serve_flags, *other_flags]) as other,
    ):
        rounds = _play(options, ours.url, other.url)
    Console(width=120).print(_table(options, rounds))


def _play(options: argparse.Namespace, ours: str, other: str) -> list[tuple[Figures, Figures]]:
    """The rounds of both settings: (first, other)."""
    for url in (ours, other):
        run_load(url, options.model, WARM_UP)
    rounds = []
    for i in range(options.rounds):
        turns = {url: _round(options, url, i) for url in ((ours, other), (other, ours))[i % 2]}
        rounds.append((turns[ours], turns[other]))
    return rounds


def _round(options: argparse.Namespace, url: str, i: int) -> Figures:
    """Prompts are new in each round, so that no prefix is in a cache."""
    size = (options.input_tokens, options.output_tokens)
    return Figures(
        run_load(url, options.model, Load(1, 1, *size, seed=FIRST_SEED + 2 * i)),
        run_load(
            url,
            options.model,
            Load(options.concurrency, options.concurrency, *size, seed=FIRST_SEED + 2 * i + 1),
        ),
    )


def _table(options: argparse.Namespace, rounds: Sequence[tuple[Figures, Figures]]) -> Table:
    flags = shlex.join(options.serve_flags) or "default settings"
    table = Table(
        title=f"{flags}, and with {options.other}: {len(rounds)} rounds of "
        f"{options.input_tokens} tokens in, {options.output_tokens} out"
    )
    for column in ("figure", "without", "with", "difference", "with / without", "in the rounds"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    figures: list[tuple[str, Callable[[Figures], float]]] = [
        ("first token alone, ms", lambda each: each.alone.first_token_ms),
        ("time per token alone, ms", lambda each: each.alone.per_token_ms),
        (
            f"time per token, {options.concurrency} at once, ms",
            lambda each: each.together.per_token_ms,
        ),
        (
            f"tokens/s, {options.concurrency} at once",
            lambda each: each.together.output_tokens_per_second,
        ),
    ]
    for name, figure in figures:
        pairs = Pairs([figure(a) for a, _ in rounds], [figure(b) for _, b in rounds])
        table.add_row(name, *pairs.row())
    return table


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="tokend bench compare", description=__doc__)
    parser.add_argument("--other", required=True, help='flags of the second: "--async-scheduling"')
    parser.add_argument("--model", default="smollm2-135m-instruct", help="served model")
    parser.add_argument("--rounds", type=at_least_one, default=10)
    parser.add_argument("--concurrency", type=at_least_one, default=16)
    parser.add_argument("--input-tokens", type=at_least_one, default=64)
    parser.add_argument("--output-tokens", type=at_least_one, default=48)
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of both daemons")
    return parser.parse_args(words)
