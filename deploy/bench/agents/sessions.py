"""Agents that talk to a daemon: what was drawn, as completions of token ids, with waits for tools.

A turn's prompt is exactly what was said and what is new, and its answer gets as many tokens as the
draw says. Nobody calls a tool by name here: a daemon learns from the durations of all calls alike.
A request that fails ends its job, and is counted.
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

from deploy.bench.agents.load import AgentJob, AgentLoad
from deploy.bench.datasets import TokenIds

_ANSWER_SECONDS: Final = 3600.0
_BLOCK_SIZE: Final = 16
_WARM: Final = 0.1
"""Part of the jobs that have to have begun before their KV counts, as in the simulation."""
_IDS: Final = TokenIds()


@dataclass(frozen=True, kw_only=True)
class Pace:
    """rate: factor of the drawn arrivals; inf lets all come at the start.

    at_once: of them are under way, the others wait. tool_scale: factor of tools' times.
    """

    rate: float
    at_once: int
    tool_scale: float


@dataclass
class Done:
    """What came of all jobs of a run. job_seconds: of those that came to their end.

    seconds: until the last one did.
    """

    job_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_requests: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    output_tokens: int = 0
    live_blocks_mean: float = 0.0
    live_blocks_peak: int = 0


class _LiveBlocks:
    """KV of jobs under way, in full blocks, in the pool or not; what they share counts once."""

    def __init__(self, shape: AgentLoad) -> None:
        self._shared = shape.system_tokens // _BLOCK_SIZE
        self._own: dict[int, int] = {}
        self._systems: Counter[int] = Counter()
        self._starts: list[float] = []
        self._levels: list[tuple[float, int]] = []

    def begins(self, number: int, system: int) -> None:
        self._starts.append(time.monotonic())
        self._own[number] = 0
        self._systems[system] += 1

    def has(self, number: int, num_tokens: int) -> None:
        """num_tokens: the job's so far, its system prompt included."""
        self._own[number] = num_tokens // _BLOCK_SIZE - self._shared
        self._note()

    def over(self, number: int, system: int) -> None:
        del self._own[number]
        self._systems[system] -= 1
        self._note()

    def mean_and_peak(self) -> tuple[float, int]:
        """From the warm start to the last one's; zeros where that is no time."""
        begin, end = self._starts[int(_WARM * len(self._starts))], self._starts[-1]
        peak, area = 0, 0.0
        for (since, level), (until, _) in pairwise([*self._levels, (end, 0)]):
            spanned = min(until, end) - max(since, begin)
            if spanned > 0:
                area += level * spanned
                peak = max(peak, level)
        return (area / (end - begin) if end > begin else 0.0), peak

    def _note(self) -> None:
        shared = self._shared * sum(1 for users in self._systems.values() if users)
        self._levels.append((time.monotonic(), shared + sum(self._own.values())))


async def play(url: str, jobs: Sequence[AgentJob], shape: AgentLoad, pace: Pace) -> Done:
    """All jobs to their ends, each from its moment on."""
    done, live = Done(), _LiveBlocks(shape)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    places = asyncio.Semaphore(pace.at_once)
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_SECONDS, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        fields = {"model": model, "temperature": 0, "ignore_eos": True}
        begun = time.monotonic()

        async def one(number: int, job: AgentJob) -> None:
            await asyncio.sleep(begun + job.starts_s / pace.rate - time.monotonic())
            async with places:
                await _Job(number, job, shape, pace.tool_scale, done, live).run(client, fields)

        await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs)))
    done.seconds = time.monotonic() - begun
    done.live_blocks_mean, done.live_blocks_peak = live.mean_and_peak()
    return done


class _Job:
    """One agent."""

    def __init__(
        self,
        number: int,
        job: AgentJob,
        shape: AgentLoad,
        tool_scale: float,
        done: Done,
        live: _LiveBlocks,
    ) -> None:
        self._number = number
        self._job = job
        self._tool_scale = tool_scale
        self._done = done
        self._live = live
        self._rng = random.Random(f"{shape.seed}:{number}")
        system = random.Random(f"{shape.seed}:system {job.system}")
        self._said = _IDS.prompt(system, shape.system_tokens)

    async def run(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        started = time.monotonic()
        self._live.begins(self._number, self._job.system)
        try:
            if await self._turns(client, fields):
                self._done.job_seconds.append(time.monotonic() - started)
            else:
                self._done.num_failed += 1
        finally:
            self._live.over(self._number, self._job.system)

    async def _turns(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> bool:
        for turn in self._job.turns:
            self._said += _IDS.prompt(self._rng, turn.new_tokens)
            self._live.has(self._number, len(self._said))
            body = {
                **fields,
                "prompt": self._said,
                "max_tokens": turn.output_tokens,
                "return_token_ids": True,
                "agent_hint": {
                    "job_id": f"agent-{self._number}",
                    "is_last_step": not turn.tool,
                },
            }
            if not await self._ask(client, body):
                return False
            self._live.has(self._number, len(self._said))
            await asyncio.sleep(turn.tool_s * self._tool_scale)
        return True

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> bool:
        """Takes up what was answered; False where nothing was."""
        self._done.num_requests += 1
        try:
            response = await client.post("/v1/completions", json=body)
        except httpx.HTTPError:
            return False
        if response.status_code != httpx.codes.OK:
            return False
        answer = response.json()
        usage = answer["usage"]
        self._done.prompt_tokens += usage["prompt_tokens"]
        self._done.output_tokens += usage["completion_tokens"]
        self._done.found_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self._said += answer["choices"][0]["token_ids"]
        return True
