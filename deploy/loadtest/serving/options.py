"""The command line of `tokend bench serve`."""

import argparse
import json
from collections.abc import Sequence
from typing import Any, Final

from deploy.loadtest.datasets.options import add_dataset, add_sizes
from deploy.loadtest.options import (
    Parser,
    at_least_one,
    from_zero,
    positive,
    several_counts,
    several_rates,
    share,
)
from proto.errors import ConfigError

_LIMITS: Final = ("ttft", "tpot", "e2el")


def parse(words: Sequence[str], description: str) -> argparse.Namespace:
    """Raises ConfigError for words that do not go together."""
    parser = Parser(
        prog="tokend bench serve",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="of the server: http://127.0.0.1:8000")
    parser.add_argument("--model", help="by default the first that the server names")
    parser.add_argument("--api-key", default="")
    add_sizes(parser, 256, 128)
    add_dataset(parser)
    _add_pace(parser.add_argument_group("how fast, and how much"))
    _add_rest(parser.add_argument_group("what is made of it"))
    options = parser.parse_args(words)
    if len(options.concurrency or ()) > 1 and (options.request_rate or options.trace):
        raise ConfigError("one --concurrency at most limits an open loop")
    if options.request_rate and options.trace:
        raise ConfigError("--trace has time stamps of its own: no --request-rate")
    return options


def _goodput(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in _LIMITS:
        raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(_LIMITS)}, as in ttft:500")
    return name, positive(limit)


def _burstiness(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise ValueError
    return number


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError
    return found


def _add_pace(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--concurrency",
        type=several_counts,
        metavar="N[,N...]",
        help="closed loop: so many at once, one value after the other; 1..32 doubles (16); "
        "with --request-rate or --trace: at most so many under way",
    )
    group.add_argument(
        "--request-rate",
        type=several_rates,
        metavar="R[,R...]",
        help="open loop: sessions that begin in a second, one value after the other",
    )
    group.add_argument(
        "--burstiness",
        type=_burstiness,
        default=1.0,
        help="shape of the gamma distributed gaps; 1: Poisson, inf: a fixed beat (1)",
    )
    group.add_argument(
        "--ramp-seconds",
        type=positive,
        default=0.0,
        help="clients of a run join one by one within this time, or its rate grows to what it is",
    )
    group.add_argument("--max-requests", type=at_least_one, help="of each run")
    group.add_argument("--duration", type=positive, help="seconds in which a run sends requests")
    group.add_argument("--rounds", type=at_least_one, default=1, help="of all runs (1)")
    group.add_argument(
        "--warm-ups", type=from_zero, default=4, help="short requests before all that (4)"
    )
    group.add_argument(
        "--timeout", type=positive, default=600.0, help="seconds for an answer (600)"
    )


def _add_rest(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--temperature", type=float, default=0.0, help="(0)")
    group.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let answers end before they have all their tokens",
    )
    group.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="fields of every request"
    )
    group.add_argument(
        "--check-share",
        type=share,
        default=0.05,
        help="part of the sessions that is the same in every run, greedy, and whose answers "
        "are compared (0.05)",
    )
    group.add_argument(
        "--goodput",
        type=_goodput,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits of a good request: ttft:500 tpot:50 e2el:10000",
    )
    group.add_argument("--json", metavar="FILE", help="write the figures there, too")
    group.add_argument("--html", metavar="FILE", help="write curves there")
