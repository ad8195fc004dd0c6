"""schemathesis, unmodified, on a real daemon: requests that it makes from the OpenAPI document.

It has an environment of its own. An answer is as the document says, and never a 5xx but 503 and
504, for a full queue and a `timeout_ms`; routes that end or pause the daemon are left out.
"""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import Daemon
from tests.peers.packages import SCHEMATHESIS, install_program

pytestmark = pytest.mark.suite("peers")

CHECKS = (
    "not_a_server_error",
    "content_type_conformance",
    "response_schema_conformance",
)
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503, 504]
"""
LEFT_OUT = "^/(admin/drain|pause|resume|start_profile|stop_profile|reset_(prefix|encoder)_cache)"
EXAMPLES = int(os.environ.get("TOKEND_SCHEMATHESIS_EXAMPLES", "15"))
"""Requests for each route and phase."""


def test_every_request_of_schemathesis_is_answered_as_documented(tmp_path: Path) -> None:
    program = install_program(SCHEMATHESIS, "schemathesis")
    with Daemon("--max-model-len", "512") as daemon:
        document = httpx.get(f"{daemon.url}/openapi.json").json()
        # The routes of models that pool are a 400 for this one, which the document allows.
        schema = tmp_path / "openapi.json"
        schema.write_text(json.dumps(document))
        (tmp_path / "schemathesis.toml").write_text(SETTINGS)
        processes = daemon.process_ids()
        command = [
            *(str(program), "run", str(schema), "--url", daemon.url, "--checks", ",".join(CHECKS)),
            *("--exclude-path-regex", LEFT_OUT, "--max-examples", str(EXAMPLES)),
            *("--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-shrink"),
            *("--generation-deterministic", "--request-timeout", "60", "--no-color"),
            *("--suppress-health-check", "all", "--warnings", "off", "--max-time", "180"),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=540, check=False
        )
        print(done.stdout[-20_000:], done.stderr[-2000:])
        assert done.returncode == 0, done.stdout[-4000:]
        assert daemon.process_ids() == processes
        assert "Traceback" not in daemon.text
