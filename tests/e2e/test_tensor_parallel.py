"""Two tensor-parallel workers give transformers' tokens, and each holds its shard.

SmolLM2 has three KV heads: one worker has two with six query heads, the other one with three. The
prompts of test_parity.py are completed concurrently, over prefix hits, with preemptions and two
steps in flight.
"""

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.daemon import Daemon, DaemonPool
from tests.e2e.prompts import prompts
from tests.e2e.reference import Reference
from tests.e2e.test_parity import assert_greedy_tokens, complete_concurrently

pytestmark = pytest.mark.suite("models")

TWO = ("--tensor-parallel-size", "2", "--dtype", "float32")
MOST = 0.6
"""Of the weights on one worker."""


@pytest.fixture(scope="module")
def token_prompts(reference: Reference) -> list[list[int]]:
    return prompts(reference.tokenizer.encode)


@pytest.fixture
def two(daemons: DaemonPool) -> Iterator[Daemon]:
    with daemons.borrow(*TWO, "--num-gpu-blocks-override", "180", "--async-scheduling") as running:
        yield running


async def test_concurrent_requests_with_preemptions_and_two_steps_in_flight(
    two: Daemon, reference: Reference, token_prompts: list[list[int]]
) -> None:
    outputs = await complete_concurrently(two, token_prompts)
    assert_greedy_tokens(reference, token_prompts, outputs)
    preemptions = two.metric("vllm:num_preemptions_total")
    assert preemptions > 0
    print(f"{preemptions:.0f} preemptions")


async def test_tokens_are_the_same_over_prefix_hits(
    two: Daemon, reference: Reference, token_prompts: list[list[int]]
) -> None:
    """The shorter half of the prompts, all of whose blocks stay in the pool."""
    some = sorted(token_prompts, key=len)[: len(token_prompts) // 2]
    await complete_concurrently(two, some)
    hits = two.metric("vllm:prefix_cache_hits_total")
    assert_greedy_tokens(reference, some, await complete_concurrently(two, some))
    full_blocks = sum((len(prompt) - 1) // 16 * 16 for prompt in some)
    assert two.metric("vllm:prefix_cache_hits_total") - hits == full_blocks > 0


def weights_of_workers(daemon: Daemon) -> list[float]:
    """MiB of weights as every worker logs them."""
    lines = re.findall(r"INFO worker (\d): weights: (.*)", daemon.text)
    assert sorted(rank for rank, _ in lines) == [str(rank) for rank in range(len(lines))]
    return [sum(map(float, re.findall(r"([\d.]+) MiB", line))) for _, line in sorted(lines)]


def test_every_worker_holds_its_shard_of_weights_and_kv(two: Daemon) -> None:
    weights = weights_of_workers(two)
    assert len(weights) == 2
    assert max(weights) <= MOST * sum(weights)
    assert "180 blocks" not in two.text
    assert "179 blocks of 16" in two.text


@pytest.mark.parametrize("form", ["packed+int8", "auto"])
async def test_the_files_blocks_are_sharded_without_conversion(form: str) -> None:
    """All cuts are between blocks: no weight becomes dense, and the sizes add up."""
    flags = () if form == "auto" else ("--cpu-weights", form)
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    texts, weights = [], []
    for parallel in ((), ("--tensor-parallel-size", "2")):
        with Daemon(*flags, *parallel) as daemon:
            async with httpx.AsyncClient(base_url=daemon.url, timeout=60) as client:
                response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            texts.append(response.json()["choices"][0]["text"])
            weights.append(weights_of_workers(daemon))
            assert "are dense" not in daemon.text
    (whole,), parts = weights
    assert texts[0].startswith(" Paris")
    assert texts[1].startswith(" Paris")
    assert len(parts) == 2
    assert max(parts) <= MOST * whole
    assert sum(parts) == pytest.approx(whole, rel=0.01)
