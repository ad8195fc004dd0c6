"""The grid of the benchmark `served_agents`: a daemon for each cell, one after the other.

Capacity and working set are measured first, with fcfs and a pool that holds the KV of all jobs:
`CONCURRENCY` jobs at the same time with instant tools, then 90 % of that rate. Jobs and arrivals
are the same in all cells of a seed; durations of tools are scaled down.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from deploy.bench.limits import quantile
from deploy.bench.servers import MeasuredDaemon, metrics_of
from proto.errors import TokendError
from tests.benchmarks.agent_jobs.load import BASELINE, VARIANTS, agent_load, draw_jobs
from tests.benchmarks.agent_jobs.sessions import AgentPace, AgentRunResult, run_agents


@dataclass(frozen=True, kw_only=True)
class SeedBaseline:
    """Capacity and working set of a seed; the cells are relative to them.

    unpressed_job_s_mean: job duration with fcfs and a sufficient pool, at 90 % of the capacity.
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
class GridCell:
    """Results for one pool size, arrival rate and policy.

    job_s_*: durations of completed jobs. num_failed: jobs with a failed request.
    found_percent: share of prompt tokens found in the cache or in host memory.
    other_s_*: durations of requests of other clients; 0 without any.
    pins_*: retained prefixes: taken, used by the next turn, expired, released for lack of blocks.
    ratio_*: duration with fcfs divided by this one, for the same seed, pool and rate; more than 1
        is better than fcfs. None if fcfs was not measured.
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
        """Pool size and arrival rate in percent; policies are compared for equal values."""
        return self.pool_percent, self.rate_percent


def compared(cells: Sequence[GridCell]) -> list[GridCell]:
    """Return the cells of a seed with their ratios to fcfs."""
    base = {cell.pool_and_rate: cell for cell in cells if cell.variant == BASELINE}
    return [_compared(cell, base.get(cell.pool_and_rate)) for cell in cells]


def _compared(cell: GridCell, base: GridCell | None) -> GridCell:
    if base is None:
        return cell
    return replace(
        cell,
        ratio_mean=base.job_s_mean / cell.job_s_mean,
        ratio_p99=base.job_s_p99 / cell.job_s_p99,
    )


CONCURRENCY: Final = 16
LOAD_OF_WORKING_SET: Final = 0.9
_BLOCK_SIZE: Final = 16
_HOST_BYTES: Final = 4 << 30
_OFFLOADING: Final = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": _HOST_BYTES},
}
_UNLIMITED: Final = ("--max-num-queued-reqs", "0", "--max-num-queued-tokens", "0")


@dataclass(frozen=True, kw_only=True)
class AgentGrid:
    """Parameters of the grid.

    pools: percent of the working set. rates: percent of the capacity. turns: mean per job.
    tool_scale: factor of the durations of tools.
    """

    num_jobs: int
    seeds: list[int]
    variants: list[str]
    pools: list[int]
    rates: list[int]
    turns: float
    tool_scale: float
    serve_flags: list[str]


class SeedGrid:
    """The cells of one seed: starts daemons and sends the same jobs to each."""

    def __init__(self, grid: AgentGrid, seed: int) -> None:
        self._grid = grid
        self._seed = seed
        self._shape = replace(agent_load(grid.num_jobs, seed), turns=grid.turns)
        self._jobs = draw_jobs(self._shape)

    def measure(self) -> SeedBaseline:
        """Measure capacity and working set; raises TokendError if a request failed."""
        grid = self._grid
        everything = self._num_blocks_total()
        closed = AgentPace(rate=float("inf"), concurrency=CONCURRENCY, tool_scale=0.0)
        full, _ = self._run(BASELINE, everything, closed)
        capacity = grid.num_jobs / full.seconds
        calm, _ = self._run(BASELINE, everything, self._pace(LOAD_OF_WORKING_SET * capacity))
        if full.num_failed or calm.num_failed:
            raise TokendError("served_agents: requests failed without memory pressure")
        return SeedBaseline(
            seed=self._seed,
            capacity_jobs_per_s=capacity,
            working_set_blocks=calm.live_blocks_peak,
            working_set_mean_blocks=calm.live_blocks_mean,
            unpressed_job_s_mean=fmean(calm.job_seconds),
            num_requests=calm.num_requests,
            prompt_tokens=calm.prompt_tokens,
            output_tokens=calm.output_tokens,
        )

    def measure_cells(self, measured: SeedBaseline) -> Iterator[GridCell]:
        """Yield the cells, by pool, rate and policy, without ratios. Raises TokendError.

        Also raises if the longest job does not fit into the smallest pool, before the first cell.
        """
        needed, pool = self._num_blocks_longest(), min(self._grid.pools)
        if needed > _num_blocks(measured, pool):
            raise TokendError(
                f"served_agents: --pools: {pool} % of the working set is "
                f"{_num_blocks(measured, pool)} blocks, and the longest job needs {needed}"
            )
        for pool in self._grid.pools:
            for rate in self._grid.rates:
                for name in self._grid.variants:
                    yield self._measure_cell(measured, pool, rate, name)

    def _measure_cell(self, measured: SeedBaseline, pool: int, rate: int, name: str) -> GridCell:
        num_blocks = _num_blocks(measured, pool)
        jobs_per_s = measured.capacity_jobs_per_s * rate / 100
        result, metrics = self._run(name, num_blocks, self._pace(jobs_per_s))
        if not result.job_seconds:
            raise TokendError(f"served_agents: all jobs failed under {name}")
        return GridCell(
            seed=self._seed,
            variant=name,
            pool_percent=pool,
            rate_percent=rate,
            num_blocks=num_blocks,
            jobs_per_s=jobs_per_s,
            job_s_mean=fmean(result.job_seconds),
            job_s_p50=quantile(result.job_seconds, 0.5),
            job_s_p99=quantile(result.job_seconds, 0.99),
            ttft_s_mean=metrics["vllm:time_to_first_token_seconds_sum"]
            / metrics["vllm:time_to_first_token_seconds_count"],
            found_percent=100 * result.cached_tokens / result.prompt_tokens,
            preemptions=round(metrics["vllm:num_preemptions_total"]),
            pins_taken=round(metrics["tokend:pins_taken_total"]),
            pins_hit=round(metrics["tokend:pins_hit_total"]),
            pins_expired=round(metrics["tokend:pins_expired_total"]),
            pins_unpinned=round(metrics["tokend:pins_given_up_total"]),
            num_failed=result.num_failed,
        )

    def _run(
        self, name: str, num_blocks: int, pace: AgentPace
    ) -> tuple[AgentRunResult, dict[str, float]]:
        """All jobs against a daemon of their own; with some of its metrics at the end."""
        flags = [*VARIANTS[name].flags(), "--num-gpu-blocks-override", str(num_blocks)]
        if VARIANTS[name].offloads:
            flags += ["--kv-transfer-config", json.dumps(_OFFLOADING)]
        with MeasuredDaemon([*flags, *_UNLIMITED, *self._grid.serve_flags]) as daemon:
            done = asyncio.run(run_agents(daemon.url, self._jobs, self._shape, pace))
            return done, dict(zip(_METRICS, metrics_of(daemon.url, *_METRICS), strict=True))

    def _pace(self, jobs_per_s: float) -> AgentPace:
        """Return the pace for an arrival rate; jobs are drawn with one per second."""
        grid = self._grid
        return AgentPace(rate=jobs_per_s, concurrency=grid.num_jobs, tool_scale=grid.tool_scale)

    def _num_blocks_total(self) -> int:
        """Return the blocks for the KV of all jobs, with the null block."""
        own = sum(turn.new_tokens + turn.output_tokens for job in self._jobs for turn in job.turns)
        shared = self._shape.num_systems * self._shape.system_tokens
        return (own + shared) // _BLOCK_SIZE + len(self._jobs) + 1

    def _num_blocks_longest(self) -> int:
        """Return the blocks for the longest job, with the null block."""
        own = max(
            sum(turn.new_tokens + turn.output_tokens for turn in job.turns) for job in self._jobs
        )
        return -(-(self._shape.system_tokens + own) // _BLOCK_SIZE) + 1


def _num_blocks(measured: SeedBaseline, pool: int) -> int:
    """Return the blocks of a pool. pool: percent of the working set."""
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
