"""What `tokend trace replay` asks of the program that has the scheduler, and what comes back.

One JSON document a line: a `ReplayOrder`, then its `ReplayAnswer`.
"""

import msgspec


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


class AgentLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of agents, drawn: turns with tool calls between them, over a prefix that grows.

    Published shares: 61 % of the tool calls take under a second, 4 % more than a minute.
    jobs_per_second: arrivals, Poisson. turns: of a job, mean. system_tokens: every job begins with
    one of `num_systems` prompts so long. turn_tokens: that a turn adds to the prompt, mean;
    output_tokens: that it generates, mean. longest: of a job's context; it ends there.
    """

    num_jobs: int
    seed: int = 0
    jobs_per_second: float = 1.0
    turns: float = 10.0
    num_systems: int = 4
    system_tokens: int = 1024
    turn_tokens: int = 300
    output_tokens: int = 100
    longest: int = 8192


class ReplayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """path: of the trace. load: instead of its arrivals; without a path, with default settings.

    verify: follow the trace line by line instead, and compare each decision.
    policy: None for that of the trace. rate: arrivals come so many times as fast.
    one_tenant: nobody shares with anybody. open_loop: a job's next turn arrives when it did,
    not so long after the end of the turn before as it did.
    tape_path: file for a trace of the simulation; "" for none.
    The rest replaces what the trace says; None leaves it.
    """

    path: str = ""
    load: AgentLoad | None = None
    verify: bool = False
    policy: str | None = None
    rate: float = 1.0
    one_tenant: bool = False
    open_loop: bool = False
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
    to the last token; jobs: from the first arrival to the last token of all turns.
    hit_rate: of the tokens that were looked up in the prefix cache. seconds: in all.
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


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the scheduler decides again what the trace says.

    num_steps: that are the same, from the first on. difference: in the step after them; "" if
    there is none.
    """

    num_steps: int
    num_admitted: int
    num_preempted: int
    difference: str = ""


class ReplayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One of them; error: why there is neither."""

    figures: ReplayFigures | None = None
    verdict: Verdict | None = None
    error: str = ""
