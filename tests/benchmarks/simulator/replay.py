"""Replay a trace's requests with other policies.

The real scheduler runs in a separate program (`program.py`); the flags and the table are here.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Final, get_args, get_type_hints

from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser, at_least_one, from_zero, positive, writable, write
from proto.codec import changed, to_json
from proto.errors import ConfigError
from proto.settings.config import PARTS, SchedulerConfig
from tests.benchmarks.agent_jobs.load import AgentLoad
from tests.benchmarks.command import run
from tests.benchmarks.line_program import LineProgram
from tests.benchmarks.simulator.messages import (
    ReplayAnswer,
    ReplayFigures,
    ReplayOrder,
    Spread,
    StepModel,
    Verdict,
)

POLICIES: Final = PARTS["scheduling_policy"][1]
_PIN_POLICIES: Final[tuple[str, ...]] = get_args(get_type_hints(SchedulerConfig)["pin_policy"])
_COMMAND: Final = (sys.executable, "-m", "tests.benchmarks.simulator.program")
_LOAD = AgentLoad(num_jobs=1000)


def main(words: Sequence[str]) -> int:
    """Print the table; return 1 if --verify finds a difference."""
    options = _parse(words)
    order = _order(options)
    with writable("--json", options.json) as files, LineProgram(_COMMAND) as program:
        if options.verify:
            return _show_verdict(_ask(program, changed(order, verify=True)).verdict)
        found: list[ReplayFigures] = []
        for policy in options.policy or [None]:
            figures = _ask(program, changed(order, policy=policy)).figures
            assert figures is not None, "the answer has figures"
            found.append(figures)
        write(files, _document(found))
    _show(Console(width=118), found)
    return 0


def _ask(program: LineProgram, order: ReplayOrder) -> ReplayAnswer:
    answer = program.play(order, ReplayAnswer, order.path or "a drawn load")
    if answer.error:
        raise ConfigError(f"python -m tests.benchmarks.simulator.replay: {answer.error}")
    return answer


def _show_verdict(verdict: Verdict | None) -> int:
    assert verdict is not None, "the answer has a verdict"
    print(
        f"{verdict.num_steps} steps, {verdict.num_admitted} admissions and "
        f"{verdict.num_preempted} preemptions are the same"
    )
    if verdict.difference:
        print(f"then they differ: {verdict.difference}")
    return 1 if verdict.difference else 0


def _show(console: Console, found: Sequence[ReplayFigures]) -> None:
    table = Table(title="seconds on the replay's clock: mean, median, 99th percentile")
    table.add_column("")
    for each in found:
        table.add_column(each.policy, justify="right")
    for name, texts in _rows(found):
        table.add_row(name, *texts)
    console.print(table)
    console.print(_notes(found[0]), markup=False, highlight=False)


def _rows(found: Sequence[ReplayFigures]) -> list[tuple[str, list[str]]]:
    rows = [
        (f"{title}, {part}", [f"{getattr(getattr(each, name), part):.3f}" for each in found])
        for name, title in (("jobs", "job"), ("completion", "request"), ("ttft", "first token"))
        for part in Spread.__struct_fields__
    ]
    rows.append(("preemptions", [str(each.preemptions) for each in found]))
    rows.append(("prefix cache hits", [f"{each.hit_rate:.1%}" for each in found]))
    rows.append(("steps", [str(each.num_steps) for each in found]))
    rows.append(("seconds in all", [f"{each.seconds:.1f}" for each in found]))
    return rows


def _notes(figures: ReplayFigures) -> str:
    model = figures.step_model
    notes = (
        f"{figures.num_requests} requests of {figures.num_jobs} jobs, "
        f"{figures.output_tokens} output tokens; a step takes {model.base_ms:.4g} ms + "
        f"{model.per_token_ms:.4g} a token + {model.per_row_ms:.4g} a sequence + "
        f"{model.per_context_ms:.4g} a token of context"
    )
    if figures.num_left_out:
        notes += f"; {figures.num_left_out} requests are left out: the trace ends before they do"
    return notes


def _document(found: Sequence[ReplayFigures]) -> str:
    """Return a list with an object for each policy."""
    return "[\n" + ",\n".join(to_json(each).decode() for each in found) + "\n]\n"


def _order(options: argparse.Namespace) -> ReplayOrder:
    if bool(options.file) is options.synthetic:
        raise ConfigError(
            "python -m tests.benchmarks.simulator.replay takes either a FILE or --synthetic"
        )
    if options.record and len(options.policy or ()) > 1:
        raise ConfigError("--record takes one --policy: each replay has a trace of its own")
    load = None
    if options.synthetic:
        if options.step_ms is None:
            raise ConfigError("--synthetic needs --step-ms: there are no steps to learn from")
        load = AgentLoad(
            num_jobs=options.jobs, seed=options.seed, jobs_per_second=options.jobs_per_second
        )
    return ReplayOrder(
        path=options.file or "",
        load=load,
        pin_policy=options.pin_policy,
        rate=options.rate,
        one_tenant=options.one_tenant,
        open_loop=options.open_loop,
        tape_path=options.record or "",
        num_blocks=options.num_gpu_blocks_override,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        step_model=options.step_ms,
    )


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(
                f"--policy: there is no policy {name!r}; there are: {', '.join(POLICIES)}", "policy"
            )
    return names


def _step_model(text: str) -> StepModel:
    base, token, row, context = (float(each) for each in text.split(","))
    if min(base, token, row, context) < 0 or not 0 < base + token + row < float("inf"):
        raise ValueError
    return StepModel(base_ms=base, per_token_ms=token, per_row_ms=row, per_context_ms=context)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(
        prog="python -m tests.benchmarks.simulator.replay",
        description="Play the arrivals of a trace through the scheduler, on a clock of its own. "
        "A job's next turn comes as long after the end of the turn before as it did.",
        epilog="A step takes as long as a model fitted to the trace's own steps says.",
    )
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="a trace, of tokend serve --sched-trace FILE")
    add(
        "--policy",
        type=_policies,
        metavar="NAME,…",
        help=f"side by side: {', '.join(POLICIES)}; by default that of the trace",
    )
    add("--pin-policy", choices=_PIN_POLICIES, help="of continuum; by default that of the trace")
    add("--verify", action="store_true", help="follow the trace and compare each decision instead")
    add("--json", metavar="FILE", help="write the figures there, too")
    add("--record", metavar="TRACE", help="write a trace of the replay, of one policy, to look at")
    add("--rate", type=positive, default=1.0, metavar="X", help="factor of the arrival rate")
    add("--open-loop", action="store_true", help="turns of a job arrive when they did")
    add("--one-tenant", action="store_true", help="as if all requests were one tenant's")
    add("--num-gpu-blocks-override", type=at_least_one, metavar="N", help="blocks of the pool")
    add("--max-num-seqs", type=at_least_one, metavar="N", help="instead of the trace's")
    add("--max-num-batched-tokens", type=at_least_one, metavar="N", help="instead of the trace's")
    add(
        "--step-ms",
        type=_step_model,
        metavar="A,B,C,D",
        help="a step takes A + B a token + C a sequence + D a token of context, in ms",
    )
    add("--synthetic", action="store_true", help="draw jobs of agents instead of reading a trace")
    add("--jobs", type=at_least_one, default=_LOAD.num_jobs, metavar="N", help="of those (1000)")
    add("--seed", type=from_zero, default=_LOAD.seed, metavar="N", help="of the draws (0)")
    add(
        "--jobs-per-second",
        type=positive,
        default=_LOAD.jobs_per_second,
        metavar="X",
        help="arrivals of jobs (1)",
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
