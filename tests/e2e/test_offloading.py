"""KV offloading to host memory through the daemon: the same greedy tokens in float32.

The pool is so small that every prompt overwrites the last one's blocks; when a prompt returns its
KV is loaded. Covers the packaged model and one with six KV cache groups, offloaded blocks of one
and four device blocks, one worker and two.
"""

import asyncio
import json
import os
import signal
from functools import partial

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.prompts import source_text

pytestmark = pytest.mark.suite("media")

SMOLLM, GEMMA = "smollm2-135m-instruct", "gemma3-270m"
NUM_PROMPTS = 4
NUM_OUTPUT_TOKENS = 16
LIMIT_SECONDS = 300.0

Tokens = list[list[int]]


def transfer(factor: int, **extra: object) -> tuple[str, str]:
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 30,
            "block_size": 16 * factor,
            **extra,
        },
    }
    return "--kv-transfer-config", json.dumps(config)


def flags(model: str, num_workers: int) -> list[str]:
    """A pool that holds one and a half prompts."""
    num_blocks = 700 if model == GEMMA else 120
    return [
        *(model, "--dtype", "float32"),
        *("--num-gpu-blocks-override", str(num_blocks)),
        *("--tensor-parallel-size", str(num_workers)),
    ]


def body(number: int) -> dict[str, object]:
    text = source_text()[3000 * number : 3000 * number + 4000]
    return {
        "prompt": text,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def generate(daemon: Daemon, numbers: list[int]) -> Tokens:
    """Complete the prompts one after the other."""
    tokens = []
    for number in numbers:
        response = httpx.post(
            f"{daemon.url}/v1/completions", json=body(number), timeout=LIMIT_SECONDS
        )
        assert response.status_code == 200, response.text
        tokens.append(response.json()["choices"][0]["token_ids"])
    return tokens


async def generate_at_once(daemon: Daemon, numbers: list[int]) -> Tokens:
    async with httpx.AsyncClient(timeout=LIMIT_SECONDS) as client:
        posts = [client.post(f"{daemon.url}/v1/completions", json=body(each)) for each in numbers]
        return [each.json()["choices"][0]["token_ids"] for each in await asyncio.gather(*posts)]


def has_started(daemon: Daemon, num_loads: float) -> bool:
    """Requests are running, or more blocks were loaded."""
    running = daemon.metric("vllm:num_requests_running") > 0
    return running or daemon.metric("vllm:kv_offload_load_size_count") > num_loads


ROUNDS = [*range(NUM_PROMPTS), *range(NUM_PROMPTS)]


@pytest.fixture(scope="module", params=[SMOLLM, GEMMA])
def case(request: pytest.FixtureRequest) -> tuple[str, Tokens]:
    """A model and its tokens without a connector."""
    with Daemon(*flags(request.param, 1)) as daemon:
        return request.param, generate(daemon, list(range(NUM_PROMPTS)))


@pytest.mark.parametrize(("factor", "num_workers"), [(4, 1), (1, 1), (1, 2), (4, 2)])
def test_offloading_does_not_change_greedy_tokens(
    case: tuple[str, Tokens], factor: int, num_workers: int
) -> None:
    model, expected = case
    if num_workers == 2 and model == GEMMA:
        pytest.skip("a single KV head is on one worker")
    with Daemon(*flags(model, num_workers), *transfer(factor)) as daemon:
        assert generate(daemon, ROUNDS) == expected * 2
        assert daemon.metric("vllm:kv_offload_load_size_count") >= NUM_PROMPTS
        assert daemon.metric("vllm:kv_offload_load_bytes_total") > 0
        assert daemon.metric("tokend:kv_offload_failures_total") == 0
        assert 0 < daemon.metric("vllm:kv_offload_cpu_cache_usage_perc") < 1


@pytest.mark.parametrize("policy", ["lru", "arc"])
async def test_concurrent_requests_with_overlapped_steps_and_a_small_medium(
    case: tuple[str, Tokens], policy: str
) -> None:
    """With evictions from the pool and the medium, and preemptions."""
    model, expected = case
    small = transfer(2, cpu_bytes_to_use=128 << 20, eviction_policy=policy)
    with Daemon(*flags(model, 1), "--async-scheduling", *small) as daemon:
        for _ in range(2):
            assert await generate_at_once(daemon, list(range(NUM_PROMPTS))) == expected
        assert daemon.metric("vllm:kv_offload_load_size_count") > 0


@pytest.mark.parametrize("victim", ["worker", "engine_core"])
async def test_a_death_during_copies_changes_no_token(
    case: tuple[str, Tokens], victim: str
) -> None:
    """The offloaded blocks are lost with the worker's memory or the engine's index."""
    model, expected = case
    with Daemon(*flags(model, 1), *transfer(1)) as daemon:
        assert generate(daemon, list(range(NUM_PROMPTS))) == expected
        for _ in range(2):
            loads = daemon.metric("vllm:kv_offload_load_size_count")
            answers = asyncio.create_task(generate_at_once(daemon, list(range(NUM_PROMPTS))))
            await asyncio.to_thread(eventually, partial(has_started, daemon, loads))
            os.kill(daemon.processes()[victim].pid, signal.SIGKILL)
            assert await answers == expected
        assert generate(daemon, ROUNDS) == expected * 2
        assert daemon.metric("vllm:kv_offload_load_size_count") > 0
        assert eventually(lambda: daemon.metric("vllm:kv_cache_usage_perc") == 0)


@pytest.mark.suite("daemons")
def test_invalid_settings_end_the_start_with_the_key_named() -> None:
    daemon = Daemon(*transfer(1, cpu_bytes_to_use="much"))
    assert daemon.wait_exit(60.0) == 2
    assert "kv_connector_extra_config.cpu_bytes_to_use is wrong" in daemon.text
