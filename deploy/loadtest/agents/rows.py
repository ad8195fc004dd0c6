"""What a grid finds, simulated or with a model: cells, and what those of a seed are relative to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.loadtest.agents.machines import BASELINE
from proto.replay import StepModel


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a seed's cells are relative to.

    unpressed_job_s_mean: under fcfs with a pool that holds everything, at 90 % of the capacity.
    step_model: that all cells had; None with a model, whose steps take what they take.
    """

    seed: int
    capacity_jobs_per_s: float
    working_set_blocks: int
    working_set_mean_blocks: float
    unpressed_job_s_mean: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    step_model: StepModel | None


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
