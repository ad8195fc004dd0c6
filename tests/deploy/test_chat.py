"""What `tokend chat` sends and prints, over HTTP responses that are written here."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy import chat as chat_command
from deploy import cli
from deploy.bench.client import first_model
from deploy.chat import Chat, find_model, given_url
from deploy.environment import HostEnvironment
from proto.errors import ConfigError, TokendError
from proto.messages.prepared_model import PreparedModel
from proto.runtime.security import server_context
from proto.settings.config import FrontEndConfig
from tests.fakes.certificates import Authority, needs_openssl


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
    return Chat(client, "m", out, system, 9)


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


def test_a_server_that_is_gone_is_named_so() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(refuse))
    with pytest.raises(TokendError, match="does not answer any more: Connection refused"):
        Chat(client, "m", io.StringIO()).ask("Hello?")


def test_a_packaged_model_that_does_not_chat_is_not_downloaded(tmp_path: Path) -> None:
    environment = HostEnvironment.of({"HOME": str(tmp_path)})
    with pytest.raises(ConfigError, match="gemma3-270m has no chat template"):
        chat_command._check_chats("gemma3-270m", environment)
    assert not list(tmp_path.rglob("*.gguf*"))


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


def test_without_a_limit_the_server_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A context may be shorter than any limit that the command could choose."""
    server = Server(says("One, two", reason="length"))
    client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(server))
    Chat(client, "m", io.StringIO()).ask("Count.")
    assert "max_tokens" not in server.bodies[0]
    assert (
        capsys.readouterr().err == "\n(cut: the server allows no more tokens, /clear makes room)\n"
    )


def test_an_answer_that_repeats_itself_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    chat_with(Server(says("ha ha ha", reason="repetition")), out).ask("Laugh.")
    assert out.getvalue() == "ha ha ha\n"
    assert capsys.readouterr().err == "\n(ended: the model repeats itself)\n"


REPETITION = {"min_pattern_size": 8, "max_pattern_size": 256, "min_count": 4}


@pytest.mark.parametrize(
    ("card", "sampling"),
    [
        (
            {"default_sampling_params": {}},
            {"temperature": 0.7, "repetition_detection": REPETITION},
        ),
        (
            {"default_sampling_params": {"temperature": 0.2}},
            {"repetition_detection": REPETITION},
        ),
        ({}, {}),
    ],
)
def test_a_model_without_a_temperature_gets_one(
    card: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Only from tokend, which says what the model has; others may refuse the field."""
    cards = {"data": [{"id": "other"}, {"id": "m", **card}]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=cards))
    with httpx.Client(base_url="http://test", transport=transport) as client:
        assert find_model(client, "m") == ("m", sampling)
    chat = chat_with(server := Server(says("a")), io.StringIO())
    chat.sampling = sampling
    chat.ask("b")
    for name in ("temperature", "repetition_detection"):
        assert server.bodies[0].get(name) == sampling.get(name)


def test_a_server_that_is_starting_is_waited_for() -> None:
    health = [httpx.Response(200), httpx.Response(503), httpx.Response(503)]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return health.pop()
        return httpx.Response(503 if health else 200, json={"data": [{"id": "m"}]})

    with httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer)) as client:
        assert find_model(client, None) == ("m", {})


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("127.0.0.1:8311", "http://127.0.0.1:8311"),
        ("[::1]:80/", "http://[::1]:80/"),
        ("https://models.example/v1", "https://models.example/v1"),
        ("smollm2-135m-instruct", None),
        ("org/name:4", None),
        ("8311", None),
        (None, None),
    ],
)
def test_a_server_is_given_by_its_url_or_by_host_and_port(
    target: str | None, expected: str | None
) -> None:
    assert given_url(target) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "m has no chat template: it completes texts. tokend serve m, and Completion on its"),
        ({"generates": False}, "m gives vectors or scores, no text: tokend serve m"),
    ],
)
def test_a_model_that_does_not_chat_is_refused_before_a_daemon_starts(
    facts: dict[str, Any],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = PreparedModel(
        folder="/f",
        name="m",
        source="/m",
        architecture="LlamaForCausalLM",
        vocab_size=256,
        max_position=128,
        weights_sample="0" * 64,
        **facts,
    )
    monkeypatch.setattr(chat_command, "prepared_model", lambda *_: model)
    monkeypatch.setattr(chat_command.subprocess, "Popen", None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    assert cli.main(["chat", "m"]) == 2
    assert expected in capsys.readouterr().err


class Cards(BaseHTTPRequestHandler):
    """Answers every GET request with the list of models."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def private(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Yield the URL of a server, and the certificate of the authority that signed its own."""
    authority = Authority(tmp_path)
    certificate, key = authority.sign("server")
    with HTTPServer(("127.0.0.1", 0), Cards) as server:
        context = server_context(FrontEndConfig(ssl_certfile=certificate, ssl_keyfile=key))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}", authority.certificate
        server.shutdown()


@needs_openssl
def test_a_certificate_of_a_private_authority(
    private: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is verified, also on this machine; the error names the variable that makes it trusted."""
    url, certificate = private
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    with pytest.raises(TokendError, match=r"is not trusted .*SSL_CERT_FILE"):
        chat_command.main([url], HostEnvironment({}))
    with pytest.raises(TokendError, match=r"is not trusted .*SSL_CERT_FILE"):
        first_model(url)
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    assert first_model(url) == "m"
    with httpx.Client(base_url=url) as client:
        assert find_model(client, None)[0] == "m"
