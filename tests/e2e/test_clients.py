"""The public OpenAI client against the running daemon."""

import asyncio

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("daemons")

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]


@pytest.fixture
def client(daemon: Daemon) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def async_client(daemon: Daemon) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0)


def test_the_models_endpoint_lists_the_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == 8192


def test_completion_streamed_equals_not_streamed(client: openai.OpenAI) -> None:
    request = {
        "model": MODEL,
        "prompt": "The capital of France is",
        "max_tokens": 20,
        "temperature": 0,
    }
    whole = client.completions.create(**request)
    chunks = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    assert "Paris" in whole.choices[0].text
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump() | {
        "prompt_tokens_details": chunks[-1].usage.prompt_tokens_details.model_dump()
    }
    assert whole.usage.completion_tokens == 20


def test_chat_streamed_equals_not_streamed(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**request)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


class Person(BaseModel):
    """The schema of a structured output."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def test_outputs_are_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Describe a person as JSON."}],
        "response_format": Person,
        "temperature": 0,
        "max_tokens": 100,
    }
    whole = client.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(whole, Person)
    with client.chat.completions.stream(**fields) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == whole


async def test_concurrent_async_streams(async_client: openai.AsyncOpenAI) -> None:
    async def collect_stream(seed: int) -> str:
        stream = await async_client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=16, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    together = await asyncio.gather(*(collect_stream(seed) for seed in range(8)))
    assert len(set(together)) == 8
    alone = [await collect_stream(seed) for seed in range(0, 8, 2)]
    assert together[::2] == alone


async def test_an_async_chat_completion(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=40, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(
        choice.message.content
    )
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content)


def test_choices_are_independent_and_repeatable(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "prompt": "A list of animals:", "max_tokens": 16, "seed": 5}
    three = client.completions.create(**request, n=3)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len({choice.text for choice in three.choices}) == 3
    again = client.completions.create(**request, n=3)
    assert [c.text for c in again.choices] == [c.text for c in three.choices]
    one = client.completions.create(**request)
    assert one.choices[0].text == three.choices[0].text


def test_echo_returns_logprobs_of_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The cat sat on the mat", echo=True, logprobs=1, max_tokens=1
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("The cat sat on the mat")
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + 1


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    request = {
        "model": MODEL,
        "prompt": "1, 2, 3, 4, 5,",
        "max_tokens": 30,
        "temperature": 0,
    }
    stopped = client.completions.create(**request, stop=[" 9"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text.endswith("8,")
    streamed = client.completions.create(**request, stop=[" 9"], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.choices[0].text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_aborts_within_a_step(
    daemon: Daemon, async_client: openai.AsyncOpenAI, stream: bool
) -> None:
    task = asyncio.create_task(
        async_client.completions.create(
            model=MODEL,
            prompt="Once",
            max_tokens=8000,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
    )
    running = asyncio.to_thread(eventually, lambda: daemon.metric("vllm:num_requests_running") == 1)
    assert await running
    if stream:
        await (await task).close()
    else:
        task.cancel()
    ended = asyncio.to_thread(eventually, lambda: daemon.metric("vllm:num_requests_running") == 0)
    assert await ended
    assert daemon.metric("vllm:kv_cache_usage_perc") == 0
