"""While a tenant floods a real daemon, another gets its first token within a few steps."""

import threading
from collections.abc import Iterator
from statistics import median

import httpx
import pytest

from tests.e2e.daemon import Daemon, DaemonPool

pytestmark = pytest.mark.suite("settings")

STEP_TOKENS = 64
FLOOD_TOKENS = 400
FLOOD_REQUESTS = 24
FEW_STEPS = 12
"""Two are promised. The rest is for what passes between reading the counter and the request; in
the order of arrival a request would wait for some 7 steps for each of those before it."""


def complete(daemon: Daemon, tenant: str, prompt: list[int], max_tokens: int) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(
        f"{daemon.url}/v1/completions", json=body, headers={"X-Tenant-ID": tenant}, timeout=600
    )
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


def steps(daemon: Daemon) -> float:
    return daemon.metric("vllm:iteration_tokens_total_count")


def probe(number: int) -> list[int]:
    return [500 + 31 * number + 7 * position for position in range(24)]


@pytest.fixture
def tenants_daemon(daemons: DaemonPool) -> Iterator[Daemon]:
    with daemons.borrow(
        "--dtype",
        "float32",
        "--tenant-by",
        "header",
        "--max-model-len",
        "2048",
        "--max-num-batched-tokens",
        str(STEP_TOKENS),
        "--max-num-seqs",
        "8",
    ) as running:
        yield running


def test_a_flood_delays_another_tenant_by_at_most_a_few_steps(tenants_daemon: Daemon) -> None:
    daemon = tenants_daemon
    idle = [complete(daemon, "quiet", probe(number), 1) for number in range(5)]
    answers: list[list[int]] = []

    def flood(number: int) -> None:
        prompt = [1000 + 13 * number + 5 * position for position in range(FLOOD_TOKENS)]
        answers.append(complete(daemon, "flood", prompt, 4))

    threads = [threading.Thread(target=flood, args=(each,)) for each in range(FLOOD_REQUESTS)]
    for each in threads:
        each.start()
    while daemon.metric("vllm:num_requests_waiting") < FLOOD_REQUESTS - 9:
        assert not answers, "the flood ended before the probe"
    waits = []
    for number, tokens in enumerate(idle):
        before = steps(daemon)
        assert complete(daemon, "quiet", probe(number), 1) == tokens
        waits.append(steps(daemon) - before)
    num_over = len(answers)
    for each in threads:
        each.join()
    assert len(answers) == FLOOD_REQUESTS
    assert num_over < FLOOD_REQUESTS - 10, "the flood ended too early"
    assert median(waits) <= FEW_STEPS, waits
