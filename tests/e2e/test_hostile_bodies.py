"""Large and odd bodies, and work for clients that have left, leave other clients their share."""

import json
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

from api_server.http.connection import MAX_BODY_BYTES
from api_server.text.prompts import MAX_TRUNCATED_CHARACTERS
from tests.e2e.bystander import Bystander
from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("hostile")
MIB = 1 << 20
LARGEST = MAX_BODY_BYTES - 200
WORDS = "The quick brown fox jumps over the lazy dog. "


def send(daemon: Daemon, path: str, body: bytes) -> socket.socket:
    """Return a connection on which a body was sent."""
    port = int(daemon.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def many_prompts() -> bytes:
    """19 MiB of prompts, each of which fits into the context."""
    prompts = [f"{index} " + WORDS * 540 for index in range(800)]
    return json.dumps({"prompt": prompts, "max_tokens": 1}).encode()


def test_prompts_of_clients_that_left_are_not_tokenised(daemon: Daemon) -> None:
    body = many_prompts()
    text = b'{"prompt": "%s"}' % ("🧿" * (LARGEST // 4)).encode()
    front_end = daemon.processes()["api_server"]
    with Bystander(daemon) as bystander:
        for path in ("/v1/completions", "/v1/completions", "/tokenize"):
            sent = body if "v1" in path else text
            with closing(send(daemon, path, sent)):
                time.sleep(0.5)
        asked = time.monotonic()
        short = {"prompt": WORDS * 440}  # above what is done on the event loop
        httpx.post(f"{daemon.url}/tokenize", json=short, timeout=60).raise_for_status()
        waited = time.monotonic() - asked
        bystander.rest(0.5)
    time.sleep(0.5)
    busy = front_end.cpu_times().user
    time.sleep(1.0)
    busy = front_end.cpu_times().user - busy
    print(bystander.figures, f"{waited=:.3f} {busy=:.3f}")
    bystander.check()
    assert waited < 0.5
    assert busy < 0.3


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def messages(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "smollm2-135m-instruct", **chat(content), **fields}


def part(number: int = 4000, text: str = "x") -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] * number


def text_part(number: int, text: str) -> list[dict[str, str]]:
    return [{"type": "output_text", "text": text}] * number


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "a", "type": "function", "function": function}


def zeros(number: int) -> list[int]:
    return [0] * number


MANY = 4_000_000
NAMES = {f"x{each}": 0 for each in range(60_000)}
LISTS = "[" + "[]," * 20_000 + "0]"
USER, ASSISTANT = {"role": "user"}, {"role": "assistant", "content": ""}
MANY_LISTS = [[0]] * 60_000
PARTS = {"role": "user", "content": part(100)}
BODIES: dict[str, tuple[str, Callable[[], Any]]] = {
    # more than a body has
    "zeros": ("chat/completions", lambda: {"messages": zeros(6 * MIB)}),
    "strings": ("completions", lambda: {"prompt": ["a"] * MANY}),
    "members": ("completions", lambda: {"prompt": "a"} | dict.fromkeys(map(str, range(10**6)), 0)),
    "parts": ("chat/completions", lambda: chat(part(640_000))),
    "blocks": ("messages", lambda: messages(part(640_000))),
    "objects": ("chat/completions", lambda: chat("a", documents=[{"a": 1}] * 1_000_000)),
    # as many as a body has
    "messages": ("chat/completions", lambda: {"messages": zeros(MIB - 9)}),
    "stop": ("completions", lambda: {"prompt": "a", "stop": zeros(MIB - 9)}),
    "choices": ("completions", lambda: {"prompt": "a", "guided_choice": zeros(MIB - 9)}),
    "outputs": ("responses", lambda: {"input": [{**USER, "content": zeros(MIB - 9)}]}),
    "prompts": ("completions", lambda: {"prompt": ["a"] * 100_000}),
    "prompts of one token": ("completions", lambda: {"prompt": [[1]] * 60_000}),
    "ids": ("completions", lambda: {"prompt": [12345] * (MIB - 9), "max_tokens": 1}),
    "lists of ids": ("completions", lambda: {"prompt": [[12345] * 1000] * 1000, "max_tokens": 1}),
    "bias": ("completions", lambda: {"prompt": "a", "logit_bias": NAMES}),
    "metadata": ("responses", lambda: {"input": "a", "metadata": NAMES}),
    "names": ("completions", lambda: {"prompt": "a", "max_tokens": 1, **NAMES}),
    "variables": (
        "chat/completions",
        lambda: chat("a", chat_template_kwargs={"a": MANY_LISTS}),
    ),
    "short parts": (
        "chat/completions",
        lambda: {"messages": [PARTS] * 300},
    ),
    "joined blocks": (
        "messages",
        lambda: messages("a", messages=[{**USER, "content": part(3000, "x" * 900)}] * 7),
    ),
    "joined items": (
        "responses",
        lambda: {"input": [{**ASSISTANT, "content": text_part(5, "x" * 900)}] * 4000},
    ),
    "arguments": (
        "chat/completions",
        lambda: {"messages": [{**ASSISTANT, "tool_calls": [call(LISTS)]}] * 330},
    ),
    # texts
    "an emoji": ("chat/completions", lambda: chat("a" * LARGEST + "🧿")),
    "an escaped emoji": ("chat/completions", lambda: chat("a" * LARGEST + "\ud83e\uddff")),
    "escapes": ("completions", lambda: {"prompt": "\n" * (LARGEST // 2), "max_tokens": 1}),
    "a truncated conversation": (
        "chat/completions",
        lambda: chat("a" * LARGEST + "🧿", truncate_prompt_tokens=10),
    ),
    "the longest one": (
        "chat/completions",
        lambda: chat("a" * (MAX_TRUNCATED_CHARACTERS - 99) + "🧿", truncate_prompt_tokens=10),
    ),
    "truncation": (
        "completions",
        lambda: {"prompt": "🧿" * (LARGEST // 4), "max_tokens": 1, "truncate_prompt_tokens": 10},
    ),
}
ANSWERED = ("names", "variables", "the longest one", "truncation")


GROUPS = [list(BODIES)[start : start + 7] for start in range(0, len(BODIES), 7)]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_large_and_odd_bodies(daemon: Daemon, names: list[str]) -> None:
    """In groups, since the streams of the other client take memory for KV, too."""
    bodies = {}
    for name in names:
        path, make = BODIES[name]
        text = json.dumps(make(), ensure_ascii=False)
        bodies[name] = path, text.encode(errors="backslashreplace")
    headers = {"Content-Type": "application/json"}
    figures = {}
    with Bystander(daemon) as bystander:
        for name, (path, body) in bodies.items():
            asked = time.monotonic()
            url = f"{daemon.url}/v1/{path}"
            answer = httpx.post(url, content=body, headers=headers, timeout=60)
            figures[name] = answer.status_code, time.monotonic() - asked, answer.text
        bystander.rest(0.5)
    for name, (status, seconds, text) in figures.items():
        print(f"{name:24} {status} {seconds:.2f} {text[:120]}")
        assert status == (200 if name in ANSWERED else 400)
    print(bystander.figures)
    bystander.check()


def test_many_stop_strings(daemon: Daemon) -> None:
    source = random.Random(1)
    url = f"{daemon.url}/v1/completions"
    with Bystander(daemon) as bystander:
        for _ in range(20):
            stop = [f"{source.getrandbits(256):064x}" for _ in range(1000)]
            body = {"prompt": "a", "max_tokens": 1, "stop": stop}
            httpx.post(url, json=body, timeout=60).raise_for_status()
    print(bystander.figures)
    bystander.check()


def test_many_bodies_with_emojis(daemon: Daemon) -> None:
    """They wait for the chat template, since their prompts are truncated."""
    fields = chat("a" * (MIB - 1000) + "🧿", truncate_prompt_tokens=10)
    body = json.dumps(fields, ensure_ascii=False).encode()

    def status(_: int) -> bytes:
        with closing(send(daemon, "/v1/chat/completions", body)) as connection:
            return connection.recv(1000).split()[1]

    with Bystander(daemon, gaps=False) as bystander:
        with ThreadPoolExecutor(45) as threads:
            statuses = list(threads.map(status, range(45)))
        bystander.rest(0.5)
    print(bystander.figures, statuses)
    assert set(statuses) == {b"200", b"503"}
    bystander.check()


def test_large_bodies_together(daemon: Daemon) -> None:
    body = json.dumps(chat("a" * LARGEST)).encode()

    def status(_: int) -> bytes:
        with closing(send(daemon, "/v1/chat/completions", body)) as connection:
            return connection.recv(1000).split()[1]

    with Bystander(daemon) as bystander:
        with ThreadPoolExecutor(5) as threads:
            statuses = list(threads.map(status, range(5)))
        bystander.rest(0.5)
    print(bystander.figures, statuses)
    # their text is too long; while uploads take too many bytes together, the largest is ended
    assert b"400" in statuses
    assert set(statuses) <= {b"400", b"503"}
    bystander.check()
