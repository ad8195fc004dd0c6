"""Large and odd bodies, and work for clients that have left, leave other clients their share."""

import json
import socket
import time
from contextlib import closing

import httpx
import pytest

from tests.e2e.bystander import Bystander
from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("hostile")
MIB = 1 << 20
WORDS = "The quick brown fox jumps over the lazy dog. "


def send(daemon: Daemon, path: str, body: bytes) -> socket.socket:
    """Return a connection on which a body was sent."""
    port = int(daemon.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def many_prompts() -> bytes:
    """24 MiB of prompts, each of which fits into the context."""
    prompts = [f"{index} " + WORDS * 540 for index in range(1000)]
    return json.dumps({"prompt": prompts, "max_tokens": 1}).encode()


def test_prompts_of_clients_that_left_are_not_tokenised(daemon: Daemon) -> None:
    body = many_prompts()
    front_end = daemon.processes()["api_server"]
    with Bystander(daemon) as bystander:
        for path in ("/v1/completions", "/v1/completions", "/tokenize"):
            sent = body if "v1" in path else json.dumps({"prompt": "🧿" * 7_000_000}).encode()
            with closing(send(daemon, path, sent)):
                time.sleep(0.5)
        asked = time.monotonic()
        text = {"prompt": WORDS * 440}  # above what is done on the event loop
        httpx.post(f"{daemon.url}/tokenize", json=text, timeout=60).raise_for_status()
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
