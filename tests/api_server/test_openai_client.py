"""The public OpenAI client, sync and async, streaming and not."""

import asyncio

import openai
import pytest

from proto.errors import ErrorInfo

MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = "Hi 😀 there"


def sync_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


def async_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


def use_sync(url: str) -> None:
    with sync_client(url) as client:
        assert client.models.list().data[0].id == "toy"
        assert client.models.retrieve("toy").id == "toy"
        completion = client.completions.create(model="toy", prompt="hello", logprobs=2)
        assert completion.choices[0].text == TEXT
        assert completion.choices[0].logprobs.tokens
        chunks = list(client.completions.create(model="toy", prompt="hello", stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
        chat = client.chat.completions.create(
            model="toy", messages=MESSAGES, logprobs=True, top_logprobs=1
        )
        assert chat.choices[0].message.content == TEXT
        assert chat.choices[0].logprobs.content[0].top_logprobs
        chunks = list(
            client.chat.completions.create(
                model="toy",
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage == chat.usage
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="toy", prompt="")
        assert caught.value.param == "prompt"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-9", prompt="x")


async def test_sync(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        await asyncio.to_thread(use_sync, front_end.url)


async def test_async(start, scripted):
    async with start(scripted(TEXT)) as front_end, async_client(front_end.url) as client:
        chat = await client.chat.completions.create(model="toy", messages=MESSAGES)
        assert chat.choices[0].message.content == TEXT
        stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT
        completion = await client.completions.create(model="toy", prompt=["a", "b"])
        assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
        async with client.chat.completions.stream(model="toy", messages=MESSAGES) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.content == TEXT


async def test_parameters_and_the_response_id(start, scripted):
    async with start(scripted(TEXT)) as front_end, async_client(front_end.url) as client:
        chat = await client.chat.completions.create(
            model="toy",
            messages=MESSAGES,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={"5": -100},
            extra_headers={"X-Request-Id": "mine"},
            extra_body={"repetition_penalty": 1.1, "bad_words": ["sea"]},
        )
        assert chat._request_id == "mine"
        edits = (await front_end.engine.requests.get()).sampling_params.edits
        assert (edits.frequency_penalty, edits.presence_penalty) == (0.5, -0.5)
        assert (edits.bias_token_ids, edits.bias_values) == ((5,), (-100.0,))
        assert edits.repetition_penalty == 1.1
        assert edits.bad_words


async def test_a_disconnect_aborts_the_request(start):
    async with start(accepts=True) as front_end, async_client(front_end.url) as client:
        stream = await client.completions.create(model="toy", prompt="hello", stream=True)
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40])
        await anext(stream)
        await stream.close()
        assert (await front_end.engine.aborts.get()).request_id == request.request_id


async def test_an_error_in_a_stream_is_raised(start):
    async with start(accepts=True) as front_end, async_client(front_end.url) as client:
        stream = await client.completions.create(model="toy", prompt="hello", stream=True)
        request = await front_end.engine.requests.get()
        front_end.engine.refuse(request, ErrorInfo("internal", "broken"))
        with pytest.raises(openai.APIError, match="broken"):
            await anext(stream)
