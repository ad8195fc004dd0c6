"""Log-probabilities of completions: of sampled tokens, an echoed prompt, the prompt alone."""

import asyncio

import pytest

from proto.messages.engine_io import FinishReason
from tests.fakes.fake_engine import pack_logprobs

PATH = "/v1/completions"


@pytest.mark.parametrize("number", [0, 1, 5])
async def test_logprobs(start, scripted, tokenizer, number):
    async with start(scripted(" world 😀")) as front_end:
        choice = (await front_end.complete(logprobs=number, max_tokens=60)).json()["choices"][0]
        logprobs = choice["logprobs"]
        ids = [*tokenizer.encode(" world 😀").ids, 2]
        assert len(logprobs["tokens"]) == len(ids)
        assert logprobs["tokens"][0] == tokenizer.decode(ids[:1])
        assert logprobs["token_logprobs"] == [-0.5] * len(ids)
        assert all(1 <= len(best) <= number + 1 for best in logprobs["top_logprobs"])
        assert logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"][-1] == len(" world 😀")
        assert front_end.engine.requests.get_nowait().sampling_params.logprobs == number
        events = await front_end.events(PATH, prompt="hello", logprobs=number, max_tokens=60)
        for key in logprobs:
            streamed = [
                value for event in events[:-1] for value in event["choices"][0]["logprobs"][key]
            ]
            assert streamed == logprobs[key]


async def test_logprobs_of_minus_infinity(start):
    async with start() as front_end:
        answer = asyncio.create_task(front_end.complete(logprobs=1))
        request = await front_end.engine.requests.get()
        front_end.engine.accept(request)
        front_end.engine.emit(
            request,
            [40],
            finish=FinishReason.LENGTH,
            logprobs=pack_logprobs([[(40, float("-inf")), (41, float("nan"))]], [3]),
        )
        logprobs = (await answer).json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(start, scripted, tokenizer, max_tokens, stream):
    """Requests of lm-eval: batched token ids, echo, one alternative, one token or none."""
    prompts = [tokenizer.encode(text).ids for text in ("hello fox", "lazy dog!")]
    async with start(scripted(" world")) as front_end:
        fields = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        if stream:
            events = await front_end.events(PATH, **fields)
            choices = sorted(
                (event["choices"][0] for event in events[:-1]), key=lambda each: each["index"]
            )
        else:
            body = (await front_end.complete(**fields)).json()
            choices = body["choices"]
            assert body["usage"]["completion_tokens"] == max_tokens * 2
        first = tokenizer.decode(tokenizer.encode(" world").ids[:1])
        for choice, ids, text in zip(choices, prompts, ("hello fox", "lazy dog!"), strict=True):
            logprobs = choice["logprobs"]
            assert choice["text"] == text + first * max_tokens
            assert choice["finish_reason"] == "length"
            assert len(logprobs["tokens"]) == len(ids) + max_tokens
            assert "".join(logprobs["tokens"]) == choice["text"]
            assert logprobs["token_logprobs"][0] is None
            assert logprobs["top_logprobs"][0] is None
            assert logprobs["token_logprobs"][1:] == [-0.5] * (len(ids) - 1 + max_tokens)
            starts = [
                len("".join(logprobs["tokens"][:at])) for at in range(len(logprobs["tokens"]))
            ]
            assert logprobs["text_offset"] == starts
        assert front_end.engine.requests.get_nowait().sampling_params.prompt_logprobs == 1


async def test_prompt_logprobs(start, scripted, tokenizer):
    async with start(scripted("!")) as front_end:
        fields = {"prompt": [40, 41, 42], "prompt_logprobs": 1, "echo": True, "logprobs": 2}
        choice = (await front_end.complete(**fields)).json()["choices"][0]
        rows = choice["prompt_logprobs"]
        text = tokenizer.decode([41])
        assert rows == [
            None,
            {"41": {"logprob": -0.5, "rank": 1, "decoded_token": text}},
            {"42": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.decode([42])}},
        ]
        assert len(choice["logprobs"]["top_logprobs"][1]) == 2
        for others in ({}, {"echo": True, "logprobs": 1}):
            choice = (await front_end.complete(prompt=[40], **others)).json()["choices"][0]
            assert choice["prompt_logprobs"] is None
