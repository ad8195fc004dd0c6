"""Sessions of a real daemon by a real client: every turn equals a separate request."""

import asyncio
import json

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.reference import Reference
from tests.e2e.session_client import FIELDS, TEXTS, choice, merged, opened, send, turn


@pytest.fixture
def daemon(exact_daemon: Daemon) -> Daemon:
    return exact_daemon


@pytest.mark.suite("settings")
async def test_three_session_turns_equal_three_separate_requests(
    daemon: Daemon, reference: Reference
) -> None:
    """The second chunk is sent after the first turn, the third during the second turn."""
    chunks = [list(reference.tokenizer.encode(text)) for text in TEXTS]
    async with opened(daemon) as client:
        await send(client, "input", prompt=chunks[0], **FIELDS)
        turns = [await turn(client)]
        await send(client, "input", prompt=chunks[1])
        await send(client, "input", prompt=chunks[2])
        await send(client, "end")
        turns += [await turn(client), await turn(client)]
        with pytest.raises(ConnectionClosed) as closed:
            await client.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1000
    assert [prompt for prompt, _ in turns] == merged(chunks, [output for _, output in turns])
    reference.assert_greedy(turns)
    async with httpx.AsyncClient(base_url=daemon.url, timeout=60) as http:
        for prompt, output in turns:
            body = {"prompt": prompt, **FIELDS}
            fresh = (await http.post("/v1/completions", json=body)).json()["choices"][0]
            reference.assert_greedy([(prompt, fresh["token_ids"])])
            assert len(fresh["token_ids"]) == len(output)


@pytest.mark.suite("settings")
async def test_a_disconnect_ends_the_session(daemon: Daemon) -> None:
    async with opened(daemon) as client:
        await send(client, "input", prompt="Once", max_tokens=2000, ignore_eos=True)
        await client.recv()
    assert await asyncio.to_thread(
        eventually, lambda: daemon.metric("vllm:num_requests_running") == 0
    )


@pytest.mark.suite("chaos")
async def test_a_session_survives_its_worker_and_reports_the_death_of_its_engine(
    reference: Reference,
) -> None:
    chunks = [list(reference.tokenizer.encode(text)) for text in TEXTS]
    with Daemon("--dtype", "float32") as daemon:
        async with opened(daemon) as client:
            await send(client, "input", prompt=chunks[0], **FIELDS)
            turns = [await turn(client)]
            daemon.processes()["worker"].kill()  # between two turns
            await send(client, "input", prompt=chunks[1], max_tokens=200)
            first = await choice(client)
            daemon.processes()["worker"].kill()  # within a turn
            turns.append(await turn(client, first))
            assert len(turns[1][1]) == 200
            # in a thread: meanwhile the client answers the server's pings
            await asyncio.to_thread(reference.assert_greedy, turns)
            daemon.processes()["engine_core"].kill()
            error = json.loads(await asyncio.wait_for(client.recv(), 60))["error"]
            assert error["message"] == "the session ended with its engine"
            with pytest.raises(ConnectionClosed) as closed:
                await client.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1011
        async with opened(daemon) as client:  # waits for the next engine
            await send(client, "input", prompt=chunks[0], **FIELDS)
            assert await turn(client) == turns[0]
