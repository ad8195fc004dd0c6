"""Several choices of one prompt have the tokens of separate requests.

With top_k 1 every choice is greedy, so transformers gives the expected tokens.
"""

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.daemon import Daemon, DaemonPool
from tests.e2e.prompts import prompts
from tests.e2e.reference import Reference

pytestmark = pytest.mark.suite("settings")

NUM_TOKENS = 16
LENGTHS = (2, 17, 100, 550)


@pytest.fixture
def daemon(exact_daemon: Daemon) -> Daemon:
    return exact_daemon


@pytest.fixture(scope="module")
def token_prompts(reference: Reference) -> list[list[int]]:
    longest = prompts(reference.tokenizer.encode)[-1]
    return [longest[length : 2 * length] for length in LENGTHS]


def complete(daemon: Daemon, prompt: list[int], **changes: object) -> list[list[int]]:
    """Token ids by choice."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "seed": 11,
    }
    response = httpx.post(f"{daemon.url}/v1/completions", json=body | changes, timeout=300)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


@pytest.fixture
def small_daemon(daemons: DaemonPool) -> Iterator[Daemon]:
    """A daemon without prefix cache and with so few blocks that choices are preempted."""
    flags = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "38")
    with daemons.borrow("--dtype", "float32", *flags) as running:
        yield running


def test_every_greedy_choice_equals_transformers(
    daemon: Daemon, reference: Reference, token_prompts: list[list[int]]
) -> None:
    pairs = []
    for prompt in token_prompts:
        outputs = complete(daemon, prompt, n=3, top_k=1)
        assert outputs == [outputs[0]] * 3
        pairs.append((prompt, outputs[0]))
    reference.assert_greedy(pairs)


def test_choices_share_one_prefill(small_daemon: Daemon, token_prompts: list[list[int]]) -> None:
    before = small_daemon.metric("vllm:iteration_tokens_total_sum")
    complete(small_daemon, token_prompts[2], n=3)
    computed = small_daemon.metric("vllm:iteration_tokens_total_sum") - before
    assert computed == 99 + 3 + 3 * (NUM_TOKENS - 1)


def test_draws_depend_only_on_seed_and_choice(
    daemon: Daemon, small_daemon: Daemon, token_prompts: list[list[int]]
) -> None:
    for prompt in token_prompts:
        outputs = complete(daemon, prompt, n=4)
        assert len({tuple(output) for output in outputs}) == 4
        assert complete(daemon, prompt, n=1) == outputs[:1]
        assert complete(daemon, prompt, n=2) == outputs[:2]
        assert complete(small_daemon, prompt, n=4) == outputs
    assert small_daemon.metric("vllm:num_preemptions_total") > 0
    assert small_daemon.metric("vllm:kv_cache_usage_perc") == 0


def test_prompt_logprobs_are_computed_once_for_all_choices(
    daemon: Daemon, token_prompts: list[list[int]]
) -> None:
    body = {"prompt": token_prompts[2], "max_tokens": 2, "prompt_logprobs": 1, "top_k": 1}
    answers = [
        httpx.post(f"{daemon.url}/v1/completions", json=body | {"n": n}, timeout=300).json()
        for n in (1, 3)
    ]
    (alone,) = answers[0]["choices"]
    for choice in answers[1]["choices"]:
        assert choice["text"] == alone["text"]
        given = [list(each) for each in choice["prompt_logprobs"][1:]]
        assert given == [list(each) for each in alone["prompt_logprobs"][1:]]
