"""What the simulator is asked and what it answers.

One JSON document a line: a `ReplayOrder`, then its `ReplayAnswer`.
"""

import msgspec

from deploy.bench.agents.load import AgentLoad


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step takes: base + tokens · per_token + sequences · per_row + context · …

    Milliseconds. context: tokens of its sequences that are computed after it.
    """

    base_ms: float = 0.0
    per_token_ms: float = 0.0
    per_row_ms: float = 0.0
    per_context_ms: float = 0.0

    def seconds(self, num_tokens: int, num_rows: int, num_context: int) -> float:
        """Of one step."""
        return 1e-3 * (
            self.base_ms
            + self.per_token_ms * num_tokens
            + self.per_row_ms * num_rows
            + self.per_context_ms * num_context
        )


class HostTier(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory behind the pool: the offloading connector, with copies that only take time.

    num_blocks: of the pool's size. block_ms: that copying one takes, in either direction; copies
    of a direction follow each other, and delay no step.
    """

    num_blocks: int
    block_ms: float


class ReplayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """path: of the trace. load: instead of its arrivals, with default settings and a pool that
    holds everything; a path beside it is of the trace that step times are fitted to.


    verify: follow the trace line by line instead, and compare each decision.
    policy, pin_policy: None for those of the trace. rate: arrivals come so many times as fast.
    one_tenant: nobody shares with anybody. open_loop: a job's next turn arrives when it did,
    not so long after the end of the turn before as it did.
    together: keep so many jobs under way, whose tools take no time, instead: what can be computed.
    tier: behind the pool; None for none.
    tape_path: file for a trace of the simulation; "" for none.
    The rest replaces what the trace says; None leaves it.
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
    """A trace under one policy, in the time of its virtual clock.

    num_left_out: requests whose end the trace does not tell. completion: of requests, from arrival
    to the last token; jobs: from the first arrival to the last token of all turns; a request
    without a job is one of one turn. agents, others: the same of jobs, and of those without.
    hit_rate: of the tokens that were looked up in the prefix cache. seconds: in all.
    num_prompt_tokens: of all requests; num_found_tokens: of those, what was found in the pool or
    behind it when a request was first admitted. other_prompt_tokens: of requests without a job.
    pins_*: taken; found by the job's next turn; over in time; given up for want of blocks.
    live_blocks_mean, live_blocks_peak: of the KV of jobs between their first arrival and their last
    token, what they share counted once; between the arrivals of the first tenth of the jobs and the
    last.
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
    """Whether the scheduler decides again what the trace says.

    num_steps: that are the same, from the first on. difference: in the step after them; "" if
    there is none.
    """

    num_steps: int
    num_admitted: int
    num_preempted: int
    difference: str = ""


class ReplayRecord(msgspec.Struct, frozen=True):
    """A replay that is over, for a file of them."""

    order: ReplayOrder
    figures: ReplayFigures


class ReplayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One of them; error: why there is none."""

    figures: ReplayFigures | None = None
    verdict: Verdict | None = None
    error: str = ""
