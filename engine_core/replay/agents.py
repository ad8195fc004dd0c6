"""Jobs of agents, drawn from published distributions, as a recording without steps.

    system prompt | turn 1 | answer | tool's result, turn 2 | answer | …
    |- shared by -|------------ grows, never changes ----------------|
      several jobs

A turn's prompt is all that came before it and what is new. Nominal times: a turn takes a second,
and between turns is the tool's duration, which is all that a replay takes from them.
"""

import math
import random
from typing import Final

from engine_core.replay.recording import Recording
from proto.config import SchedulerConfig
from proto.replay import AgentLoad
from proto.sched_trace import Arrival, Content, Finish, TraceHeader

_TOOL_SECONDS: Final = (
    (0.61, 0.05, 1.0),
    (0.30, 1.0, 10.0),
    (0.05, 10.0, 60.0),
    (0.04, 60.0, 1000.0),
)
"""(share of the calls, from, to), each by its logarithm. 61 % take under a second, and the 4 % over
a minute about 85 % of all time, as in TraceLab's 432,510 calls."""
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
        return recording

    def _draw_job(self, job: str, now: int) -> None:
        load, rng = self._load, self._rng
        content = rng.choice(self._systems)
        num_tokens = load.system_tokens
        for _ in range(1 + self._count(load.turns - 1)):
            num_prompt = num_tokens + 1 + self._count(load.turn_tokens - 1)
            num_output = 1 + self._count(load.output_tokens - 1)
            if num_prompt + num_output > load.longest:
                break
            content = self._draw_turn(job, now, content, num_prompt, num_output)
            num_tokens = num_prompt + num_output
            now += _SECOND + round(self._tool_seconds() * _SECOND)

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

    def _tool_seconds(self) -> float:
        share = self._rng.random()
        for part, least, most in _TOOL_SECONDS:
            if share < part:
                return float(least * (most / least) ** (share / part))
            share -= part
        return _TOOL_SECONDS[-1][2]
