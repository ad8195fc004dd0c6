"""Operators at a listener of their own, with one and with several front ends."""

import json
import os
import signal
import socket
import stat
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("settings")


@pytest.mark.parametrize("number", [1, 2])
def test_operators_at_a_socket_and_a_port(number: int, tmp_path: Path) -> None:
    """Every front end serves both; they reach the engine, and all other front ends."""
    path = str(tmp_path / "admin.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()  # as a daemon leaves it that was killed
    flags = ("--admin-port", "0", "--admin-socket", path, "--api-server-count", str(number))
    daemon = Daemon(*flags, "--log-format", "json", "--api-key", "hush")
    daemon.wait_ready()
    (ready,) = [line for line in map(json.loads, daemon.output) if "is ready" in line["message"]]
    assert ready["admin_socket"] == path
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
    second = Daemon(*flags)
    assert second.wait_exit() == 2
    assert f"--admin-socket {path}: is in use by another process" in second.text
    port = f"http://127.0.0.1:{ready['admin_port']}"
    key = {"authorization": "Bearer hush"}

    def at_socket(method: str, route: str) -> httpx.Response:
        """Call over a new connection, which any front end accepts."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as client:
            return client.request(method, route)

    assert httpx.post(f"{daemon.url}/pause", headers=key).status_code == 403
    assert at_socket("POST", "/pause").json() == {"status": "paused"}
    for _ in range(4 * number):
        assert at_socket("GET", "/is_paused").json() == {"is_paused": True}
        assert httpx.get(f"{port}/is_paused").json() == {"is_paused": True}
    assert httpx.post(f"{port}/resume").status_code == 200
    assert httpx.post(f"{port}/resume", headers={"host": "evil.example"}).status_code == 403
    assert httpx.get(f"{port}/v1/models", headers=key).status_code == 404
    assert "vllm:num_requests_running" in at_socket("GET", "/metrics").text
    if number == 1:
        victim = daemon.processes()["api_server"]
        victim.kill()
        victim.wait(30)
        assert eventually(lambda: '"api 0 is back after' in daemon.text, 60)
        assert at_socket("GET", "/health").status_code == 200, "its successor serves the socket"
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    url = f"{daemon.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=key, timeout=60) as response:
        next(events := response.iter_lines())
        drain = at_socket("POST", "/admin/drain")
        assert (drain.status_code, drain.json()["requests_in_flight"]) == (202, 1)
        for _ in range(4 * number):  # all front ends refuse
            assert eventually(lambda: httpx.get(f"{daemon.url}/health").status_code == 503)
        assert at_socket("GET", "/is_paused").status_code == 200, "it serves to the end"
        del events
    assert daemon.wait_exit() == 0, daemon.text
    assert not os.path.lexists(path)


def test_a_daemon_that_ends_by_a_signal_removes_its_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    daemon = Daemon("--admin-socket", path)
    assert eventually(lambda: os.path.lexists(path), 30)
    daemon.process.send_signal(signal.SIGTERM)  # while it starts
    assert daemon.wait_exit() == 0, daemon.text
    assert not os.path.lexists(path), daemon.text
