"""The client against a server in a thread, good and bad."""

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from deploy.bench.client import (
    CHAT,
    COMPLETIONS,
    BenchClient,
    BenchRequest,
    Target,
    base_url,
    first_model,
    is_up,
)
from deploy.bench.stream import RequestResult
from proto.errors import ConfigError, TokendError
from tests.fakes.openai_server import (
    FakeOpenAI,
    Respond,
    event,
    fake_openai,
    respond_normally,
    token,
)

ASK = BenchRequest(COMPLETIONS, {"prompt": [1, 2, 3]}, 4, checked=True)


async def asked(fake: FakeOpenAI, *asks: BenchRequest, **settings: Any) -> list[RequestResult]:
    client = BenchClient(Target(fake.url, "m", **settings))
    try:
        return [await client.send_request(each) for each in asks]
    finally:
        client.close()


async def failing(respond: Respond, **settings: Any) -> str:
    with fake_openai(respond) as fake:
        (result,) = await asked(fake, ASK, **settings)
    return result.error


async def test_requests_say_what_they_must_and_share_a_connection() -> None:
    chat = BenchRequest(CHAT, {"messages": [{"role": "user", "content": "a b"}]}, 2)
    with fake_openai() as fake:
        fields = {"temperature": 0.5, "ignore_eos": True}
        first, second = await asked(fake, ASK, chat, fields=fields, api_key="k")
    assert (first.output_tokens, first.input_tokens, first.num_chunks) == (4, 3, 4)
    assert (second.output_tokens, second.input_tokens) == (2, 2)
    assert first.text == "< 3]0>< 3]1>< 3]2>< 3]3>"
    assert second.text == ""  # nobody wants it
    assert 0 < first.ttft <= first.e2el
    (path, body), (chat_path, chat_body) = fake.seen
    assert (path, chat_path) == (COMPLETIONS, CHAT)
    assert body["prompt"] == [1, 2, 3]
    assert (body["temperature"], chat_body["temperature"]) == (0, 0.5)
    common = {"model": "m", "stream": True, "ignore_eos": True}
    assert common.items() <= body.items()
    assert fake.num_connections == 1
    assert "authorization: bearer k" in fake.heads[0].lower()


async def test_a_turn_names_its_job() -> None:
    with fake_openai() as fake:
        await asked(
            fake, ASK, BenchRequest(COMPLETIONS, {"prompt": [1]}, 2, job="j-1", is_last_step=True)
        )
    (_, without), (_, body) = fake.seen
    assert "agent_hint" not in without
    assert body["agent_hint"] == {"job_id": "j-1", "is_last_step": True}
    assert [("x-session-id: j-1" in head.lower()) for head in fake.heads] == [False, True]


async def test_what_goes_wrong_is_part_of_the_exchange() -> None:
    def half(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        yield token(path, "x")
        raise ConnectionError

    def error(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        return [token(path, "x"), event(error={"message": "out of blocks"})]

    assert await failing(half) == "the connection was closed during the response"
    assert await failing(error) == "out of blocks"
    assert "invalid event" in await failing(lambda path, body: [b"data: {]\n\n"])
    assert "without [DONE]" in await failing(lambda path, body: [token(path, "x")])


async def test_nobody_there_and_nobody_answering() -> None:
    with fake_openai() as fake:
        pass
    (result,) = await asked(fake, ASK)
    assert "Connect" in result.error

    released = threading.Event()

    def never(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        released.wait(20.0)
        return []

    with fake_openai(never) as fake:
        (result,) = await asked(fake, ASK, timeout=0.05)
        released.set()
    assert result.error == "not complete after 0.05 s"


async def test_a_connection_that_the_server_closed_meanwhile_is_made_anew() -> None:
    with fake_openai() as fake:
        fake.close_after = 1
        results = await asked(fake, ASK, ASK, ASK)
    assert [each.error for each in results] == ["", "", ""]
    assert fake.num_connections == 3


async def test_the_server_is_not_asked_twice_when_it_has_begun_to_answer() -> None:
    calls = []

    def half(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        calls.append(path)
        if len(calls) == 1:
            yield from respond_normally(path, body)
        raise ConnectionError

    with fake_openai(half) as fake:
        results = await asked(fake, ASK, ASK)
    assert [bool(each.error) for each in results] == [True, True]
    assert len(calls) == 2


def test_a_server_is_asked_what_it_serves() -> None:
    with fake_openai() as fake:
        assert first_model(fake.url) == "fake"
        assert is_up(f"{fake.url}/health", 5.0)
    assert not is_up(f"{fake.url}/health", 5.0)
    with pytest.raises(TokendError, match="lists no model"):
        first_model(fake.url)


def test_a_url_may_end_in_v1() -> None:
    assert base_url("http://x:1/v1/") == base_url("http://x:1") == "http://x:1"
    assert base_url("https://x/prefix/v1") == "https://x/prefix"
    with pytest.raises(ConfigError, match="not a URL"):
        base_url("127.0.0.1:8000")
