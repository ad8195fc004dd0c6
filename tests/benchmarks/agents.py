"""How long agents' sessions take under each policy, simulated on a virtual clock.

The scheduler and the KV cache are the real ones.

    capacity      jobs/s that the server finishes when it always has work:
                  fcfs, `TOGETHER` jobs or other requests at any time, tools that take no
                  time, a pool that holds everything. It is the rate at which fcfs with the full
                  pool saturates.
    working set   the peak KV of live jobs, from a job's first arrival to its last token, time
                  with tools included, shared prefixes counted once: fcfs, arrivals at 90 % of
                  the capacity, a pool that holds everything.

A pool of 100 % just holds the KV of all jobs that will continue, if KV of finished jobs is evicted
first. fcfs evicts by age, so the KV of jobs that wait for a tool is evicted before it.
Both are measured for every seed before its cells; all cells of a seed have the same jobs and the
same arrivals (scaled at other rates), and no parameter is chosen by their outcome.

SmolLM2's step times are fitted to the fastest steps of each shape in a trace of the daemon
(`--sched-trace`) on two cores of a shared Xeon (Sapphire Rapids): 1, 2, 8 and 24 sequences that
decode, and chunks of 256 tokens. Those of the H100 are assumed, not measured: an 8B model in
bfloat16 (16 GB of weights and 128 KiB of KV a token at 3.35 TB/s, 16 GFLOP a token at 800 TFLOP/s,
50 GB/s from host memory). So are those of 70B: a model in bfloat16 with its layers on four H100s,
one after the other (141 GB of weights and 320 KiB of KV a token at 3.2 TB/s, 141 GFLOP a token at
700 TFLOP/s).
"""

import argparse
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from shutil import which
from typing import Final

import msgspec

from deploy.bench.options import BenchParser, at_least_one, writable, write
from proto.codec import changed, from_json, to_json_line
from proto.errors import ConfigError, ProtocolError, TokendError
from tests.benchmarks.agent_jobs.grid import LOAD_OF_WORKING_SET, GridCell, SeedBaseline, compared
from tests.benchmarks.agent_jobs.load import (
    BASELINE,
    VARIANTS,
    AgentLoad,
    PolicyVariant,
    agent_load,
)
from tests.benchmarks.command import from_zero_number, run
from tests.benchmarks.line_program import LineProgram
from tests.benchmarks.served_agents import add_grid, document, measured_table, show, show_progress
from tests.benchmarks.simulator.messages import (
    HostTier,
    ReplayAnswer,
    ReplayFigures,
    ReplayOrder,
    ReplayRecord,
    Spread,
    StepModel,
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Step times. block_ms: time to copy a block of 16 tokens to or from host memory."""

    step_model: StepModel
    block_ms: float
    max_num_batched_tokens: int


MACHINES: Final = {
    "smollm2-cpu": Machine(
        step_model=StepModel(
            base_ms=4.6, per_token_ms=0.154, per_row_ms=0.35, per_context_ms=0.0005
        ),
        block_ms=0.1,
        max_num_batched_tokens=256,
    ),
    "assumed-h100": Machine(
        step_model=StepModel(
            base_ms=6.0, per_token_ms=0.02, per_row_ms=0.01, per_context_ms=0.00004
        ),
        block_ms=0.042,
        max_num_batched_tokens=8192,
    ),
    "assumed-70b": Machine(
        step_model=StepModel(
            base_ms=48.0, per_token_ms=0.2, per_row_ms=0.04, per_context_ms=0.0001
        ),
        block_ms=0.105,
        max_num_batched_tokens=2048,
    ),
}


COMMAND: Final = (sys.executable, "-m", "tests.benchmarks.simulator.program")
TOGETHER: Final = 64
_LOW_PRIORITY: Final = ("nice", "-n", "10")
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, kw_only=True)
class Grid:
    """pools: percent of the working set. rates: of the capacity. host: percent, likewise.

    others: requests of others for each job. trace: whose steps tell how long steps take; "" takes
    the machine's.
    """

    machine: Machine
    num_jobs: int
    seeds: list[int]
    variants: list[str]
    pools: list[int]
    rates: list[int]
    host: int
    others: float = 0.0
    trace: str = ""

    def load(self, seed: int) -> AgentLoad:
        return agent_load(self.num_jobs, seed, self.others)


class Ledger:
    """Finished replays, kept in a file.

    path: an existing file is read and then appended to; "" keeps nothing beyond this run. Raises
    ConfigError if the file cannot be read or written, or has another content.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[bytes, ReplayFigures] = {}
        if not path:
            return
        try:
            with open(path, "ab+") as file:
                file.seek(0)
                whole, end, _ = file.read().rpartition(b"\n")
                for text in whole.splitlines():
                    line = from_json(text, ReplayRecord)
                    self._known[to_json_line(line.order)] = line.figures
                file.truncate(len(whole) + len(end))  # a partial last line of an interrupted run
        except OSError as error:
            raise ConfigError(f"--ledger: {path}: {error.strerror}", "ledger") from None
        except ProtocolError as error:
            raise ConfigError(
                f"--ledger: {path} is no file of replays: {error}", "ledger"
            ) from None

    def figures(self, order: ReplayOrder) -> ReplayFigures | None:
        """Return the figures of a finished replay, or None."""
        return self._known.get(to_json_line(order))

    def keep(self, order: ReplayOrder, figures: ReplayFigures) -> None:
        """Record a finished replay; called from any thread."""
        with self._lock:
            self._known[to_json_line(order)] = figures
            if self._path:
                with open(self._path, "ab") as file:
                    file.write(to_json_line(ReplayRecord(order, figures)))


class Finished:
    """Replays from a ledger only; runs nothing."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def play(self, order: ReplayOrder) -> ReplayFigures:
        """Return the figures; raise TokendError if the ledger lacks the replay."""
        known = self._ledger.figures(order)
        if known is None:
            raise TokendError("agents: the ledger has no capacity of this load yet")
        return known

    def play_all(
        self, orders: Sequence[ReplayOrder], done: Callable[[], None]
    ) -> list[ReplayFigures | None]:
        """Return figures in the order of `orders`, None for missing ones."""
        return [self._ledger.figures(order) for order in orders]


class Programs:
    """Replays in parallel processes at low priority. ledger: finished replays, not run again."""

    def __init__(self, stack: ExitStack, number: int, ledger: Ledger) -> None:
        self._ledger = ledger
        words = _LOW_PRIORITY if which(_LOW_PRIORITY[0]) else ()
        self._idle: queue.SimpleQueue[LineProgram] = queue.SimpleQueue()
        for _ in range(number):
            self._idle.put(stack.enter_context(LineProgram((*words, *COMMAND))))
        self._threads = stack.enter_context(ThreadPoolExecutor(number))

    def play(self, order: ReplayOrder) -> ReplayFigures:
        """Run a replay; raise TokendError if it fails."""
        known = self._ledger.figures(order)
        if known is not None:
            return known
        program = self._idle.get()
        try:
            answer = program.play(order, ReplayAnswer, "a replay of agents")
        finally:
            self._idle.put(program)
        if answer.figures is None:
            raise TokendError(f"agents: {answer.error}")
        self._ledger.keep(order, answer.figures)
        return answer.figures

    def play_all(
        self, orders: Sequence[ReplayOrder], done: Callable[[], None]
    ) -> list[ReplayFigures | None]:
        """Return all figures in the order of `orders`. done: called for every finished replay."""

        def one(order: ReplayOrder) -> ReplayFigures:
            figures = self.play(order)
            done()
            return figures

        return list(self._threads.map(one, orders))


def measure(grid: Grid, seed: int, programs: Programs | Finished) -> tuple[SeedBaseline, StepModel]:
    """Measure capacity, then working set, and the step model of all cells; raise TokendError."""
    load = grid.load(seed)
    order = _order(grid, load)
    most = TOGETHER * (load.longest // _BLOCK_SIZE + 1) + load.num_systems * load.system_tokens
    full = programs.play(changed(order, together=TOGETHER, num_blocks=most))
    capacity = load.num_jobs / full.seconds
    order = changed(order, step_model=full.step_model)
    calm = programs.play(changed(order, rate=LOAD_OF_WORKING_SET * capacity, policy=BASELINE))
    measured = SeedBaseline(
        seed=seed,
        capacity_jobs_per_s=capacity,
        working_set_blocks=calm.live_blocks_peak,
        working_set_mean_blocks=calm.live_blocks_mean,
        unpressed_job_s_mean=_jobs(grid.others, calm).mean,
        num_requests=calm.num_requests,
        prompt_tokens=calm.num_prompt_tokens,
        output_tokens=calm.output_tokens,
    )
    return measured, full.step_model


def cells(
    grid: Grid,
    measured: SeedBaseline,
    step_model: StepModel,
    programs: Programs | Finished,
    done: Callable[[], None],
) -> list[GridCell]:
    """Return the cells of a seed by pool, arrivals and policy; raise TokendError."""
    order = _order(grid, grid.load(measured.seed))
    places = [
        (pool, rate, name) for pool in grid.pools for rate in grid.rates for name in grid.variants
    ]
    blocks = measured.working_set_blocks
    tier = HostTier(num_blocks=blocks * grid.host // 100, block_ms=grid.machine.block_ms)
    orders = [
        _under(
            VARIANTS[name],
            changed(
                order,
                step_model=step_model,
                num_blocks=blocks * pool // 100 + 1,
                rate=measured.capacity_jobs_per_s * rate / 100,
            ),
            tier,
        )
        for pool, rate, name in places
    ]
    found = programs.play_all(orders, done)
    plain = [
        _cell(measured, place, order, figures)
        for place, order, figures in zip(places, orders, found, strict=True)
        if figures is not None
    ]
    return compared(plain)


def _under(variant: PolicyVariant, order: ReplayOrder, tier: HostTier) -> ReplayOrder:
    """Return the same order under the variant's policies."""
    return changed(
        order,
        policy=variant.policy,
        pin_policy=variant.pin_policy,
        tier=tier if variant.offloads else None,
    )


def _order(grid: Grid, load: AgentLoad) -> ReplayOrder:
    return ReplayOrder(
        path=grid.trace,
        load=load,
        step_model=None if grid.trace else grid.machine.step_model,
        max_num_batched_tokens=grid.machine.max_num_batched_tokens,
    )


def _cell(
    measured: SeedBaseline, place: tuple[int, int, str], order: ReplayOrder, figures: ReplayFigures
) -> GridCell:
    pool, rate, name = place
    assert order.num_blocks is not None
    assert order.load is not None
    jobs = _jobs(order.load.others_per_job, figures)
    return GridCell(
        seed=measured.seed,
        variant=name,
        pool_percent=pool,
        rate_percent=rate,
        num_blocks=order.num_blocks,
        jobs_per_s=order.rate,
        job_s_mean=jobs.mean,
        job_s_p50=jobs.p50,
        job_s_p99=jobs.p99,
        ttft_s_mean=figures.ttft.mean,
        found_percent=100
        * figures.num_found_tokens
        / (figures.num_prompt_tokens - figures.other_prompt_tokens),
        preemptions=figures.preemptions,
        pins_taken=figures.pins_taken,
        pins_hit=figures.pins_hit,
        pins_expired=figures.pins_expired,
        pins_unpinned=figures.pins_unpinned,
        other_s_mean=figures.others.mean,
        other_s_p99=figures.others.p99,
    )


def _jobs(others: float, figures: ReplayFigures) -> Spread:
    """Return the figures of agent jobs: all jobs, if there are no other requests."""
    return figures.agents if others else figures.jobs


def main(words: Sequence[str]) -> None:
    """Simulate, print the tables, write the figures."""
    options = _parse(words)
    grid = _grid(options)
    with writable("--json", options.json) as files:
        measured, step_models, found = _run(grid, options)
        rows = [
            asdict(each) | {"step_model": msgspec.to_builtins(model)}
            for each, model in zip(measured, step_models, strict=True)
        ]
        machine = asdict(grid.machine) | {
            "step_model": msgspec.to_builtins(grid.machine.step_model)
        }
        settings = {each.name: getattr(grid, each.name) for each in fields(grid)}
        settings["machine"] = machine
        write(files, document("python -m tests.benchmarks.agents", settings, rows, found))
    summary = measured_table(grid.num_jobs, measured)
    model = step_models[0]
    summary.caption = (
        f"{summary.caption}; a step takes {model.base_ms:.4g} ms + "
        f"{model.per_token_ms:.4g} a token + "
        f"{model.per_row_ms:.4g} a sequence + {model.per_context_ms:.4g} a token of context"
    )
    show(options, summary, found)


def _run(
    grid: Grid, options: argparse.Namespace
) -> tuple[list[SeedBaseline], list[StepModel], list[GridCell]]:
    """Run the grid, seed by seed."""
    measured: list[SeedBaseline] = []
    step_models: list[StepModel] = []
    found: list[GridCell] = []
    with ExitStack() as stack:
        ledger = Ledger(options.ledger)
        programs = (
            Finished(ledger) if options.finished else Programs(stack, options.processes, ledger)
        )
        num_cells = len(grid.seeds) * len(grid.pools) * len(grid.rates) * len(grid.variants)
        progress, task = show_progress(stack, num_cells)
        for seed in grid.seeds:
            base, model = measure(grid, seed, programs)
            measured.append(base)
            step_models.append(model)
            found += cells(grid, base, model, programs, lambda: progress.advance(task))
    return measured, step_models, found


def _grid(options: argparse.Namespace) -> Grid:
    return Grid(
        machine=MACHINES[options.machine],
        num_jobs=options.jobs or 1000,
        seeds=options.seeds or [0, 1, 2],
        variants=options.policies,
        pools=options.pools or [25, 50, 100],
        rates=options.rates or [70, 90, 110],
        host=options.host,
        others=options.others,
        trace=options.steps_of or "",
    )


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.agents", description=__doc__)
    add_grid(parser, {"jobs": "1000", "seeds": "0,1,2", "pools": "25,50,100", "rates": "70,90,110"})
    add = parser.add_argument
    processes = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
    add(
        "--host",
        type=at_least_one,
        default=100,
        metavar="P",
        help="+host: %% of the working set",
    )
    add(
        "--others",
        type=from_zero_number,
        default=0.0,
        metavar="X",
        help="requests of others that come for each job, of 1,000 tokens in the mean (0)",
    )
    add(
        "--machine",
        choices=list(MACHINES),
        default="smollm2-cpu",
        help="step times (smollm2-cpu)",
    )
    add("--steps-of", metavar="TRACE", help="fit the step times to this trace instead")
    add(
        "--ledger",
        default="",
        metavar="FILE",
        help="append finished replays to this file, and reuse those that it contains",
    )
    add("--finished", action="store_true", help="show what the ledger has, and play nothing")
    add(
        "--processes",
        type=at_least_one,
        default=processes or 1,
        metavar="N",
        help="replays at once, at low priority (one for each core)",
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
