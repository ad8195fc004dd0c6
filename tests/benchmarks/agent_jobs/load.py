"""Agent sessions, drawn from published distributions.

    system prompt | turn 1 | answer | tool's result, turn 2 | answer | …
    |- shared by -|------------ grows, never changes ----------------|
      several sessions

The prompt of a turn is the whole conversation so far and what is new. Each tool has a name and a
distribution of durations, so that a scheduler can learn durations by name. Requests of other
clients may come in between; they belong to no session and share no prefix.
"""

import math
import random
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ToolLoad:
    """A tool of agents. share: of all calls. median_s, sigma: of its log-normal durations."""

    name: str
    share: float
    median_s: float
    sigma: float


TOOLS: Final = (
    ToolLoad("read_file", 0.24, 0.08, 1.0),
    ToolLoad("edit_file", 0.14, 0.15, 0.8),
    ToolLoad("shell", 0.38, 0.85, 2.42),
    ToolLoad("fetch", 0.19, 2.5, 1.0),
    ToolLoad("run_tests", 0.05, 60.0, 1.8),
)
"""Distribution of the 432,510 calls of TraceLab: 61 % under a second, 4 % over a minute, which are
80 % of all tool time (there 85 %). shell has the published median of 0.85 s and 99th percentile of
235 s; the shares of the other tools are assumptions."""


@dataclass(frozen=True, kw_only=True)
class AgentLoad:
    """Parameters of random agent jobs: turns with tool calls between them, and a growing prefix.

    jobs_per_second: Poisson arrivals. turns: mean number per job.
    num_systems, system_tokens: each job begins with one of these system prompts.
    turn_tokens: mean tokens that a turn adds to the prompt. output_tokens: mean per turn.
    longest: maximum context of a job, which ends there.
    tools: each turn except the last calls one, for at most `longest_tool_s` seconds.
    others_per_job: requests of other clients per job, at random times, without common prefixes.
    other_tokens, other_output_tokens: their mean tokens.
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
    tools: tuple[ToolLoad, ...] = TOOLS
    longest_tool_s: float = 1000.0
    others_per_job: float = 0.0
    other_tokens: int = 1000
    other_output_tokens: int = 100


@dataclass(frozen=True)
class JobTurn:
    """A turn of a job.

    new_tokens: added to the prompt; in the first turn, to the system prompt.
    output_tokens: generated. tool, tool_s: called after it and its seconds; "" in the last turn.
    """

    new_tokens: int
    output_tokens: int
    tool: str = ""
    tool_s: float = 0.0


@dataclass(frozen=True)
class AgentJob:
    """A job. starts_s: arrival of its first turn. system: index of the system prompt."""

    starts_s: float
    system: int
    turns: list[JobTurn]


def draw_jobs(load: AgentLoad) -> list[AgentJob]:
    """Draw the jobs of a load, ordered by start; another rate changes only the starts."""
    rng = random.Random(load.seed)
    shares = [tool.share for tool in load.tools]
    jobs, started = [], 0.0
    for _ in range(load.num_jobs):
        started += rng.expovariate(1.0)
        system = rng.randrange(load.num_systems)
        jobs.append(
            AgentJob(started / load.jobs_per_second, system, _draw_turns(load, shares, rng))
        )
    return jobs


def draw_others(load: AgentLoad) -> list[tuple[float, JobTurn]]:
    """Draw the requests of other clients, independent of jobs, as (arrival in seconds, turn)."""
    rng = random.Random(f"{load.seed}: others")
    started, found = 0.0, []
    for _ in range(round(load.num_jobs * load.others_per_job)):
        started += rng.expovariate(load.others_per_job)
        num_output = min(1 + _count(rng, load.other_output_tokens - 1), load.longest - 1)
        num_new = min(1 + _count(rng, load.other_tokens - 1), load.longest - num_output)
        found.append((started / load.jobs_per_second, JobTurn(num_new, num_output)))
    return found


def _draw_turns(load: AgentLoad, shares: list[float], rng: random.Random) -> list[JobTurn]:
    """Draw the turns of a job: at least one; the last one calls no tool."""
    turns: list[JobTurn] = []
    num_tokens = load.system_tokens
    for _ in range(1 + _count(rng, load.turns - 1)):
        num_new = 1 + _count(rng, load.turn_tokens - 1)
        num_output = 1 + _count(rng, load.output_tokens - 1)
        room = load.longest - num_tokens
        if num_new + num_output > room:
            if turns:
                break
            num_output = min(num_output, room - 1)
            num_new = min(num_new, room - num_output)
        num_tokens += num_new + num_output
        tool = rng.choices(load.tools, shares)[0]
        seconds = rng.lognormvariate(math.log(tool.median_s), tool.sigma)
        turns.append(JobTurn(num_new, num_output, tool.name, min(seconds, load.longest_tool_s)))
    last = turns[-1]
    turns[-1] = JobTurn(last.new_tokens, last.output_tokens)
    return turns


def _count(rng: random.Random, mean: float) -> int:
    """Draw a geometric number from 0."""
    return int(rng.expovariate(math.log1p(1 / mean))) if mean > 0 else 0


def agent_load(num_jobs: int, seed: int, others_per_job: float = 0.0) -> AgentLoad:
    """Return a load like the Codex traces, with a tenth of their context lengths.

    Traces: a median of 33 turns, contexts that grow from 12K to 80K tokens by 2,242 per turn, 131
    input tokens per output token. Here: one job per second, 33 turns or fewer up to 8,192 tokens,
    1,024 tokens at the begin and 225 more per turn.
    """
    return AgentLoad(
        num_jobs=num_jobs,
        seed=seed,
        turns=33.0,
        turn_tokens=190,
        output_tokens=35,
        others_per_job=others_per_job,
    )


@dataclass(frozen=True)
class PolicyVariant:
    """A scheduling policy, its pin policy, and whether KV is offloaded to host memory."""

    policy: str
    pin_policy: str | None = None
    offloads: bool = False

    def flags(self) -> list[str]:
        """Return flags of `tokend serve`, without those for offloading."""
        pins = ["--pin-policy", self.pin_policy] if self.pin_policy else []
        return ["--scheduling-policy", self.policy, *pins]


BASELINE: Final = "fcfs"
VARIANTS: Final = {
    BASELINE: PolicyVariant("fcfs"),
    "none": PolicyVariant("continuum", "none"),
    "fixed": PolicyVariant("continuum", "fixed"),
    "rule": PolicyVariant("continuum", "rule"),
    "fcfs+host": PolicyVariant("fcfs", None, True),
    "rule+host": PolicyVariant("continuum", "rule", True),
}
"""Compared policies. none, fixed and rule: pin policies of continuum; +host: with offloading."""
