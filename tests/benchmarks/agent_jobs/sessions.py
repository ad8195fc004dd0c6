"""Agents that send the jobs of a load to a daemon, as completions of token ids.

The prompt of a turn is the whole conversation and new tokens; the answer has the drawn number of
tokens. Tool calls are pauses; requests do not name the tool. A failed request ends its job.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import httpx

from deploy.bench.datasets import HIGHEST_TOKEN_ID, LOWEST_TOKEN_ID
from tests.benchmarks.agent_jobs.load import AgentJob, AgentLoad

_ANSWER_SECONDS: Final = 3600.0
_BLOCK_SIZE: Final = 16
_WARM_UP_SHARE: Final = 0.1
"""Share of the jobs that must have begun before the working set is measured."""
_IDS: Final = range(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID + 1)


@dataclass(frozen=True, kw_only=True)
class AgentPace:
    """Speed of the jobs.

    rate: factor of the rate of arrivals; inf: all arrive at the start. concurrency: maximum of
    running jobs. tool_scale: factor of the durations of tools.
    """

    rate: float
    concurrency: int
    tool_scale: float


@dataclass
class AgentRunResult:
    """Results of all jobs of a run.

    job_seconds: of completed jobs. seconds: until the last job ended. num_failed: failed jobs.
    cached_tokens: prompt tokens found in the prefix cache.
    live_blocks_mean, live_blocks_peak: KV blocks of running jobs, in the pool or not.
    """

    job_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_requests: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    live_blocks_mean: float = 0.0
    live_blocks_peak: int = 0


class _WorkingSet:
    """KV of running jobs over time, in full blocks, cached or not; shared blocks count once."""

    def __init__(self, shape: AgentLoad) -> None:
        self._shared = shape.system_tokens // _BLOCK_SIZE
        self._own: dict[int, int] = {}
        self._systems: Counter[int] = Counter()
        self._starts: list[float] = []
        self._levels: list[tuple[float, int]] = []

    def note_begin(self, number: int, system: int) -> None:
        self._starts.append(time.monotonic())
        self._own[number] = 0
        self._systems[system] += 1

    def note_length(self, number: int, num_tokens: int) -> None:
        """Note the length of a job. num_tokens: including the system prompt."""
        self._own[number] = num_tokens // _BLOCK_SIZE - self._shared
        self._record()

    def note_end(self, number: int, system: int) -> None:
        del self._own[number]
        self._systems[system] -= 1
        self._record()

    def mean_and_peak(self) -> tuple[float, int]:
        """Return mean and maximum between the end of the warm-up and the start of the last job."""
        begin, end = self._starts[int(_WARM_UP_SHARE * len(self._starts))], self._starts[-1]
        peak, area = 0, 0.0
        for (since, level), (until, _) in pairwise([*self._levels, (end, 0)]):
            spanned = min(until, end) - max(since, begin)
            if spanned > 0:
                area += level * spanned
                peak = max(peak, level)
        return (area / (end - begin) if end > begin else 0.0), peak

    def _record(self) -> None:
        shared = self._shared * sum(1 for users in self._systems.values() if users)
        self._levels.append((time.monotonic(), shared + sum(self._own.values())))


async def run_agents(
    url: str, jobs: Sequence[AgentJob], shape: AgentLoad, pace: AgentPace
) -> AgentRunResult:
    """Run all jobs, each from its start, and return the results."""
    result, live = AgentRunResult(), _WorkingSet(shape)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    slots = asyncio.Semaphore(pace.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_SECONDS, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        fields = {"model": model, "temperature": 0, "ignore_eos": True}
        started_at = time.monotonic()

        async def run_job(number: int, job: AgentJob) -> None:
            await asyncio.sleep(started_at + job.starts_s / pace.rate - time.monotonic())
            async with slots:
                await _AgentClient(number, job, shape, pace.tool_scale, result, live).run(
                    client, fields
                )

        await asyncio.gather(*(run_job(number, job) for number, job in enumerate(jobs)))
    result.seconds = time.monotonic() - started_at
    result.live_blocks_mean, result.live_blocks_peak = live.mean_and_peak()
    return result


class _AgentClient:
    """Runs one job."""

    def __init__(
        self,
        number: int,
        job: AgentJob,
        shape: AgentLoad,
        tool_scale: float,
        result: AgentRunResult,
        live: _WorkingSet,
    ) -> None:
        self._number = number
        self._job = job
        self._tool_scale = tool_scale
        self._result = result
        self._live = live
        self._rng = random.Random(f"{shape.seed}:{number}")
        system = random.Random(f"{shape.seed}:system {job.system}")
        self._conversation = system.choices(_IDS, k=shape.system_tokens)

    async def run(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        started = time.monotonic()
        self._live.note_begin(self._number, self._job.system)
        try:
            if await self._run_turns(client, fields):
                self._result.job_seconds.append(time.monotonic() - started)
            else:
                self._result.num_failed += 1
        finally:
            self._live.note_end(self._number, self._job.system)

    async def _run_turns(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> bool:
        for turn in self._job.turns:
            self._conversation += self._rng.choices(_IDS, k=turn.new_tokens)
            self._live.note_length(self._number, len(self._conversation))
            body = {
                **fields,
                "prompt": self._conversation,
                "max_tokens": turn.output_tokens,
                "return_token_ids": True,
                "agent_hint": {
                    "job_id": f"agent-{self._number}",
                    "is_last_step": not turn.tool,
                },
            }
            if not await self._send(client, body):
                return False
            self._live.note_length(self._number, len(self._conversation))
            await asyncio.sleep(turn.tool_s * self._tool_scale)
        return True

    async def _send(self, client: httpx.AsyncClient, body: dict[str, Any]) -> bool:
        """Send a request and append its answer to the conversation; return False if it fails."""
        self._result.num_requests += 1
        try:
            response = await client.post("/v1/completions", json=body)
        except httpx.HTTPError:
            return False
        if response.status_code != httpx.codes.OK:
            return False
        answer = response.json()
        usage = answer["usage"]
        self._result.prompt_tokens += usage["prompt_tokens"]
        self._result.output_tokens += usage["completion_tokens"]
        self._result.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self._conversation += answer["choices"][0]["token_ids"]
        return True
