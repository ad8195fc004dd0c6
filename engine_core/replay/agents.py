"""Jobs of agents, drawn from published distributions, and as a recording without steps.

    system prompt | turn 1 | answer | tool's result, turn 2 | answer | …
    |- shared by -|------------ grows, never changes ----------------|
      several jobs

A turn's prompt is all that came before it and what is new. Tools have names and durations of their
own, so that there is something to learn from a name. Nominal times of the recording: a turn takes a
second, and between turns is the tool's duration, which is all that a replay takes from them.
Requests of others may come beside them, which belong to no job and are like nothing else.
"""

import math
import random
from typing import Final

from engine_core.replay.recording import Recording
from proto.config import SchedulerConfig
from proto.replay import AgentJob, AgentLoad, AgentTurn
from proto.sched_trace import Arrival, Content, Finish, TraceHeader, TurnEnd

_BLOCK_SIZE: Final = 16
_SECOND: Final = 1_000_000


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


def recording_of(load: AgentLoad) -> Recording:
    """The same for the same load. Its pool holds everything; orders make it smaller."""
    return _Writing(load).recording


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


class _Writing:
    """Writes job after job. Contents are numbered as a trace would, system prompts first."""

    def __init__(self, load: AgentLoad) -> None:
        self._load = load
        self._num_contents = 0
        self._lines: list[Arrival | Finish | TurnEnd] = []
        self._num_turns = 0
        shared = load.system_tokens // _BLOCK_SIZE
        self._systems = [self._new(0, 0, shared) for _ in range(load.num_systems)]
        for number, job in enumerate(draw_jobs(load)):
            self._write_job(f"agent-{number}", job)
        for starts_s, turn in draw_others(load):
            self._write_turn("", round(starts_s * _SECOND), Content(0, 0), turn.new_tokens, turn)
        self.recording = self._record()

    def _record(self) -> Recording:
        longest = self._load.longest
        most = self._num_contents + 2 + longest // _BLOCK_SIZE
        header = TraceHeader(
            epoch=1,
            started_at=0.0,
            num_blocks=most,
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=True,
            max_model_len=longest,
            scheduler=SchedulerConfig(max_num_queued_reqs=0, max_num_queued_tokens=0),
            device="none",
        )
        recording = Recording(header)
        for system in self._systems:
            recording.chains.learn(system)
        for line in self._lines:
            recording.take(line)
        return recording

    def _write_job(self, name: str, job: AgentJob) -> None:
        content, num_tokens = self._systems[job.system], self._load.system_tokens
        now = round(job.starts_s * _SECOND)
        for turn in job.turns:
            num_prompt = num_tokens + turn.new_tokens
            num_tokens = num_prompt + turn.output_tokens
            content = self._write_turn(name, now, content, num_prompt, turn)
            now += _SECOND + round(turn.tool_s * _SECOND)

    def _write_turn(
        self, job: str, now: int, content: Content, num_prompt: int, turn: AgentTurn
    ) -> Content:
        """Returns its last content."""
        asked = self._extended(content, num_prompt)
        said = self._extended(asked, num_prompt + turn.output_tokens)
        handle = self._num_turns
        self._num_turns += 1
        self._lines.append(
            Arrival(
                time_us=now,
                arrived_us=now,
                handle=handle,
                request_id=handle,
                job=job,
                is_last_step=not turn.tool,
                num_prompt_tokens=num_prompt,
                max_tokens=turn.output_tokens,
                blocks=asked,
            )
        )
        self._lines.append(
            Finish(
                time_us=now + _SECOND,
                handle=handle,
                reason="length",
                num_output_tokens=turn.output_tokens,
                blocks=said,
            )
        )
        if job:
            self._lines.append(
                TurnEnd(time_us=now + _SECOND, request_id=handle, job=job, tool=turn.tool)
            )
        return said

    def _extended(self, content: Content, num_tokens: int) -> Content:
        """The same and more, of which the blocks that it had are known."""
        num_known = content.num_known + content.num_new
        last = content.first + content.num_new - 1 if content.num_new else content.parent
        return self._new(last, num_known, num_tokens // _BLOCK_SIZE - num_known)

    def _new(self, parent: int, num_known: int, num_new: int) -> Content:
        if not num_new:
            return Content(parent, num_known)
        first = self._num_contents + 1
        self._num_contents += num_new
        return Content(parent, num_known, first, num_new)
