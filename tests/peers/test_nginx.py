"""Operators' routes behind a real nginx: no configuration of it exposes them."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest
from websockets.sync.client import connect

from tests.e2e.daemon import Daemon, eventually
from tests.peers.packages import unpack_debian

pytestmark = pytest.mark.suite("peers")

PACKAGE: Final = "nginx=1.22.1-9+deb12u11"
SHA256: Final = "4e2778e675c07d0f2d8d3b6f5ff84f6483ade1d82c21c910eb9a2787e1cf1b1a"
"""Of Debian's package for x86-64."""

KEEP_ALIVE: Final = 'proxy_http_version 1.1; proxy_set_header Connection "";'
SITES: Final = {
    "plain": "",
    "a foreign host": f"{KEEP_ALIVE} proxy_set_header Host llm.example;",
    "the client's host": f"{KEEP_ALIVE} proxy_set_header Host $http_host;",
    "X-Real-IP": f"{KEEP_ALIVE} proxy_set_header X-Real-IP $remote_addr;",
    "X-Forwarded-For": f"proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; {KEEP_ALIVE}",
    "X-Forwarded-Proto": f"{KEEP_ALIVE} proxy_set_header X-Forwarded-Proto $scheme;",
}
"""What is in the location of a site, beside proxy_pass."""
GUIDE: Final = "deploy/README.md"
SILENT: Final = "nothing that shows it"
"""HTTP/1.1 without any header: for tokend, a local program."""
FORBIDDEN: Final = (
    "/pause",
    "/admin/drain",
    "/abort_requests",
    "/reset_prefix_cache",
    "/reset_encoder_cache",
)


def guide() -> str:
    """Return what the guide has in a location, without proxy_pass."""
    text = (Path(__file__).parents[2] / GUIDE).read_text()
    (location,) = re.findall(r"^location / \{\n(.*?)^\}", text, re.M | re.S)
    first, _, rest = location.partition("\n")
    assert first.split() == ["proxy_pass", "http://127.0.0.1:8000;"]
    return rest


@pytest.fixture(scope="module")
def nginx() -> Path:
    try:
        return unpack_debian(PACKAGE, SHA256) / "usr" / "sbin" / "nginx"
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"apt has no {PACKAGE}: {error}")


@pytest.fixture
def sites(nginx: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """URLs of sites that pass everything to the daemon of the test, by what they add."""
    daemon: Daemon = request.getfixturevalue("guarded")
    found, servers = {}, []
    for name, added in (SITES | {SILENT: KEEP_ALIVE, GUIDE: guide()}).items():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        found[name] = f"http://127.0.0.1:{port}"
        passed = f"proxy_pass {daemon.url}; {added}"
        servers.append(f"server {{ listen 127.0.0.1:{port}; location / {{ {passed}\n }} }}")
    folders = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/log;"
        f"events {{}} http {{ access_log off; {folders} {' '.join(servers)} }}"
    )
    command = [nginx, "-p", tmp_path, "-c", tmp_path / "nginx.conf", "-e", tmp_path / "log"]
    process = subprocess.Popen(command)
    try:
        assert eventually(lambda: _answers(found["plain"])), (tmp_path / "log").read_text()
        yield found
    finally:
        process.terminate()
        process.wait(10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def guarded(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon("--allowed-hosts", "*", *request.param) as daemon:
        yield daemon


@pytest.mark.parametrize("guarded", [(), ("--api-server-count", "2")], indirect=True)
def test_no_header_of_a_proxy_reaches_operators_routes(
    guarded: Daemon, sites: dict[str, str]
) -> None:
    for name in SITES:
        for path in FORBIDDEN:
            refused = httpx.post(f"{sites[name]}{path}", headers={"host": "llm.example"})
            assert refused.status_code == 403, (name, path, refused.text)
        assert httpx.get(f"{sites[name]}/v1/models").status_code == 200, name
    assert httpx.get(f"{guarded.url}/is_paused").json() == {"is_paused": False}
    assert httpx.get(f"{guarded.url}/health").status_code == 200, "it does not drain"
    assert httpx.get(f"{sites['X-Real-IP']}/nothing").status_code == 404
    assert eventually(lambda: "GET /nothing: Not Found" in guarded.text)


@pytest.mark.parametrize(
    "guarded", [("--admin-port", "0"), ("--admin-port", "0", "--api-server-count", "2")],
    indirect=True,
)  # fmt: skip
def test_with_an_admin_listener_a_silent_proxy_does_not_either(
    guarded: Daemon, sites: dict[str, str]
) -> None:
    for url in (*sites.values(), guarded.url):
        for path in FORBIDDEN:
            assert httpx.post(f"{url}{path}").status_code == 403, (url, path)
    time.sleep(0.1)
    assert httpx.get(f"{guarded.url}/health").status_code == 200


@pytest.mark.parametrize("guarded", [()], indirect=True)
def test_the_log_has_the_address_that_nginx_forwards(
    guarded: Daemon, sites: dict[str, str]
) -> None:
    afar = {"x-forwarded-for": "192.0.2.77"}
    httpx.get(f"{sites['X-Forwarded-For']}/nothing", headers=afar)
    assert eventually(lambda: "endpoint=/nothing tenant=- client=192.0.2.77" in guarded.text)


@pytest.mark.parametrize("guarded", [("--admin-port", "0")], indirect=True)
def test_the_configuration_of_the_guide_passes_streams_and_websockets(
    guarded: Daemon, sites: dict[str, str]
) -> None:
    url = sites[GUIDE]
    body = {"prompt": "The sea is", "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
    with connect(f"{url.replace('http', 'ws')}/v1/responses") as websocket:
        message = {"type": "response.create", "input": "Hello", "max_output_tokens": 2}
        websocket.send(json.dumps(message))
        while (kind := json.loads(websocket.recv(60))["type"]) != "response.incomplete":
            assert kind.startswith("response."), kind
    assert httpx.post(f"{url}/pause").status_code == 403
