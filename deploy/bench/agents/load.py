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
    """A tool that agents call.

    share: of all calls. median_s, sigma: of its durations, which are log-normal.
    """

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
"""Together as TraceLab's 432,510 calls: 61 % under a second, 4 % over a minute, which are 80 % of
all tool time (there 85 %); shell has its published median, 0.85 s, and 99th percentile, 235 s. How
the other calls divide among tools is assumed."""


@dataclass(frozen=True, kw_only=True)
class AgentLoad:
    """Jobs of agents, drawn: turns with tool calls between them, over a prefix that grows.

    jobs_per_second: arrivals, Poisson. turns: of a job, mean. system_tokens: every job begins with
    one of `num_systems` prompts so long. turn_tokens: that a turn adds to the prompt, mean;
    output_tokens: that it generates, mean. longest: of a job's context; it ends there.
    tools: of which each turn but the last calls one; none takes longer than `longest_tool_s`.
    others_per_job: requests of others that come for each job, one by one, in random moments; no two
    of them have anything in common. other_tokens, other_output_tokens: of each, mean.
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
class AgentTurn:
    """new_tokens: that it adds to the prompt (of a first turn: to the system prompt).

    output_tokens: that it generates. tool: that it calls then, for so many seconds; the last turn
    has none.
    """

    new_tokens: int
    output_tokens: int
    tool: str = ""
    tool_s: float = 0.0


@dataclass(frozen=True)
class AgentJob:
    """starts_s: when its first turn comes. system: number of the system prompt."""

    starts_s: float
    system: int
    turns: list[AgentTurn]


def draw_jobs(load: AgentLoad) -> list[AgentJob]:
    """The same for the same load, by their starts; equal but for the starts at another rate."""
    rng = random.Random(load.seed)
    shares = [each.share for each in load.tools]
    jobs, started = [], 0.0
    for _ in range(load.num_jobs):
        started += rng.expovariate(1.0)
        system = rng.randrange(load.num_systems)
        jobs.append(
            AgentJob(started / load.jobs_per_second, system, _draw_turns(load, shares, rng))
        )
    return jobs


def draw_others(load: AgentLoad) -> list[tuple[float, AgentTurn]]:
    """When they come, in seconds, and their one turn; jobs are drawn the same without them."""
    rng = random.Random(f"{load.seed}: others")
    started, found = 0.0, []
    for _ in range(round(load.num_jobs * load.others_per_job)):
        started += rng.expovariate(load.others_per_job)
        num_output = min(1 + _count(rng, load.other_output_tokens - 1), load.longest - 1)
        num_new = min(1 + _count(rng, load.other_tokens - 1), load.longest - num_output)
        found.append((started / load.jobs_per_second, AgentTurn(num_new, num_output)))
    return found


def _draw_turns(load: AgentLoad, shares: list[float], rng: random.Random) -> list[AgentTurn]:
    """At least one; the last one calls no tool."""
    turns: list[AgentTurn] = []
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
        turns.append(AgentTurn(num_new, num_output, tool.name, min(seconds, load.longest_tool_s)))
    last = turns[-1]
    turns[-1] = AgentTurn(last.new_tokens, last.output_tokens)
    return turns


def _count(rng: random.Random, mean: float) -> int:
    """From 0 on, geometric."""
    return int(rng.expovariate(math.log1p(1 / mean))) if mean > 0 else 0


def agent_load(num_jobs: int, seed: int, others_per_job: float = 0.0) -> AgentLoad:
    """A job a second; the shape of the Codex traces, with contexts a tenth of theirs.

    There: a median of 33 turns, 12K tokens that become 80K by 2,242 a turn, 131 tokens in for one
    out. Here: 33 turns, or fewer where 8,192 tokens are full; 1,024 tokens and then 225 a turn.
    """
    return AgentLoad(
        num_jobs=num_jobs,
        seed=seed,
        turns=33.0,
        turn_tokens=190,
        output_tokens=35,
        others_per_job=others_per_job,
    )


# The scheduling policies that the benchmark compares.


@dataclass(frozen=True)
class Variant:
    """A policy of the scheduler, how it pins, and whether there is host memory behind the pool."""

    policy: str
    pin_policy: str | None = None
    has_tier: bool = False

    def flags(self) -> list[str]:
        """Of `tokend serve`, but for those of the tier."""
        pins = ["--pin-policy", self.pin_policy] if self.pin_policy else []
        return ["--scheduling-policy", self.policy, *pins]


BASELINE: Final = "fcfs"
VARIANTS: Final = {
    BASELINE: Variant("fcfs"),
    "none": Variant("continuum", "none"),
    "fixed": Variant("continuum", "fixed"),
    "rule": Variant("continuum", "rule"),
    "fcfs+host": Variant("fcfs", None, True),
    "rule+host": Variant("continuum", "rule", True),
}
"""none, fixed and rule are of policy continuum; +host: with host memory behind the pool."""
