"""Prefill and decode in two daemons: the tokens are those of one daemon.

SmolLM2 in float32. The bodies are those with which vllm-router sends a request to both.
"""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("media")

PROMPTS = [[(7 * seed + 11 * i) % 30_000 + 50 for i in range(70 + 90 * seed)] for seed in range(3)]
QUESTION = "Name the planets of the solar system in their order from the sun, one a line, please."
TO_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
COMPLETION = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": False}


def start_daemon(role: str, num_workers: int, extra: dict[str, Any]) -> Daemon:
    config = {
        "kv_connector": "PeerConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
    return Daemon(
        *("--dtype", "float32", "--num-gpu-blocks-override", "100"),
        *("--tensor-parallel-size", str(num_workers)),
        *("--kv-transfer-config", json.dumps(config)),
    )


def post(daemon: Daemon, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{daemon.url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prefill(daemon: Daemon, path: str, **body: Any) -> dict[str, Any]:
    """Send a request to the prefill as the router does; return the parameters of its answer."""
    body |= {"max_tokens": 1, "kv_transfer_params": TO_PREFILL}
    if "messages" in body:
        body["max_completion_tokens"] = 1
    return post(daemon, path, **body)["kv_transfer_params"]


def hits(daemon: Daemon) -> float:
    return daemon.metric("vllm:external_prefix_cache_hits_total")


def has_no_block(daemon: Daemon) -> bool:
    return daemon.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize(("transport", "num_workers"), [("tcp", 1), ("memory", 2)])
def test_decode_goes_on_with_the_kv_of_prefill(
    tmp_path: Path, transport: str, num_workers: int
) -> None:
    extra: dict[str, Any] = {"transport": transport}
    with ExitStack() as stack:
        if transport == "memory":  # its paths are those of Unix sockets, which must be short
            extra["socket_folder"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="td-"))
        else:
            key_file = tmp_path / "key"
            key_file.write_text("0123456789abcdef")
            extra["key_file"] = str(key_file)
        first = start_daemon("kv_producer", num_workers, extra)
        second = start_daemon("kv_consumer", num_workers, extra)
        for daemon in (first, second):
            stack.enter_context(daemon)
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": prompt, **COMPLETION}) for prompt in PROMPTS
        ]
        chat = {"messages": [{"role": "user", "content": QUESTION}], **COMPLETION}
        bodies.append(("/v1/chat/completions", chat))
        sampled = {"temperature": 1.0, "seed": 5, "n": 2, "logprobs": 2, "prompt": PROMPTS[1][3:]}
        bodies.append(("/v1/completions", {**COMPLETION, **sampled}))
        for path, body in bodies if num_workers == 1 else bodies[-2:]:
            before = hits(second)
            params = prefill(first, path, **body)
            assert params["tp_size"] == num_workers
            found = post(second, path, **body, kv_transfer_params=params)
            expected = post(first, path, **body)
            assert found["choices"] == expected["choices"]
            assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
            num_prompt = found["usage"]["prompt_tokens"]
            assert hits(second) - before == (num_prompt - 1) // 16 * 16
        assert eventually(lambda: has_no_block(first), 10), "the leases have ended"

        # The prefill's worker dies between the two: its KV is lost, and the answer is not.
        before, prompt = hits(second), PROMPTS[2][7:]
        params = prefill(first, "/v1/completions", prompt=prompt, **COMPLETION)
        first.processes()["worker"].kill()
        body = {"prompt": prompt, **COMPLETION}
        found = post(second, "/v1/completions", **body, kv_transfer_params=params)
        assert found["choices"] == post(first, "/v1/completions", **body)["choices"]
        assert "was not loaded: no connection to the producer" in second.text
        assert eventually(lambda: has_no_block(first) and has_no_block(second), 10)

        # What another router, or an attacker, makes of the parameters is refused or computed.
        params = prefill(first, "/v1/completions", prompt=prompt, **COMPLETION)
        forged = {**params, "remote_request_id": "0" * 32}
        found = post(second, "/v1/completions", **body, kv_transfer_params=forged, cache_salt="s")
        assert found["choices"] == post(first, "/v1/completions", **body)["choices"]
