"""vllm-router in front of two daemons with a PeerConnector: one prefills, the other decodes."""

import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.test_prefill_decode import has_no_block, hits, start_daemon
from tests.peers.packages import VLLM_ROUTER, install_program
from tests.peers.test_routers import HTTP, chat, completion, free_ports, new_prompt, streamed

pytestmark = [pytest.mark.suite("peers"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_text("0123456789abcdef")
    extra = {"key_file": str(key_file)}
    pair = start_daemon("kv_producer", 1, extra), start_daemon("kv_consumer", 1, extra)
    try:
        for daemon in pair:
            daemon.wait_ready()
        yield pair
    finally:
        for daemon in pair:
            daemon.stop()


@pytest.fixture(scope="module")
def router(
    daemons: tuple[Daemon, Daemon], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Return the URL of the router."""
    port, metrics_port = free_ports(2)
    first, second = daemons
    log = tmp_path_factory.mktemp("router") / "log"
    command = [
        *(str(install_program(VLLM_ROUTER, "python")), "-m", "vllm_router.launch_router"),
        *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--vllm-pd-disaggregation", "--prefill", first.url, "--decode", second.url),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        assert eventually(lambda: is_ready(url), 60), log.read_text()
        yield url
    finally:
        process.kill()
        process.wait(10)


def is_ready(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/readiness").status_code == 200
    except httpx.HTTPError:
        return False


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", completion(new_prompt(), max_tokens=12)),
    ("/v1/completions", completion(new_prompt(), n=2, temperature=0.7, seed=3, max_tokens=6)),
    ("/v1/chat/completions", chat(new_prompt(), max_tokens=12)),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_are_those_of_one_daemon(
    router: str, daemons: tuple[Daemon, Daemon], path: str, body: dict[str, Any]
) -> None:
    """Whole and streamed; the decoding daemon has loaded the prompt's KV."""
    first, second = daemons
    before = hits(second)
    answer = HTTP.post(f"{router}{path}", json=body)
    assert answer.status_code == 200, answer.text
    direct = HTTP.post(f"{first.url}{path}", json=body).json()
    assert answer.json()["choices"] == direct["choices"]
    assert answer.json()["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
    assert hits(second) - before == (direct["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert streamed(router, path, body) == {
        choice["index"]: choice.get("text") or choice["message"]["content"]
        for choice in direct["choices"]
    }
    assert eventually(lambda: has_no_block(first) and has_no_block(second), 10)


def test_answers_go_on_after_the_death_of_the_prefilling_worker(
    router: str, daemons: tuple[Daemon, Daemon]
) -> None:
    first, second = daemons
    first.processes()["worker"].kill()
    path, body = BODIES[0]
    answer = HTTP.post(f"{router}{path}", json=body)
    assert answer.status_code == 200, answer.text
    direct = HTTP.post(f"{second.url}{path}", json=body).json()
    assert answer.json()["choices"] == direct["choices"]
