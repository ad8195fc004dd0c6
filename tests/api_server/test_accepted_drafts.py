"""`accepted_drafts`: which tokens of an answer were accepted from drafts, for requests that ask."""

import asyncio

import pytest

from proto.messages.engine_io import FinishReason

PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
INPUTS = {
    "completion": {"prompt": "hello"},
    "chat": {"messages": [{"role": "user", "content": "hello"}]},
}
FLAGS = [False, True, True, False, False, True]
"""The flags do not depend on how the tokens are cut into deltas."""


async def answer(front_end, endpoint, *, stream, **fields):
    """Return the choices of an answer with two choices, or those of its events."""
    body = INPUTS[endpoint] | {"n": 2, "max_tokens": 6, **fields}
    if stream:
        task = asyncio.create_task(front_end.events(PATHS[endpoint], **body))
    else:
        task = asyncio.create_task(front_end.http.post(PATHS[endpoint], json=body))
    engine = front_end.engine
    request = await engine.requests.get()
    engine.emit(request, [40], choice=1)
    engine.emit(request, [40])
    engine.emit(request, [41, 42, 43], num_accepted_drafts=2)
    engine.emit(request, [44, 45, 46], choice=1)
    engine.emit(request, [47], choice=1, finish=FinishReason.LENGTH)
    engine.emit(request, [44])
    engine.emit(request, [45], num_accepted_drafts=1, finish=FinishReason.LENGTH)
    if not stream:
        return (await task).json()["choices"]
    *events, end = await task
    assert end == "[DONE]"
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.parametrize(
    ("endpoint", "stream", "extras"),
    [
        ("completion", False, {}),
        ("completion", False, {"logprobs": 1, "echo": True}),
        ("completion", True, {"logprobs": 1, "echo": True}),
        ("completion", True, {"stream_interval": 3}),
        ("completion", True, {"detokenize": False}),
        ("chat", False, {"logprobs": True}),
        ("chat", True, {}),
        ("chat", True, {"logprobs": True, "stream_interval": 3}),
    ],
)
async def test_each_token_has_a_value(start, endpoint, stream, extras):
    fields = {"return_accepted_drafts": True, "return_token_ids": True, **extras}
    async with start(accepts=True) as front_end:
        found = {0: [], 1: []}
        for choice in await answer(front_end, endpoint, stream=stream, **fields):
            flags = choice.get("accepted_drafts", [])
            assert len(flags) == len(choice.get("token_ids", []))
            found[choice["index"]] += flags
        assert found == {0: FLAGS, 1: [False] * 5}


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_other_requests_have_no_such_field(start, endpoint, stream):
    async with start(accepts=True) as front_end:
        for choice in await answer(front_end, endpoint, stream=stream, return_token_ids=True):
            assert "accepted_drafts" not in choice
        alone = await answer(front_end, endpoint, stream=stream, return_accepted_drafts=True)
        assert not any("token_ids" in choice for choice in alone)
        flags = [flag for choice in alone for flag in choice.get("accepted_drafts", [])]
        assert sum(flags) == 3


async def test_an_answer_keeps_them_when_the_engine_dies(start):
    async with start(accepts=True) as front_end:
        fields = {"return_accepted_drafts": True, "max_tokens": 5}
        task = asyncio.create_task(front_end.complete(**fields))
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40, 41], num_accepted_drafts=1)
        stream = front_end.app_state.client._open[request.request_id].stream
        while not stream.num_completion_tokens:
            await asyncio.sleep(0)
        engine = await front_end.lose_engine()
        engine.announce()
        again = await engine.requests.get()
        engine._sent[again.request_id, 0] = 2
        engine.emit(again, [42, 43, 44], num_accepted_drafts=2, finish=FinishReason.LENGTH)
        (choice,) = (await task).json()["choices"]
        assert choice["accepted_drafts"] == [True, False, True, True, False]


async def test_an_echo_alone_has_none(start):
    async with start(accepts=True) as front_end:
        fields = {"echo": True, "max_tokens": 0, "return_accepted_drafts": True}
        task = asyncio.create_task(front_end.complete(**fields))
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await task).json()["choices"][0]["accepted_drafts"] == []
