"""Metrics and logs of a daemon with an API key whose processes are killed."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.daemon import Daemon, DaemonPool, eventually

pytestmark = pytest.mark.suite("daemons")

KEY = "hush-71c3aa"
SECRET = "Rumpelstiltskin"
BODY = {"prompt": f"{SECRET} said to the sea:", "temperature": 0, "ignore_eos": True}
HEADERS = {"authorization": f"Bearer {KEY}"}


def counters(daemon: Daemon) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = httpx.get(f"{daemon.url}/metrics", headers=HEADERS).text
    assert KEY not in text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram")
        and not family.name.startswith(
            ("process_", "python_")
        )  # of a process, which changes with a restart
        for sample in family.samples
    }


def complete(daemon: Daemon, max_tokens: int) -> httpx.Response:
    body = {**BODY, "max_tokens": max_tokens}
    return httpx.post(f"{daemon.url}/v1/completions", json=body, headers=HEADERS, timeout=120)


def test_counters_only_grow_and_the_log_has_no_secret() -> None:
    with Daemon("--api-key", KEY, "--log-format", "json") as daemon, ThreadPoolExecutor() as pool:
        answer = complete(daemon, 8).json()["choices"][0]["text"]
        for role in ("worker", "engine_core", "api_server"):
            before = counters(daemon)
            # The request is long enough to be running when the front end dies.
            running = pool.submit(complete, daemon, 4096 if role == "api_server" else 64)
            assert eventually(lambda seen=before: counters(daemon) != seen)
            victim = daemon.processes()[role]
            victim.kill()
            if role == "api_server":
                with pytest.raises(httpx.HTTPError):
                    running.result()
            else:
                assert running.result().status_code == 200
            victim.wait(30)
            assert eventually(lambda who=role, pid=victim.pid: is_back(daemon, who, pid), 60), role
            after = counters(daemon)
            assert {name for name, value in before.items() if after[name] < value} == set(), role
            restarts = [name for name in after if name[0] == "tokend:restarts_total"]
            assert sum(after[name] - before[name] for name in restarts) >= 1
        assert complete(daemon, 8).json()["choices"][0]["text"] == answer
    lines = [json.loads(line) for line in daemon.output]  # of both streams
    finished = [line for line in lines if line["logger"] == "tokend.requests"]
    assert [line["finish"] for line in finished] == ["length"] * 4
    assert [line["completion_tokens"] for line in finished] == [8, 64, 64, 8]
    assert all(0 <= line["queue"] <= line["ttft"] <= line["total"] for line in finished)
    assert {line["process"] for line in lines} >= {"tokend", "api 0", "worker 0"}
    assert SECRET not in daemon.text
    assert KEY not in daemon.text
    assert answer.strip() not in daemon.text


def is_back(daemon: Daemon, role: str, pid: int) -> bool:
    """The process has been replaced, and the daemon serves."""
    found = daemon.processes().get(role)
    if found is None or found.pid == pid:
        return False
    try:
        return httpx.get(f"{daemon.url}/health/ready", headers=HEADERS).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_flops_counter_equals_the_models_flops(daemons: DaemonPool) -> None:
    """SmolLM2-135M: 30 layers, 9 query and 3 KV heads of 64, MLP 1536, 49,152 tokens."""
    hidden, layers, num_prompt, num_output = 576, 30, 5, 4
    linear = 2 * layers * hidden * (576 + 192 + 192 + 576 + 3 * 1536)
    num_computed = num_prompt + num_output - 1  # the last token is only sampled
    pairs = num_computed * (num_computed + 1) // 2
    flops = num_computed * linear + num_output * 2 * 49152 * hidden + pairs * 4 * 576 * layers
    flags = ("--enable-mfu-metrics", "--peak-tflops", "1", "--peak-memory-gbps", "50")
    with daemons.borrow(*flags) as daemon:
        name = "vllm:estimated_flops_per_gpu_total"
        before = daemon.metric(name)
        body = {"prompt": [20, 21, 22, 23, 24], "max_tokens": num_output, "ignore_eos": True}
        httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60).raise_for_status()
        assert daemon.metric(name) - before == pytest.approx(flops, rel=1e-9)
        for share in ("flops", "bandwidth"):
            assert daemon.metric(f"tokend:step_{share}_utilization_count") == num_output
            assert daemon.metric(f"tokend:step_{share}_utilization_sum") > 0
