"""The messages of the simulator.

One JSON document a line: a `ReplayOrder`, then its `ReplayAnswer`.
"""

import msgspec

from tests.benchmarks.agent_jobs.load import AgentLoad


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a step: base + tokens · per_token + sequences · per_row + context · …

    context: computed tokens of its sequences after it.
    """

    base_ms: float = 0.0
    per_token_ms: float = 0.0
    per_row_ms: float = 0.0
    per_context_ms: float = 0.0

    def seconds(self, num_tokens: int, num_rows: int, num_context: int) -> float:
        """Return the seconds of one step."""
        return 1e-3 * (
            self.base_ms
            + self.per_token_ms * num_tokens
            + self.per_row_ms * num_rows
            + self.per_context_ms * num_context
        )


class HostTier(msgspec.Struct, frozen=True, kw_only=True):
    """A host memory tier: the offloading connector, with copies that only take time.

    num_blocks: blocks of the pool's size. block_ms: time to copy one, in either direction; copies
    of a direction are sequential, and delay no step.
    """

    num_blocks: int
    block_ms: float


class ReplayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A replay. path: of the trace. load: replaces its arrivals, with default settings and a pool
    that holds everything; a path is then the trace that step times are fitted to.


    verify: follow the trace line by line instead, and compare each decision.
    policy, pin_policy: None for those of the trace. rate: factor of the arrival rate.
    one_tenant: all requests have one tenant. open_loop: a job's next turn arrives at its recorded
    time instead of its recorded interval after the end of the previous turn.
    together: keep this many jobs active, whose tools take no time, to measure the capacity.
    tier: host memory; None for none.
    tape_path: file for a trace of the simulation; "" for none.
    The rest replaces settings of the trace; None keeps them.
    """

    path: str = ""
    load: AgentLoad | None = None
    verify: bool = False
    policy: str | None = None
    pin_policy: str | None = None
    rate: float = 1.0
    one_tenant: bool = False
    open_loop: bool = False
    together: int = 0
    tier: HostTier | None = None
    tape_path: str = ""
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    step_model: StepModel | None = None


class Spread(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


class ReplayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a trace under one policy, in virtual time.

    num_left_out: requests without an end in the trace. completion: of requests, from arrival to the
    last token; jobs: from the first arrival to the last token of all turns; a request without a job
    is a job of one turn. agents, others: the same for jobs, and for requests without one.
    hit_rate: of tokens looked up in the prefix cache. seconds: in total.
    num_prompt_tokens: of all requests; num_found_tokens: those found in the pool or in host memory
    at the first admission. other_prompt_tokens: of requests without a job.
    pins_*: taken; reused by the job's next turn; expired; released for blocks.
    live_blocks_mean, live_blocks_peak: KV of jobs from their first arrival to their last token,
    shared blocks counted once; measured from the arrival of the first tenth of the jobs on.
    """

    policy: str
    num_requests: int
    num_left_out: int
    num_jobs: int
    num_steps: int
    seconds: float
    output_tokens: int
    completion: Spread
    jobs: Spread
    ttft: Spread
    preemptions: int
    hit_rate: float
    step_model: StepModel
    num_prompt_tokens: int = 0
    num_found_tokens: int = 0
    pins_taken: int = 0
    pins_hit: int = 0
    pins_expired: int = 0
    pins_unpinned: int = 0
    live_blocks_mean: float = 0.0
    live_blocks_peak: int = 0
    agents: Spread = Spread()
    others: Spread = Spread()
    other_prompt_tokens: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of following a trace.

    num_steps: number of equal steps from the first on. difference: in the next step; "" if there is
    none.
    """

    num_steps: int
    num_admitted: int
    num_preempted: int
    difference: str = ""


class ReplayRecord(msgspec.Struct, frozen=True):
    """A finished replay, for a file of them."""

    order: ReplayOrder
    figures: ReplayFigures


class ReplayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The figures or the verdict. error: the reason if there is neither."""

    figures: ReplayFigures | None = None
    verdict: Verdict | None = None
    error: str = ""
