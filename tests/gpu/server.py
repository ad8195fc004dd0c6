"""The whole daemon on the GPU under load: 8B, all requests at once, over HTTP."""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.daemon import Daemon
from tests.gpu.checkpoint import write_checkpoint
from tests.gpu.phases import demand
from tests.gpu.random_model import CONFIGS

NUM_REQUESTS = 256
INPUT, OUTPUT = 512, 128


async def _load(url: str, num_requests: int, num_input: int, num_output: int) -> list[float]:
    """Seconds of each request; raises where one is not answered in full."""
    limits = httpx.Limits(max_connections=num_requests)

    async def ask(client: httpx.AsyncClient, index: int) -> float:
        prompt = [(index * 31 + place * 7) % 900 for place in range(num_input)]
        started = time.monotonic()
        answer = await client.post(
            f"{url}/v1/completions",
            json={
                "prompt": prompt,
                "max_tokens": num_output,
                "ignore_eos": True,
                "temperature": 0.0,
            },
        )
        answer.raise_for_status()
        usage = answer.json()["usage"]
        demand(usage["completion_tokens"] == num_output, f"request {index}: {usage}")
        return time.monotonic() - started

    async with httpx.AsyncClient(limits=limits, timeout=120.0) as client:
        return await asyncio.gather(*(ask(client, index) for index in range(num_requests)))


def daemon_8b() -> dict[str, Any]:
    """Tokens a second and times of 256 requests that come at once, after a warm-up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, CONFIGS["8B"])
        flags = ("--device", "cuda", "--attention-backend", "flashinfer")
        flags += ("--max-num-batched-tokens", "8192", "--max-model-len", "2048")
        started = time.monotonic()
        with Daemon(str(folder), *flags) as daemon:
            ready = time.monotonic() - started
            asyncio.run(_load(daemon.url, 8, INPUT, 8))
            started = time.monotonic()
            times = asyncio.run(_load(daemon.url, NUM_REQUESTS, INPUT, OUTPUT))
            seconds = time.monotonic() - started
    hundredths = statistics.quantiles(times, n=100)
    return {
        "ready in s": ready,
        "output tokens/s": NUM_REQUESTS * OUTPUT / seconds,
        "s a request, p50": hundredths[49],
        "s a request, p99": hundredths[98],
    }
