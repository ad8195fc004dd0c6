"""A real daemon with TLS and an API key serves and never exposes the key.

Neither in the process list, /metrics or errors, nor when a process fails.
"""

from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.daemon import Daemon
from tests.fakes.certificates import Authority, needs_openssl

pytestmark = [pytest.mark.suite("daemons"), needs_openssl]

KEY = "hush-8c1d2f"
REQUEST = {"prompt": "The sea is", "max_tokens": 4, "temperature": 0}


def commands_and_environments(daemon: Daemon) -> dict[str, tuple[str, str]]:
    supervisor = psutil.Process(daemon.process.pid)
    every = {"supervisor": supervisor, **daemon.processes()}
    return {
        role: (" ".join(process.cmdline()), str(process.environ()))
        for role, process in every.items()
    }


@pytest.mark.parametrize(
    "way", ["flag", pytest.param("environment", marks=pytest.mark.suite("settings"))]
)
def test_tls_and_a_key_that_stays_secret(way: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key_file = authority.sign("server")
    flags = ["--ssl-certfile", certificate, "--ssl-keyfile", key_file]
    variables = {}
    if way == "flag":
        flags += ["--api_key", KEY]  # `_` counts as `-`
    else:
        flags += ["--enable-fault-injection"]
        variables = {"TOKEND_API_KEY": KEY, "TOKEND_FAULTS": "worker:raise@3, engine:raise@5"}
    with Daemon(*flags, environment=variables) as daemon:
        url = daemon.url.replace("http:", "https:")
        assert url in daemon.text
        with httpx.Client(verify=authority.client_context(), base_url=url, timeout=60) as http:
            assert http.get("/health").status_code == 200
            assert http.post("/v1/completions", json=REQUEST).status_code == 401
            wrong = {"authorization": f"Bearer {KEY}x"}
            assert http.post("/v1/completions", json=REQUEST, headers=wrong).status_code == 401
            right = {"authorization": f"Bearer {KEY}"}
            answer = http.post("/v1/completions", json=REQUEST, headers=right)
            assert answer.status_code == 200, answer.text
            for path in ("/metrics", "/v1/models", "/openapi.json", "/nowhere"):
                assert KEY not in http.get(path, headers=right).text
            bad = http.post("/v1/completions", json={"x": 1}, headers=right)
            assert KEY not in bad.text + str(bad.headers)
        seen = commands_and_environments(daemon)
        assert len(seen) == 4
        for role, (command, environment) in seen.items():
            assert KEY not in command, role
            assert KEY not in environment or role == "supervisor", role
        assert "serve --port 0" in seen["supervisor"][0]
    assert KEY not in daemon.text
    assert ("Traceback" in daemon.text) == (way == "environment"), "something broke there"
