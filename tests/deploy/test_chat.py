"""What `tokend chat` sends and prints, over HTTP responses that are written here."""

import io
import json
from typing import Any

import httpx
import pytest

from deploy.chat import Chat, ChatOptions, find_model
from proto.errors import TokendError


class Server:
    """Answers each request with the next list of deltas, or a refusal. bodies: of the requests."""

    def __init__(self, *answers: list[dict[str, Any]] | httpx.Response) -> None:
        self._answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        answer = self._answers.pop(0)
        if isinstance(answer, httpx.Response):
            return answer
        events = [json.dumps({"choices": [{"index": 0, **choice}]}) for choice in answer]
        text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        return httpx.Response(200, content=text.encode())


def says(*pieces: str, reason: str = "stop") -> list[dict[str, Any]]:
    deltas = [{"delta": {"role": "assistant", "content": ""}}]
    deltas += [{"delta": {"content": piece}} for piece in pieces]
    return [*deltas, {"delta": {}, "finish_reason": reason}]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def chat_with(server: Server, out: io.StringIO, system: str | None = None) -> Chat:
    client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(server))
    return Chat(client, "m", ChatOptions(None, system, 9), out)


def test_the_conversation_is_sent_with_each_message() -> None:
    server, out = Server(says("Par", "is."), says("Rome.")), io.StringIO()
    chat = chat_with(server, out, "Be brief.")
    chat.ask("France?")
    chat.ask("Italy?")
    assert out.getvalue() == "Paris.\nRome.\n"
    assert server.bodies[1] == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "France?"},
            {"role": "assistant", "content": "Paris."},
            {"role": "user", "content": "Italy?"},
        ],
        "max_tokens": 9,
        "stream": True,
    }


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (httpx.Response(400, json={"error": {"message": "the prompt is too long"}}), "too long"),
        (
            httpx.Response(401, json={"error": {"message": "no key"}}),
            r"no key \(set TOKEND_API_KEY",
        ),
        (httpx.Response(502, text="<html>"), "the server answered with status 502"),
        (httpx.Response(200, text='data: {"error": {"message": "it died"}}\n\n'), "it died"),
        (httpx.Response(200, text="data: nonsense\n\n"), "the answer ended: "),
    ],
)
def test_a_message_without_an_answer_is_forgotten(answer: httpx.Response, expected: str) -> None:
    server = Server(answer, says("Yes."))
    chat = chat_with(server, io.StringIO())
    with pytest.raises(TokendError, match=expected):
        chat.ask("Hello?")
    chat.ask("Again?")
    assert [each["content"] for each in server.bodies[1]["messages"]] == ["Again?"]


def test_reasoning_is_shown_in_a_terminal_only() -> None:
    answer = [{"delta": {"reasoning": "Hm\x1b[31m"}}, *says("\x1b]0;x\x07Yes.\tA\n")]
    out = io.StringIO()
    chat_with(Server(answer), out).ask("?")
    assert out.getvalue() == "]0;xYes.\tA\n\n", "codes of a terminal are left out"
    screen = Screen()
    chat_with(Server(answer), screen).ask("?")
    assert screen.getvalue() == "\x1b[2mHm[31m\x1b[0m\n\n]0;xYes.\tA\n\n"


def test_an_answer_that_was_cut_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    chat_with(Server(says("One, two", reason="length")), out).ask("Count.")
    assert out.getvalue() == "One, two\n"
    assert capsys.readouterr().err == "\n(cut after 9 tokens, see --max-tokens)\n"


@pytest.mark.parametrize(
    ("card", "sampling"),
    [
        ({"default_sampling_params": {}}, {"temperature": 0.7}),
        ({"default_sampling_params": {"temperature": 0.2}}, {}),
        ({}, {}),
    ],
)
def test_a_model_without_a_temperature_gets_one(
    card: dict[str, Any], sampling: dict[str, float]
) -> None:
    """Only from tokend, which says what the model has; others may refuse the field."""
    cards = {"data": [{"id": "other"}, {"id": "m", **card}]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=cards))
    with httpx.Client(base_url="http://test", transport=transport) as client:
        assert find_model(client, "m") == ("m", sampling)
    chat = chat_with(server := Server(says("a")), io.StringIO())
    chat.sampling = sampling
    chat.ask("b")
    assert server.bodies[0].get("temperature") == sampling.get("temperature")


def test_a_server_that_is_starting_is_waited_for() -> None:
    health = [httpx.Response(200), httpx.Response(503), httpx.Response(503)]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return health.pop()
        return httpx.Response(503 if health else 200, json={"data": [{"id": "m"}]})

    with httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer)) as client:
        assert find_model(client, None) == ("m", {})
