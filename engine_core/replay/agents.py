"""Jobs of agents, drawn from published distributions, as a recording without steps.

    system prompt | turn 1 | answer | tool's result, turn 2 | answer | …
    |- shared by -|------------ grows, never changes ----------------|
      several jobs

A turn's prompt is all that came before it and what is new. Nominal times: a turn takes a second,
and between turns is the tool's duration, which is all that a replay takes from them. Tools have
names and durations of their own, so that there is something to learn from a name.
"""

import math
import random
from typing import Final

from engine_core.replay.recording import Recording
from proto.config import SchedulerConfig
from proto.replay import AgentLoad
from proto.sched_trace import Arrival, Content, Finish, TraceHeader

_BLOCK_SIZE: Final = 16
_SECOND: Final = 1_000_000


def recording_of(load: AgentLoad) -> Recording:
    """The same for the same load. Its pool holds everything; orders make it smaller."""
    return _Drawing(load).recording


class _Drawing:
    """Draws job after job. Contents are numbered as a trace would, system prompts first."""

    def __init__(self, load: AgentLoad) -> None:
        self._load = load
        self._rng = random.Random(load.seed)
        self._num_contents = 0
        self._handle = 0
        self._lines: list[Arrival | Finish] = []
        self._tools: dict[int, str] = {}
        self._shares = [each.share for each in load.tools]
        shared = load.system_tokens // _BLOCK_SIZE
        self._systems = [self._new(0, 0, shared) for _ in range(load.num_systems)]
        started = 0.0
        for number in range(load.num_jobs):
            started += self._rng.expovariate(load.jobs_per_second)
            self._draw_job(f"agent-{number}", round(started * _SECOND))
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
        for handle, sequence in recording.sequences.items():
            sequence.tool = self._tools.get(handle, "")
            sequence.is_last = not sequence.tool
        return recording

    def _draw_job(self, job: str, now: int) -> None:
        load, rng = self._load, self._rng
        content = rng.choice(self._systems)
        num_tokens = load.system_tokens
        handle = -1
        for _ in range(1 + self._count(load.turns - 1)):
            num_prompt = num_tokens + 1 + self._count(load.turn_tokens - 1)
            num_output = 1 + self._count(load.output_tokens - 1)
            if num_prompt + num_output > load.longest:
                break
            if handle >= 0:
                now += _SECOND + round(self._call(handle) * _SECOND)
            handle = self._handle
            content = self._draw_turn(job, now, content, num_prompt, num_output)
            num_tokens = num_prompt + num_output

    def _draw_turn(
        self, job: str, now: int, content: Content, num_prompt: int, num_output: int
    ) -> Content:
        asked = self._extended(content, num_prompt)
        said = self._extended(asked, num_prompt + num_output)
        self._lines.append(
            Arrival(
                time_us=now,
                arrived_us=now,
                handle=self._handle,
                request_id=self._handle,
                job=job,
                num_prompt_tokens=num_prompt,
                max_tokens=num_output,
                blocks=asked,
            )
        )
        self._lines.append(
            Finish(
                time_us=now + _SECOND,
                handle=self._handle,
                reason="length",
                num_output_tokens=num_output,
                blocks=said,
            )
        )
        self._handle += 1
        return said

    def _call(self, handle: int) -> float:
        """The tool that a turn calls; returns its seconds."""
        tool = self._rng.choices(self._load.tools, self._shares)[0]
        self._tools[handle] = tool.name
        drawn = self._rng.lognormvariate(math.log(tool.median_s), tool.sigma)
        return min(drawn, self._load.longest_tool_s)

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

    def _count(self, mean: float) -> int:
        """From 0 on, geometric."""
        return int(self._rng.expovariate(math.log1p(1 / mean))) if mean > 0 else 0
