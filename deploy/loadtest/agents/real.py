"""The grid with a model: a daemon for each cell, one after the other, and agents that talk to it.

Capacity and working set are measured first, as for the simulation: with fcfs, a pool that holds all
that the load will ever say, and `TOGETHER` jobs always under way whose tools take no time; then at
90 % of that. Jobs and arrivals are the same in all cells of a seed; tools' times are scaled down.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from deploy.loadtest.agents.grid import COMMAND, LOAD_OF_WORKING_SET
from deploy.loadtest.agents.machines import BASELINE, VARIANTS, agent_load
from deploy.loadtest.agents.players import Done, Pace, play
from deploy.loadtest.agents.rows import Cell, Measured, compared
from deploy.loadtest.daemon import MeasuredDaemon, metrics_of
from deploy.loadtest.line_program import LineProgram
from deploy.loadtest.summary import quantile
from proto.codec import changed
from proto.errors import TokendError
from proto.replay import AgentJob, AgentLoad, ReplayAnswer, ReplayOrder

TOGETHER: Final = 16
_BLOCK_SIZE: Final = 16
_HOST_BYTES: Final = 4 << 30
_TIER: Final = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": _HOST_BYTES},
}
_UNLIMITED: Final = ("--max-num-queued-reqs", "0", "--max-num-queued-tokens", "0")


@dataclass(frozen=True, kw_only=True)
class RealGrid:
    """pools: percent of the working set. rates: of the capacity. turns: of a job, mean.

    tool_scale: factor of tools' times.
    """

    num_jobs: int
    seeds: list[int]
    variants: list[str]
    pools: list[int]
    rates: list[int]
    turns: float
    tool_scale: float
    serve_flags: list[str]


class Daemons:
    """Those of one seed, and the jobs for them; raises TokendError where none can be drawn."""

    def __init__(self, grid: RealGrid, seed: int) -> None:
        self._grid = grid
        self._seed = seed
        self._shape = changed(agent_load(grid.num_jobs, seed), turns=grid.turns)
        self._jobs = _drawn(self._shape)

    def measure(self) -> Measured:
        """Capacity, then working set; raises TokendError, also where a request failed."""
        grid = self._grid
        everything = self._num_blocks_ever()
        closed = Pace(rate=float("inf"), at_once=TOGETHER, tool_scale=0.0)
        full, _ = self._run(BASELINE, everything, closed)
        capacity = grid.num_jobs / full.seconds
        calm, _ = self._run(BASELINE, everything, self._pace(LOAD_OF_WORKING_SET * capacity))
        if full.num_failed or calm.num_failed:
            raise TokendError("tokend bench agents: requests failed while nothing pressed")
        return Measured(
            seed=self._seed,
            capacity_jobs_per_s=capacity,
            working_set_blocks=calm.live_blocks_peak,
            working_set_mean_blocks=calm.live_blocks_mean,
            unpressed_job_s_mean=fmean(calm.job_seconds),
            num_requests=calm.num_requests,
            prompt_tokens=calm.prompt_tokens,
            output_tokens=calm.output_tokens,
            step_model=None,
        )

    def cells(self, measured: Measured, done: Callable[[Cell], None]) -> list[Cell]:
        """Pools, in them arrivals, in them policies; `done` hears of each; raises TokendError.

        Also for a pool in which the longest job alone has no room, before any cell.
        """
        needed, pool = self._num_blocks_longest(), min(self._grid.pools)
        if needed > _num_blocks(measured, pool):
            raise TokendError(
                f"tokend bench agents: --pools: {pool} % of the working set is "
                f"{_num_blocks(measured, pool)} blocks, and the longest job alone needs {needed}"
            )
        plain = []
        for pool in self._grid.pools:
            for rate in self._grid.rates:
                for name in self._grid.variants:
                    plain.append(self._cell(measured, pool, rate, name))
                    done(plain[-1])
        return compared(plain)

    def _cell(self, measured: Measured, pool: int, rate: int, name: str) -> Cell:
        num_blocks = _num_blocks(measured, pool)
        jobs_per_s = measured.capacity_jobs_per_s * rate / 100
        done, metrics = self._run(name, num_blocks, self._pace(jobs_per_s))
        if not done.job_seconds:
            raise TokendError(f"tokend bench agents: not one job came to its end under {name}")
        return Cell(
            seed=self._seed,
            variant=name,
            pool_percent=pool,
            rate_percent=rate,
            num_blocks=num_blocks,
            jobs_per_s=jobs_per_s,
            job_s_mean=fmean(done.job_seconds),
            job_s_p50=quantile(done.job_seconds, 0.5),
            job_s_p99=quantile(done.job_seconds, 0.99),
            ttft_s_mean=metrics["vllm:time_to_first_token_seconds_sum"]
            / metrics["vllm:time_to_first_token_seconds_count"],
            found_percent=100 * done.found_tokens / done.prompt_tokens,
            preemptions=round(metrics["vllm:num_preemptions_total"]),
            pins_taken=round(metrics["tokend:pins_taken_total"]),
            pins_hit=round(metrics["tokend:pins_hit_total"]),
            pins_expired=round(metrics["tokend:pins_expired_total"]),
            pins_unpinned=round(metrics["tokend:pins_given_up_total"]),
            num_failed=done.num_failed,
        )

    def _run(self, name: str, num_blocks: int, pace: Pace) -> tuple[Done, dict[str, float]]:
        """All jobs against a daemon of their own; with some of its metrics at the end."""
        flags = [*VARIANTS[name].flags(), "--num-gpu-blocks-override", str(num_blocks)]
        if VARIANTS[name].has_tier:
            flags += ["--kv-transfer-config", json.dumps(_TIER)]
        with MeasuredDaemon([*flags, *_UNLIMITED, *self._grid.serve_flags]) as daemon:
            done = asyncio.run(play(daemon.url, self._jobs, self._shape, pace))
            return done, dict(zip(_METRICS, metrics_of(daemon.url, *_METRICS), strict=True))

    def _pace(self, jobs_per_s: float) -> Pace:
        """They are drawn at one a second."""
        grid = self._grid
        return Pace(rate=jobs_per_s, at_once=grid.num_jobs, tool_scale=grid.tool_scale)

    def _num_blocks_ever(self) -> int:
        """Of all that is ever said, and one that a pool keeps for itself."""
        own = sum(turn.new_tokens + turn.output_tokens for job in self._jobs for turn in job.turns)
        shared = self._shape.num_systems * self._shape.system_tokens
        return (own + shared) // _BLOCK_SIZE + len(self._jobs) + 1

    def _num_blocks_longest(self) -> int:
        """Of the job that says most, and one that a pool keeps for itself."""
        own = max(
            sum(turn.new_tokens + turn.output_tokens for turn in job.turns) for job in self._jobs
        )
        return -(-(self._shape.system_tokens + own) // _BLOCK_SIZE) + 1


def _num_blocks(measured: Measured, pool: int) -> int:
    """pool: percent of the working set."""
    return measured.working_set_blocks * pool // 100 + 1


_METRICS: Final = (
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:num_preemptions_total",
    "tokend:pins_taken_total",
    "tokend:pins_hit_total",
    "tokend:pins_expired_total",
    "tokend:pins_given_up_total",
)


def _drawn(shape: AgentLoad) -> list[AgentJob]:
    with LineProgram(COMMAND) as program:
        answer = program.play(ReplayOrder(load=shape, draw=True), ReplayAnswer, "a drawn load")
    if not answer.jobs:
        raise TokendError(f"tokend bench agents: {answer.error or 'no jobs'}")
    return answer.jobs
