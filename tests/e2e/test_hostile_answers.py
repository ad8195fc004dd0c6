"""Long answers, prompts that choices share, and odd numbers, measured by another client."""

import concurrent.futures
import http.client
import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.bystander import Bystander
from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("hostile")

JSON = {"content-type": "application/json"}


def send(daemon: Daemon, path: str, body: dict[str, Any] | bytes) -> tuple[int, int, bytes]:
    """Return the status of an answer, its size, and its first bytes; the rest is dropped."""
    connection = http.client.HTTPConnection("127.0.0.1", int(daemon.url.rpartition(":")[2]))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, content, JSON)
    answer = connection.getresponse()
    first = answer.read(1000)
    size = len(first)
    while part := answer.read(1 << 16):
        size += len(part)
    connection.close()
    return answer.status, size, first


def longest_token(daemon: Daemon) -> int:
    """Return a token id with a long text: a run of spaces."""
    for length in (128, 64, 32, 16, 8, 4, 2):
        body = {"prompt": " " * length, "add_special_tokens": False}
        ids = httpx.post(f"{daemon.url}/tokenize", json=body).json()["tokens"]
        if len(ids) == 1:
            return int(ids[0])
    return int(ids[0])


def context_of(daemon: Daemon) -> int:
    return int(httpx.get(f"{daemon.url}/v1/models").json()["data"][0]["max_model_len"])


@pytest.mark.parametrize("stream", [False, True])
def test_echoes_of_all_choices_are_refused_or_sent_in_parts(daemon: Daemon, stream: bool) -> None:
    """One hundred kilobytes of ids would become hundreds of megabytes."""
    ids = [longest_token(daemon)] * 1000
    asked = {"prompt": ids, "max_tokens": 0, "echo": True, "stream": stream}
    attacks = [
        asked | {"prompt": [ids * 7] * 8, "n": 128},
        asked | {"prompt": [ids[:250]] * 16, "n": 8},
        asked | {"n": 48},
        asked | {"n": 48, "return_prompt_text": True},
    ]
    plain = asked | {"n": 128, "max_tokens": 8, "echo": False}
    send(daemon, "/v1/completions", plain)  # the KV pool's pages are touched before
    with Bystander(daemon, gaps=False) as bystander:
        answers = [send(daemon, "/v1/completions", body) for body in attacks]
        bystander.rest()
    print(stream, [(status, size) for status, size, _ in answers], bystander.figures)
    for status, size, first in answers:
        assert status in (200, 400), first
        assert size < 128 << 20
        if status == 400:
            error = json.loads(first)["error"]
            assert error["param"] == "echo"
            assert "--max-response-bytes" in error["message"]
    assert [status for status, _, _ in answers] == [400, 200, 200, 200]
    assert answers[-1][1] > 5 << 20
    bystander.check()


def test_logprobs_of_long_prompts_are_sent_in_parts(daemon: Daemon) -> None:
    length = min(context_of(daemon) - 2, 400)
    prompt = [100 + number % 900 for number in range(length)]
    bodies = [
        {"prompt": prompt, "max_tokens": 1, "n": 16, "prompt_logprobs": 20},
        {"prompt": prompt, "max_tokens": 1, "n": 16, "echo": True, "logprobs": 20},
        {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True},
    ]
    with Bystander(daemon, gaps=False) as bystander:
        answers = [send(daemon, "/v1/completions", body) for body in bodies]
        bystander.rest()
    print([(status, size) for status, size, _ in answers], bystander.figures)
    assert [status for status, _, _ in answers] == [200] * 3
    assert answers[0][1] > 5 << 20
    bystander.check()


def test_many_ids_are_not_detokenised_at_once(daemon: Daemon) -> None:
    ids = [longest_token(daemon)] * 131_072
    with Bystander(daemon, gaps=False) as bystander:
        answers = [send(daemon, "/detokenize", {"tokens": each}) for each in (ids, [*ids, 5])]
        bystander.rest()
    print([(status, size) for status, size, _ in answers], bystander.figures)
    assert [status for status, _, _ in answers] == [200, 400]
    assert json.loads(answers[1][2])["error"]["param"] == "tokens"
    bystander.check()


def test_many_choices_cost_one_prompt(daemon: Daemon) -> None:
    """Also if the first one ends before the others begin."""
    length = min(context_of(daemon) - 2, 500)
    tokens = []
    for n in (1, 16):
        prompt = [n + number % 900 for number in range(100, 100 + length)]
        before = daemon.metric("vllm:iteration_tokens_total_sum")
        started = time.monotonic()
        body = {"prompt": prompt, "max_tokens": 1, "n": n, "prompt_logprobs": 0}
        status, _, first = send(daemon, "/v1/completions", body)
        print(n, time.monotonic() - started)
        assert status == 200, first
        tokens.append(daemon.metric("vllm:iteration_tokens_total_sum") - before)
    print(tokens)
    assert tokens[1] < 1.3 * tokens[0]


def test_odd_numbers_are_refused_by_name(daemon: Daemon) -> None:
    """Thousands of digits, and numbers that are not finite, anywhere in a body."""
    numbers = ["9" * 5000, "-" + "9" * 400, "NaN", "-Infinity", "1e999", "9" * 3_000_000]
    places = [
        ("/v1/completions", '{"prompt": "x", "seed": %s}', "seed"),
        ("/v1/completions", '{"prompt": "x", "no_field": {"a": [%s]}}', "no_field"),
        ("/v1/chat/completions", '{"messages": [], "metadata": {"a": %s}}', "metadata"),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}', "messages"),
        ("/v1/responses", '{"input": "x", "tools": [{"parameters": {"a": %s}}]}', "tools"),
        ("/v1/messages", '{"max_tokens": %s}', "max_tokens"),
        ("/tokenize", '{"prompt": %s}', "prompt"),
        ("/detokenize", '{"tokens": [%s]}', "tokens"),
    ]
    cases = [(path, body % number, name) for path, body, name in places for number in numbers]
    with Bystander(daemon) as bystander, concurrent.futures.ThreadPoolExecutor(4) as pool:
        bodies = [(daemon, path, body.encode()) for path, body, _ in cases]
        answers = list(pool.map(send, *zip(*bodies, strict=True)))
        bystander.rest()
    for (path, _, name), (status, _, first) in zip(cases, answers, strict=True):
        error = json.loads(first)["error"]
        assert (status, name in error["message"]) == (400, True), (path, name, first)
    bystander.check()
