"""The load test's client against a fake server, with good and bad responses."""

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

REQUEST = BenchRequest(COMPLETIONS, {"prompt": [1, 2, 3]}, 4, checked=True)


async def send_requests(
    fake: FakeOpenAI, *requests: BenchRequest, **settings: Any
) -> list[RequestResult]:
    client = BenchClient(Target(fake.url, "m", **settings))
    try:
        return [await client.send_request(each) for each in requests]
    finally:
        client.close()


async def failing(respond: Respond, **settings: Any) -> str:
    with fake_openai(respond) as fake:
        (result,) = await send_requests(fake, REQUEST, **settings)
    return result.error


async def test_requests_have_the_required_fields_and_share_a_connection() -> None:
    chat = BenchRequest(CHAT, {"messages": [{"role": "user", "content": "a b"}]}, 2)
    with fake_openai() as fake:
        fields = {"temperature": 0.5, "ignore_eos": True}
        first, second = await send_requests(fake, REQUEST, chat, fields=fields, api_key="k")
    assert (first.output_tokens, first.input_tokens, first.num_chunks) == (4, 3, 4)
    assert (second.output_tokens, second.input_tokens) == (2, 2)
    assert first.text == "< 3]0>< 3]1>< 3]2>< 3]3>"
    assert second.text == ""  # usage is not requested
    assert 0 < first.ttft <= first.e2el
    (path, body), (chat_path, chat_body) = fake.seen
    assert (path, chat_path) == (COMPLETIONS, CHAT)
    assert body["prompt"] == [1, 2, 3]
    assert (body["temperature"], chat_body["temperature"]) == (0, 0.5)
    common = {"model": "m", "stream": True, "ignore_eos": True}
    assert common.items() <= body.items()
    assert fake.num_connections == 1
    assert "authorization: bearer k" in fake.heads[0].lower()


async def test_requests_of_a_session_carry_the_job_id() -> None:
    with fake_openai() as fake:
        await send_requests(
            fake,
            REQUEST,
            BenchRequest(COMPLETIONS, {"prompt": [1]}, 2, job="j-1", is_last_step=True),
        )
    (_, without), (_, body) = fake.seen
    assert "agent_hint" not in without
    assert body["agent_hint"] == {"job_id": "j-1", "is_last_step": True}
    assert [("x-session-id: j-1" in head.lower()) for head in fake.heads] == [False, True]


async def test_errors_are_part_of_the_result() -> None:
    def half(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        yield token(path, "x")
        raise ConnectionError

    def error(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        return [token(path, "x"), event(error={"message": "out of blocks"})]

    assert await failing(half) == "the connection was closed during the response"
    assert await failing(error) == "out of blocks"
    assert "invalid event" in await failing(lambda path, body: [b"data: {]\n\n"])
    assert "without [DONE]" in await failing(lambda path, body: [token(path, "x")])


async def test_connection_refused_and_timeout() -> None:
    with fake_openai() as fake:
        pass
    (result,) = await send_requests(fake, REQUEST)
    assert "Connect" in result.error

    released = threading.Event()

    def never(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        released.wait(20.0)
        return []

    with fake_openai(never) as fake:
        (result,) = await send_requests(fake, REQUEST, timeout=0.05)
        released.set()
    assert result.error == "not complete after 0.05 s"


async def test_a_connection_closed_by_the_server_is_reopened() -> None:
    with fake_openai() as fake:
        fake.close_after = 1
        results = await send_requests(fake, REQUEST, REQUEST, REQUEST)
    assert [each.error for each in results] == ["", "", ""]
    assert fake.num_connections == 3


async def test_a_request_is_not_resent_after_a_partial_response() -> None:
    calls = []

    def half(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        calls.append(path)
        if len(calls) == 1:
            yield from respond_normally(path, body)
        raise ConnectionError

    with fake_openai(half) as fake:
        results = await send_requests(fake, REQUEST, REQUEST)
    assert [bool(each.error) for each in results] == [True, True]
    assert len(calls) == 2


def test_the_model_name_comes_from_the_server() -> None:
    with fake_openai() as fake:
        assert first_model(fake.url) == "fake"
        assert is_up(f"{fake.url}/health", 5.0)
    assert not is_up(f"{fake.url}/health", 5.0)
    with pytest.raises(TokendError, match=r"no server answers at .*--url"):
        first_model(fake.url)


def test_a_key_that_is_missing_is_told_from_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.bench.client.get", lambda *_: (401, b"{}"))
    with pytest.raises(TokendError, match=r"needs an API key: set --api-key or TOKEND_API_KEY"):
        first_model("http://x")
    with pytest.raises(TokendError, match=r"refuses this API key: set --api-key"):
        first_model("http://x", "other")


def test_a_url_may_end_in_v1() -> None:
    assert base_url("http://x:1/v1/") == base_url("http://x:1") == "http://x:1"
    assert base_url("https://x/prefix/v1") == "https://x/prefix"
    with pytest.raises(ConfigError, match="not a URL"):
        base_url("127.0.0.1:8000")
