"""The simulated grid: pools by arrivals by policies, each cell a replay in a process of its own.

    capacity      jobs/s that the server finishes when there is always somebody to compute for:
                  fcfs, `TOGETHER` jobs or requests of others at any time, tools that take no
                  time, a pool that holds everything. It is the rate at which fcfs with the full
                  pool saturates.
    working set   the most KV that jobs under way have at once, from a job's first arrival to its
                  last token, their time with tools included, what they share counted once: fcfs,
                  arrivals at 90 % of the capacity, a pool that holds everything.

In a pool of 100 % the KV of all who come back would just have room, if that of jobs which are over
went first. Under fcfs it goes by age, so the KV of who waits for a tool goes before it.
Both are measured for each seed before its cells; all cells of a seed have the same jobs and the
same arrivals (at another rate, closer by a factor), and nothing is chosen by their outcome.
"""

import queue
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from shutil import which
from typing import Final

from deploy.loadtest.agents.ledger import Ledger
from deploy.loadtest.agents.machines import BASELINE, VARIANTS, Machine, agent_load
from deploy.loadtest.agents.rows import Cell, Measured, compared
from deploy.loadtest.line_program import LineProgram
from proto.codec import changed
from proto.errors import TokendError
from proto.replay import (
    AgentLoad,
    HostTier,
    ReplayAnswer,
    ReplayFigures,
    ReplayOrder,
    Spread,
)

COMMAND: Final = (sys.executable, "-P", "-m", "engine_core.replay")
TOGETHER: Final = 64
LOAD_OF_WORKING_SET: Final = 0.9
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


class Finished:
    """Replays that are in a ledger; nothing is played."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def play(self, order: ReplayOrder) -> ReplayFigures:
        """Raises TokendError where it is not there."""
        known = self._ledger.figures(order)
        if known is None:
            raise TokendError("tokend bench agents: the ledger has no capacity of this load yet")
        return known

    def play_all(
        self, orders: Sequence[ReplayOrder], done: Callable[[], None]
    ) -> list[ReplayFigures | None]:
        """In the order of the orders; None where one is not there."""
        return [self._ledger.figures(order) for order in orders]


class Programs:
    """Replays at low priority, so many at once. ledger: those in it are not played again."""

    def __init__(self, stack: ExitStack, number: int, ledger: Ledger) -> None:
        self._ledger = ledger
        words = _LOW_PRIORITY if which(_LOW_PRIORITY[0]) else ()
        self._idle: queue.SimpleQueue[LineProgram] = queue.SimpleQueue()
        for _ in range(number):
            self._idle.put(stack.enter_context(LineProgram((*words, *COMMAND))))
        self._threads = stack.enter_context(ThreadPoolExecutor(number))

    def play(self, order: ReplayOrder) -> ReplayFigures:
        """Raises TokendError where the replay cannot be made."""
        known = self._ledger.figures(order)
        if known is not None:
            return known
        program = self._idle.get()
        try:
            answer = program.play(order, ReplayAnswer, "a replay of agents")
        finally:
            self._idle.put(program)
        if answer.figures is None:
            raise TokendError(f"tokend bench agents: {answer.error}")
        self._ledger.keep(order, answer.figures)
        return answer.figures

    def play_all(
        self, orders: Sequence[ReplayOrder], done: Callable[[], None]
    ) -> list[ReplayFigures | None]:
        """In the order of the orders, none missing; done: called for each as it comes."""

        def one(order: ReplayOrder) -> ReplayFigures:
            figures = self.play(order)
            done()
            return figures

        return list(self._threads.map(one, orders))


def measure(grid: Grid, seed: int, programs: Programs | Finished) -> Measured:
    """Capacity, then working set; raises TokendError."""
    load = grid.load(seed)
    order = _order(grid, load)
    most = TOGETHER * (load.longest // _BLOCK_SIZE + 1) + load.num_systems * load.system_tokens
    full = programs.play(changed(order, together=TOGETHER, num_blocks=most))
    capacity = load.num_jobs / full.seconds
    order = changed(order, step_model=full.step_model)
    calm = programs.play(changed(order, rate=LOAD_OF_WORKING_SET * capacity, policy=BASELINE))
    return Measured(
        seed=seed,
        capacity_jobs_per_s=capacity,
        working_set_blocks=calm.live_blocks_peak,
        working_set_mean_blocks=calm.live_blocks_mean,
        unpressed_job_s_mean=_jobs(grid.others, calm).mean,
        num_requests=calm.num_requests,
        prompt_tokens=calm.num_prompt_tokens,
        output_tokens=calm.output_tokens,
        step_model=full.step_model,
    )


def cells(
    grid: Grid, measured: Measured, programs: Programs | Finished, done: Callable[[], None]
) -> list[Cell]:
    """Those of a seed: pools, in them arrivals, in them policies; raises TokendError."""
    order = _order(grid, grid.load(measured.seed))
    places = [
        (pool, rate, name) for pool in grid.pools for rate in grid.rates for name in grid.variants
    ]
    blocks = measured.working_set_blocks
    tier = HostTier(num_blocks=blocks * grid.host // 100, block_ms=grid.machine.block_ms)
    orders = [
        VARIANTS[name].order(
            changed(
                order,
                step_model=measured.step_model,
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


def _order(grid: Grid, load: AgentLoad) -> ReplayOrder:
    return ReplayOrder(
        path=grid.trace,
        load=load,
        step_model=None if grid.trace else grid.machine.step_model,
        max_num_batched_tokens=grid.machine.max_num_batched_tokens,
    )


def _cell(
    measured: Measured, place: tuple[int, int, str], order: ReplayOrder, figures: ReplayFigures
) -> Cell:
    pool, rate, name = place
    assert order.num_blocks is not None
    assert order.load is not None
    jobs = _jobs(order.load.others_per_job, figures)
    return Cell(
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
    """Those of agents: all, where nobody else asks for anything."""
    return figures.agents if others else figures.jobs
