"""`make bench`: start, first token, time per token and throughput, beside a peer.

Starts a daemon of its own and loads it in a closed loop. With --peer-url the same
load goes to another OpenAI-compatible server of this machine in the same run.
"""

import argparse

from rich.console import Console
from rich.table import Table

from deploy.loadtest.client import Figures, Load, run_load
from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.processes import Usage, usage_by_title

CPU_BUDGET_MS = 1.5
"""What engine and front end together may take of a step at 16 at once."""


def main() -> None:
    """Measure and print the tables."""
    options = _parse()
    console = Console(width=110)
    with MeasuredDaemon(options.serve_flags) as daemon:
        model = options.model
        _warm_up(daemon.url, model)
        alone = run_load(daemon.url, model, Load(5, 1, 128, 128, seed=1))
        before, steps_before = usage_by_title(daemon.pid), daemon.num_steps()
        together = run_load(daemon.url, model, _together(options))
        after, num_steps = usage_by_title(daemon.pid), daemon.num_steps() - steps_before
        console.print(f"start to ready: {daemon.seconds_to_ready:.1f} s")
    console.print(_processes(options, before, after, num_steps))
    console.print(_comparison(options, Figures(alone, together)))


def _processes(
    options: argparse.Namespace,
    before: dict[str, Usage],
    after: dict[str, Usage],
    num_steps: float,
) -> Table:
    table = Table(title=f"processes, {options.concurrency} at once, {num_steps:.0f} steps")
    for column in ("process", "CPU ms a step", "of the budget", "resident MiB"):
        table.add_column(column, justify="left" if column == "process" else "right")
    serving = 0.0
    for title in sorted(after):
        per_step = 1e3 * (after[title].cpu_seconds - before[title].cpu_seconds) / num_steps
        if "api" in title or "engine" in title:
            serving += per_step
        table.add_row(title, f"{per_step:.2f}", "", f"{after[title].resident_mib:.0f}")
    table.add_row("engine + front end", f"{serving:.2f}", f"{serving / CPU_BUDGET_MS:.2f}", "")
    return table


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="served model")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--peer-url", help="an OpenAI-compatible server on this machine")
    parser.add_argument("--peer-model", help="its name of the same model")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args()


def _together(options: argparse.Namespace) -> Load:
    return Load(options.requests, options.concurrency, 256, 128, seed=2)


def _warm_up(url: str, model: str) -> None:
    run_load(url, model, Load(4, 4, 64, 16, seed=3))


def _comparison(options: argparse.Namespace, ours: Figures) -> Table:
    table = Table(title="256 tokens in, 128 out together; 128 in, 128 out alone")
    for column in ("figure", "tokend", "peer", "tokend / peer"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    peer = _peer(options)
    rows = [
        ("time to first token alone, ms", lambda x: x.alone.first_token_ms),
        ("time per token alone, ms", lambda x: x.alone.per_token_ms),
        (
            f"output tokens/s, {options.concurrency} at once",
            lambda x: x.together.output_tokens_per_second,
        ),
    ]
    for name, figure in rows:
        others = [figure(each) for each in peer]
        ratios = [f"{figure(ours) / other:.2f}" for other in others]
        table.add_row(name, f"{figure(ours):.1f}", *[f"{other:.1f}" for other in others], *ratios)
    return table


def _peer(options: argparse.Namespace) -> list[Figures]:
    """The peer's figures under the same loads; empty when there is no peer."""
    if not options.peer_url:
        return []
    model = options.peer_model or options.model
    _warm_up(options.peer_url, model)
    return [
        Figures(
            run_load(options.peer_url, model, Load(5, 1, 128, 128, seed=1)),
            run_load(options.peer_url, model, _together(options)),
        )
    ]


if __name__ == "__main__":
    main()
