"""Sampling parameters that edit logits, with a real model, against transformers.

Greedy tokens are checked by teacher forcing, as in reference.py, with the edits applied to the
logits of transformers by the slow reference of tests/worker/sampling/test_edits.py.
"""

from collections.abc import Iterator

import httpx
import pytest
import torch

from proto.messages.logit_edits import LogitEdits
from tests.e2e.daemon import Daemon, DaemonPool
from tests.e2e.prompts import prompts
from tests.e2e.reference import TIE_GAP, Reference
from tests.worker.sampling.edit_cases import edit_one_by_one

pytestmark = pytest.mark.suite("settings")

NUM_TOKENS = 48
EDITS = {
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {"28": 6.5, "260": -100}},
    "allowed": {"allowed_token_ids": list(range(200, 3000))},
    "all at once": {
        "presence_penalty": -0.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 0.9,
        "logit_bias": {"30": -3.0},
        "allowed_token_ids": list(range(10, 20_000)),
    },
}


@pytest.fixture
def daemon(exact_daemon: Daemon) -> Daemon:
    return exact_daemon


@pytest.fixture
def small_daemon(daemons: DaemonPool) -> Iterator[Daemon]:
    """A daemon without prefix cache, with overlapped steps and so few blocks that it preempts."""
    flags = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "24")
    with daemons.borrow("--dtype", "float32", "--async-scheduling", *flags) as running:
        yield running


def complete(daemon: Daemon, prompt: list[int], **changes: object) -> list[dict[str, object]]:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    fields = body | {"return_token_ids": True, "seed": 3} | changes
    response = httpx.post(f"{daemon.url}/v1/completions", json=fields, timeout=300)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def edits_of(fields: dict[str, object]) -> LogitEdits:
    fields = dict(fields)
    bias = fields.pop("logit_bias", {})
    allowed = fields.pop("allowed_token_ids", None)
    return LogitEdits(
        bias_token_ids=tuple(map(int, bias)),
        bias_values=tuple(bias.values()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        **fields,
    )


@pytest.mark.parametrize("name", EDITS)
def test_greedy_tokens_maximise_the_edited_logits(
    daemon: Daemon, small_daemon: Daemon, reference: Reference, name: str
) -> None:
    prompt = prompts(reference.tokenizer.encode)[-1][:60]
    edits = edits_of(EDITS[name])
    allowed = edits.allowed_token_ids and set(edits.allowed_token_ids)
    (choice,) = complete(daemon, prompt, **EDITS[name])
    output = choice["token_ids"]
    assert output != complete(daemon, prompt)[0]["token_ids"]
    with torch.inference_mode():
        logits = reference.model(
            torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)
        ).logits[0]
    for position, token_id in enumerate(output):
        assert not allowed or token_id in allowed
        best = logits[position].topk(400).indices.tolist()
        named = {*best, *prompt, *output, *edits.bias_token_ids}
        edited = torch.full_like(logits[position], float("-inf"))
        row = logits[position].tolist()
        for each in named & allowed if allowed else named:
            one = LogitEdits(**{f: getattr(edits, f) for f in PENALTIES} | bias_of(edits, each))
            edited[each] = edit_one_by_one(
                [row[each]], one, *seen(each, prompt, output[:position])
            )[0]
        gap = float(edited.max() - edited[token_id])
        assert gap < TIE_GAP, (position, token_id, gap)
    assert complete(small_daemon, prompt, **EDITS[name])[0]["token_ids"] == output


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def bias_of(edits: LogitEdits, token_id: int) -> dict[str, object]:
    """The edit's bias for one token, renumbered to token 0."""
    bias = dict(zip(edits.bias_token_ids, edits.bias_values, strict=True))
    if token_id not in bias:
        return {}
    return {"bias_token_ids": (0,), "bias_values": (bias[token_id],)}


def seen(token_id: int, prompt: list[int], output: list[int]) -> tuple[list[int], list[int]]:
    """Prompt and output with this token renumbered to 0 and all others to 1."""
    return [int(each != token_id) for each in prompt], [int(each != token_id) for each in output]


def test_draws_with_penalties_survive_preemption(
    daemon: Daemon, small_daemon: Daemon, reference: Reference
) -> None:
    """Choices of one prompt, with so few blocks that they preempt each other."""
    prompt = prompts(reference.tokenizer.encode)[-1][:70]
    fields = {
        "temperature": 0.9,
        "n": 6,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "bad_words": ["the"],
    }
    expected = [choice["token_ids"] for choice in complete(daemon, prompt, **fields)]
    found = [choice["token_ids"] for choice in complete(small_daemon, prompt, **fields)]
    assert found == expected
    assert small_daemon.metric("vllm:num_preemptions_total") > 0
    assert len({tuple(each) for each in expected}) == 6


def test_bad_words_are_never_generated(daemon: Daemon) -> None:
    body = {
        "prompt": "The capital of France is",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
    }

    def text(**fields: object) -> str:
        response = httpx.post(f"{daemon.url}/v1/completions", json=body | fields, timeout=300)
        return str(response.json()["choices"][0]["text"])

    assert "Paris" in text()
    without = text(bad_words=["Paris", "city of"])
    assert "Paris" not in without
    assert "city of" not in without


def test_repetition_detection_ends_a_loop(daemon: Daemon, reference: Reference) -> None:
    """A logit bias makes the model repeat itself."""
    rule = {"max_pattern_size": 4, "min_count": 5}
    prompt = reference.tokenizer.encode("Say it again:")
    (choice,) = complete(
        daemon, prompt, logit_bias={"28": 100}, repetition_detection=rule, max_tokens=400
    )
    assert choice["finish_reason"] == "repetition"
    assert choice["stop_reason"] == "repetition_detected"
    assert choice["token_ids"] == [28] * 5


def test_logprobs_of_named_tokens_equal_the_model(daemon: Daemon, reference: Reference) -> None:
    prompt = reference.tokenizer.encode("The capital of France is")
    named = [28, 260, 7042]
    (choice,) = complete(
        daemon,
        prompt,
        max_tokens=1,
        logprobs=0,
        logprob_token_ids=named,
        return_tokens_as_token_ids=True,
        presence_penalty=1.0,
    )
    with torch.inference_mode():
        expected = reference.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    (found,) = choice["logprobs"]["top_logprobs"]
    for token_id in named:
        assert found[f"token_id:{token_id}"] == pytest.approx(float(expected[token_id]), abs=2e-3)


def test_a_cache_salt_isolates_prefixes(daemon: Daemon, reference: Reference) -> None:
    prompt = prompts(reference.tokenizer.encode)[-1][:200]

    def cached(**fields: object) -> int:
        body = {"prompt": prompt, "max_tokens": 1} | fields
        response = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=300)
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0
