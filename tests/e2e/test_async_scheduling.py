"""Overlapped steps through the daemon: the tokens are those of one step at a time.

The prompts and the reference are test_parity's, so tokens that were compared there
are not computed again.
"""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.prompts import prompts
from tests.e2e.reference import Reference
from tests.e2e.test_parity import all_at_once, check, client_of, complete, half_of_them

pytestmark = pytest.mark.long

FLAGS = ("--dtype", "float32", "--async-scheduling")
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def token_prompts(reference: Reference) -> Prompts:
    return prompts(reference.tokenizer.encode)


@pytest.fixture(scope="module")
def overlapped() -> Iterator[Daemon]:
    with Daemon(*FLAGS) as running:
        yield running


async def test_all_at_once_cold(
    overlapped: Daemon, reference: Reference, token_prompts: Prompts
) -> None:
    assert overlapped.metric("vllm:prefix_cache_hits_total") == 0
    outputs = await all_at_once(overlapped, token_prompts)
    check(reference, token_prompts, outputs)


async def test_half_of_them_aborted(
    overlapped: Daemon, reference: Reference, token_prompts: Prompts
) -> None:
    """Over prefix hits, which are those of the test before."""
    outputs = await half_of_them(overlapped, token_prompts)
    assert eventually(lambda: overlapped.metric("vllm:num_requests_running") == 0)
    assert overlapped.metric("vllm:kv_cache_usage_perc") == 0
    assert overlapped.metric("vllm:corrupted_requests_total") == 0
    check(reference, token_prompts[::2], outputs)


def test_a_stop_string_ends_the_text_and_nothing_of_the_step_behind_it_is_seen(
    daemon: Daemon, overlapped: Daemon
) -> None:
    ask = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 30, "temperature": 0, "stop": [" 9"]}
    ask |= {"model": "smollm2-135m-instruct", "logprobs": 1}
    clients = [
        openai.OpenAI(base_url=f"{each.url}/v1", api_key="none", max_retries=0)
        for each in (daemon, overlapped)
    ]
    usual, found = (client.completions.create(**ask) for client in clients)
    chunks = clients[1].completions.create(**ask, stream=True)
    streamed = "".join(chunk.choices[0].text for chunk in chunks)
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].text.endswith("8,")
    assert streamed == found.choices[0].text == usual.choices[0].text
    assert found.choices[0].logprobs.tokens == usual.choices[0].logprobs.tokens
    assert found.usage.completion_tokens == usual.usage.completion_tokens
    assert eventually(lambda: overlapped.metric("vllm:num_requests_running") == 0)


async def test_preempted_by_priority_in_flight(
    reference: Reference, token_prompts: Prompts
) -> None:
    some = token_prompts[:-2]  # the longest two cost as much as all others
    flags = ("--scheduling-policy", "priority", "--num-gpu-blocks-override", "180")
    with Daemon(*FLAGS, *flags) as daemon:
        async with client_of(daemon) as client:
            outputs = await asyncio.gather(
                *(complete(client, each, priority=-i % 7) for i, each in enumerate(some))
            )
        preemptions = daemon.metric("vllm:num_preemptions_total")
        assert daemon.metric("vllm:kv_cache_usage_perc") == 0
        assert httpx.get(f"{daemon.url}/health").status_code == 200
    assert preemptions > 0
    print(f"{preemptions:.0f} preemptions")
    check(reference, some, outputs)
