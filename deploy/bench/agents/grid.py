"""The grid with a model: a daemon for each cell, one after the other, and agents that talk to it.

Capacity and working set are measured first, as for the simulation: with fcfs, a pool that holds all
that the load will ever say, and `TOGETHER` jobs always under way whose tools take no time; then at
90 % of that. Jobs and arrivals are the same in all cells of a seed; tools' times are scaled down.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from deploy.bench.agents.load import BASELINE, VARIANTS, agent_load, draw_jobs
from deploy.bench.agents.sessions import Done, Pace, play
from deploy.bench.servers import MeasuredDaemon, metrics_of
from deploy.bench.verdicts import quantile
from proto.errors import TokendError

# What a grid finds, simulated or with a model: cells, and what those of a seed are relative to.


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a seed's cells are relative to.

    unpressed_job_s_mean: under fcfs with a pool that holds everything, at 90 % of the capacity.
    """

    seed: int
    capacity_jobs_per_s: float
    working_set_blocks: int
    working_set_mean_blocks: float
    unpressed_job_s_mean: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A pool, arrivals and a policy. ratio_*: fcfs's time by this one's, of the same seed, pool and
    arrivals; more than 1 is better than fcfs. None where fcfs was not asked for.

    found_percent: of jobs' prompt tokens, in the pool or behind it, at a turn's first admission.
    other_s_*: completion of requests of others; 0 where there are none.
    pins_*: taken; found by the job's next turn; given back when their time was over; given back for
    want of blocks. num_failed: jobs that a failed request ended, which no job_s_* contains.
    """

    seed: int
    variant: str
    pool_percent: int
    rate_percent: int
    num_blocks: int
    jobs_per_s: float
    job_s_mean: float
    job_s_p50: float
    job_s_p99: float
    ttft_s_mean: float
    found_percent: float
    preemptions: int
    pins_taken: int
    pins_hit: int
    pins_expired: int
    pins_unpinned: int
    other_s_mean: float = 0.0
    other_s_p99: float = 0.0
    num_failed: int = 0
    ratio_mean: float | None = None
    ratio_p99: float | None = None

    @property
    def pool_and_rate(self) -> tuple[int, int]:
        """In percent; what policies are compared in."""
        return self.pool_percent, self.rate_percent


def compared(cells: Sequence[Cell]) -> list[Cell]:
    """Those of a seed, each with its ratios to fcfs's."""
    base = {each.pool_and_rate: each for each in cells if each.variant == BASELINE}
    return [_compared(each, base.get(each.pool_and_rate)) for each in cells]


def _compared(cell: Cell, base: Cell | None) -> Cell:
    if base is None:
        return cell
    return replace(
        cell,
        ratio_mean=base.job_s_mean / cell.job_s_mean,
        ratio_p99=base.job_s_p99 / cell.job_s_p99,
    )


TOGETHER: Final = 16
LOAD_OF_WORKING_SET: Final = 0.9
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
    """The daemons of one seed, and the sessions that are sent to them."""

    def __init__(self, grid: RealGrid, seed: int) -> None:
        self._grid = grid
        self._seed = seed
        self._shape = replace(agent_load(grid.num_jobs, seed), turns=grid.turns)
        self._jobs = draw_jobs(self._shape)

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
