"""The same kind of load against daemons with a model: one daemon a policy, one after the other.

Jobs, arrivals and tools are drawn as for the simulation; tools' times are scaled down, and waited
for. A turn is a completion of token ids, so that its prompt is exactly what was said and what is
new, and gets as many tokens as the draw says. Nobody calls a tool by name here: a daemon learns
from the durations of all calls alike. A request that fails ends its job, and the run says so.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import httpx
from rich.table import Table

from deploy.loadtest.agents.grid import COMMAND
from deploy.loadtest.agents.machines import BASELINE, VARIANTS, agent_load
from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.datasets.material import TokenIds
from deploy.loadtest.line_program import LineProgram
from deploy.loadtest.summary import quantile
from proto.codec import changed
from proto.errors import TokendError
from proto.replay import AgentJob, AgentLoad, ReplayAnswer, ReplayOrder

_ANSWER_SECONDS: Final = 3600.0
_HOST_BYTES: Final = 4 << 30
_TIER: Final = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": _HOST_BYTES},
}
_IDS: Final = TokenIds()


@dataclass(frozen=True, kw_only=True)
class RealLoad:
    """tool_scale: factor of tools' times. num_blocks: of each daemon's pool."""

    num_jobs: int
    seeds: list[int]
    variants: list[str]
    jobs_per_second: float
    tool_scale: float
    num_blocks: int
    turns: float
    serve_flags: list[str]


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """One policy and one seed. pins_*: as the daemon counts them."""

    seed: int
    variant: str
    num_requests: int
    num_failed: int
    job_s_mean: float
    job_s_p50: float
    job_s_p99: float
    prompt_tokens: int
    found_percent: float
    preemptions: int
    ratio_mean: float | None = None
    ratio_p99: float | None = None


@dataclass
class _Done:
    """What came of all jobs of a run."""

    seconds: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0


def measure_all(load: RealLoad) -> list[RealRun]:
    """Seeds, in them policies; raises TokendError where a daemon does not start."""
    found: list[RealRun] = []
    with LineProgram(COMMAND) as program:
        for seed in load.seeds:
            shape = _shape(load, seed)
            answer = program.play(ReplayOrder(load=shape, draw=True), ReplayAnswer, "a drawn load")
            if not answer.jobs:
                raise TokendError(f"tokend bench agents: {answer.error or 'no jobs'}")
            runs = [_measure(load, shape, answer.jobs, seed, name) for name in load.variants]
            base = next((each for each in runs if each.variant == BASELINE), None)
            found += [_compared(each, base) for each in runs]
    return found


def document(found: Sequence[RealRun]) -> str:
    """Units in the names."""
    plain = {"command": "tokend bench agents --real", "runs": [asdict(each) for each in found]}
    return json.dumps(plain, indent=1) + "\n"


def table(found: Sequence[RealRun]) -> Table:
    """A row a run."""
    made = Table(title="job completion with a model, s; ratios: fcfs by this one")
    made.add_column("policy")
    for title in ("seed", "mean", "p50", "p99", "ratio of means", "of p99", "found", "preempted"):
        made.add_column(title, justify="right")
    made.add_column("requests (failed)", justify="right")
    for each in found:
        made.add_row(
            each.variant,
            str(each.seed),
            f"{each.job_s_mean:.2f}",
            f"{each.job_s_p50:.2f}",
            f"{each.job_s_p99:.2f}",
            "-" if each.ratio_mean is None else f"{each.ratio_mean:.2f}",
            "-" if each.ratio_p99 is None else f"{each.ratio_p99:.2f}",
            f"{each.found_percent:.1f} %",
            str(each.preemptions),
            f"{each.num_requests} ({each.num_failed})",
        )
    return made


def _shape(load: RealLoad, seed: int) -> AgentLoad:
    return changed(
        agent_load(load.num_jobs, seed),
        turns=load.turns,
        jobs_per_second=load.jobs_per_second,
    )


def _measure(
    load: RealLoad, shape: AgentLoad, jobs: list[AgentJob], seed: int, name: str
) -> RealRun:
    flags = [*VARIANTS[name].flags(), "--num-gpu-blocks-override", str(load.num_blocks)]
    flags += ["--max-num-queued-reqs", "0", "--max-num-queued-tokens", "0"]
    if VARIANTS[name].has_tier:
        flags += ["--kv-transfer-config", json.dumps(_TIER)]
    with MeasuredDaemon([*flags, *load.serve_flags]) as daemon:
        done = asyncio.run(play(daemon.url, jobs, shape, load.tool_scale))
        preemptions = daemon.metric("vllm:num_preemptions_total")
    if not done.seconds:
        raise TokendError(f"tokend bench agents: not one job came to its end under {name}")
    return RealRun(
        seed=seed,
        variant=name,
        num_requests=done.num_requests,
        num_failed=done.num_failed,
        job_s_mean=statistics.fmean(done.seconds),
        job_s_p50=quantile(done.seconds, 0.5),
        job_s_p99=quantile(done.seconds, 0.99),
        prompt_tokens=done.prompt_tokens,
        found_percent=100 * done.found_tokens / done.prompt_tokens,
        preemptions=round(preemptions),
    )


async def play(url: str, jobs: list[AgentJob], shape: AgentLoad, tool_scale: float) -> _Done:
    """All jobs to their ends, each from its moment on."""
    done = _Done()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_SECONDS, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        begun = time.monotonic()

        async def one(number: int, job: AgentJob) -> None:
            await asyncio.sleep(begun + job.starts_s - time.monotonic())
            fields = {"model": model, "temperature": 0, "ignore_eos": True}
            await _Job(number, job, shape, tool_scale, done).run(client, fields)

        await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs)))
    return done


class _Job:
    """One agent."""

    def __init__(
        self, number: int, job: AgentJob, shape: AgentLoad, tool_scale: float, done: _Done
    ) -> None:
        self._name = f"agent-{number}"
        self._job = job
        self._tool_scale = tool_scale
        self._done = done
        self._rng = random.Random(f"{shape.seed}:{number}")
        system = random.Random(f"{shape.seed}:system {job.system}")
        self._said = _IDS.prompt(system, shape.system_tokens)

    async def run(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        started = time.monotonic()
        for turn in self._job.turns:
            self._said += _IDS.prompt(self._rng, turn.new_tokens)
            body = {
                **fields,
                "prompt": self._said,
                "max_tokens": turn.output_tokens,
                "return_token_ids": True,
                "agent_hint": {"job_id": self._name, "is_last_step": not turn.tool},
            }
            if not await self._ask(client, body):
                self._done.num_failed += 1
                return
            await asyncio.sleep(turn.tool_s * self._tool_scale)
        self._done.seconds.append(time.monotonic() - started)

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
        self._done.found_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self._said += answer["choices"][0]["token_ids"]
        return True


def _compared(run: RealRun, base: RealRun | None) -> RealRun:
    if base is None:
        return run
    return replace(
        run,
        ratio_mean=base.job_s_mean / run.job_s_mean,
        ratio_p99=base.job_s_p99 / run.job_s_p99,
    )
