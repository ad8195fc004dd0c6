"""Transfer parameters of a KV connector at the end of a request (KVH-10)."""

import asyncio

import pytest

from proto.messages.engine_io import FinishReason

FIELDS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
TRANSFER_PARAMS = {"remote_block_ids": [7, 3], "remote_host": "a"}


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("expected", [{"kv_transfer_params": TRANSFER_PARAMS}, {}])
async def test_transfer_params_are_in_the_last_chunk_and_the_body(start, path, stream, expected):
    async with start() as front_end:
        fields = {**FIELDS[path], "max_tokens": 2}
        whole = front_end.http.post
        ask = front_end.events(path, **fields) if stream else whole(path, json=fields)
        answer = asyncio.create_task(ask)
        request = await front_end.engine.requests.get()
        front_end.engine.accept(request)
        front_end.engine.emit(request, [40])
        encoded = b'{"remote_block_ids":[7,3],"remote_host":"a"}' if expected else b""
        front_end.engine.emit(request, [41], finish=FinishReason.LENGTH, kv_transfer_params=encoded)
        events = (await answer)[:-1] if stream else [(await answer).json()]
        key = "kv_transfer_params"
        assert {name: value for name, value in events[-1].items() if name == key} == expected
        assert not any(key in event for event in events[:-1])
