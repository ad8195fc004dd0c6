"""Every family through the daemon, greedy token for token against transformers.

From a Hugging Face folder with two tensor-parallel workers, which deal out experts of a mixture,
and from a GGUF file with one worker. Each daemon completes prompts one after another, then all
concurrently in chunks and with preemptions, loses a worker while it streams, and finds prefixes.
tests/worker/models/test_families.py does the same without processes, in less time.
"""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.reference import Reference
from tests.e2e.test_parity import body
from tests.fakes.tiny_families import GENERATING, IN_GGUF_FILES, is_mixture, save_folder, save_gguf

pytestmark = pytest.mark.suite("families")

BLOCK = 16
NUM_OUTPUT_TOKENS = 24
TIGHT = ("--dtype", "float32", "--num-gpu-blocks-override", "30", "--max-num-batched-tokens", "32")
PROMPTS = [[(7 * i + 3 * j * j) % 96 for j in range(9 + 8 * i)] for i in range(12)]
"""Of 9 to 97 tokens: together they need 59 blocks, and the pool has 29."""


async def complete(daemon: Daemon, prompts: list[list[int]]) -> list[list[int]]:
    """Complete prompts concurrently."""
    async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
        requests = (
            client.post("/v1/completions", json=body(prompt, max_tokens=NUM_OUTPUT_TOKENS))
            for prompt in prompts
        )
        answers = [answer.raise_for_status().json() for answer in await asyncio.gather(*requests)]
    return [answer["choices"][0]["token_ids"] for answer in answers]


async def complete_during_a_death(daemon: Daemon, prompts: list[list[int]]) -> list[list[int]]:
    """Complete prompts and kill a worker after the first token of the first prompt."""
    first, *others = prompts
    request = body(first, max_tokens=NUM_OUTPUT_TOKENS, stream=True)
    tokens: list[int] = []
    async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
        pending = asyncio.ensure_future(complete(daemon, others))
        async with client.stream("POST", "/v1/completions", json=request) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if not tokens:
                        os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)
                    tokens += token_ids_of(line)
        return [tokens, *await pending]


def token_ids_of(line: str) -> list[int]:
    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
    found: list[int] = choice["token_ids"]
    return found


async def prove(daemon: Daemon, model: Any) -> None:
    """Complete the prompts, and assert that each of the situations has happened."""
    reference = Reference(model, None)

    def check(prompts: list[list[int]], outputs: list[list[int]]) -> None:
        assert [len(output) for output in outputs] == [NUM_OUTPUT_TOKENS] * len(prompts)
        reference.assert_greedy(list(zip(prompts, outputs, strict=True)))

    for prompt in PROMPTS[::4]:
        check([prompt], await complete(daemon, [prompt]))
    assert daemon.metric("vllm:num_preemptions_total") == 0
    check(PROMPTS, await complete(daemon, PROMPTS))
    assert daemon.metric("vllm:num_preemptions_total") > 0
    before = daemon.process_ids()
    check(PROMPTS[-4:], await complete_during_a_death(daemon, PROMPTS[-4:]))
    # The answers may be complete before the supervisor sees the death.
    assert eventually(lambda: daemon.process_ids() != before), "the worker did not die"
    last = PROMPTS[-1:]
    await complete(daemon, last)
    hits = daemon.metric("vllm:prefix_cache_hits_total")
    check(last, await complete(daemon, last))
    found = daemon.metric("vllm:prefix_cache_hits_total") - hits
    assert found == (len(last[0]) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("architecture", GENERATING)
async def test_a_folder_with_two_workers(architecture: str, tmp_path: Path) -> None:
    model = save_folder(architecture, tmp_path / "model")
    experts = ("--enable-expert-parallel",) if is_mixture(architecture) else ()
    flags = (*TIGHT, "--tensor-parallel-size", "2", *experts)
    with Daemon(str(tmp_path / "model"), *flags) as daemon:
        await prove(daemon, model)


@pytest.mark.parametrize("architecture", IN_GGUF_FILES)
async def test_a_gguf_file(architecture: str, tmp_path: Path) -> None:
    path, model = save_gguf(architecture, tmp_path)
    with Daemon(str(path), *TIGHT) as daemon:
        await prove(daemon, model)
