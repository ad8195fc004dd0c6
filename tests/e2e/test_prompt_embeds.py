"""Prompts given as embeddings, on the real daemon, against transformers and token ids."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from tests.e2e.daemon import Daemon
from tests.e2e.reference import Reference

pytestmark = pytest.mark.suite("settings")

TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    flags = ("--enable-prompt-embeds", "--dtype", "float32", "--num-gpu-blocks-override", "24")
    with Daemon(*flags, "--max-model-len", "256") as running:
        yield running


def packed(rows: torch.Tensor) -> str:
    return base64.b64encode(safetensors.torch.save({"prompt_embeds": rows.contiguous()})).decode()


def post(daemon: Daemon, **body: Any) -> httpx.Response:
    body = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True} | body
    return httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60)


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def embedded(reference: Reference, token_ids: list[int]) -> torch.Tensor:
    embed: Any = reference.model.get_input_embeddings()  # type: ignore[operator]
    rows: torch.Tensor = embed(torch.tensor(token_ids)).detach()
    return rows


def test_embeddings_of_tokens_give_what_the_tokens_give(
    daemon: Daemon, reference: Reference
) -> None:
    ids = reference.tokenizer.encode(TEXT)  # type: ignore[attr-defined]
    expected = texts(post(daemon, prompt=ids))
    rows = embedded(reference, ids)
    response = post(daemon, prompt_embeds=packed(rows))
    assert texts(response) == expected
    assert response.json()["usage"]["prompt_tokens"] == len(ids)
    several = post(daemon, prompt_embeds=[packed(rows), packed(rows[:-1])])
    assert texts(several) == [*expected, *texts(post(daemon, prompt=ids[:-1]))]
    streamed = post(daemon, prompt_embeds=packed(rows), stream=True).text
    assert streamed.count('"text"') > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_rows_agree_with_transformers(
    daemon: Daemon, reference: Reference, dtype: torch.dtype
) -> None:
    """Rows that belong to no token, long enough for several steps and blocks."""
    random = torch.Generator().manual_seed(3)
    rows = embedded(reference, reference.tokenizer.encode(TEXT * 3))  # type: ignore[attr-defined]
    rows = (rows + 0.02 * torch.randn(rows.shape, generator=random)).to(dtype)
    model: Any = reference.model
    with torch.inference_mode():
        generated = model.generate(
            inputs_embeds=rows.float()[None],
            attention_mask=torch.ones(1, len(rows)),
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=MAX_TOKENS,
            do_sample=False,
        )[0].tolist()
    body = {"prompt_embeds": packed(rows), "logprobs": 0, "return_tokens_as_token_ids": True}
    (choice,) = post(daemon, **body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in generated]


def test_equal_beginnings_are_found_in_the_cache_and_others_are_not(
    daemon: Daemon, reference: Reference
) -> None:
    """Tokens, embeddings and other embeddings of equal length never share KV."""
    ids = [0] * 64
    rows = embedded(reference, ids) + 0.5
    other = rows.clone()
    other[40] += 1.0

    def num_cached(**body: Any) -> int:
        response = post(daemon, **body)
        assert response.status_code == 200, response.text
        details = response.json()["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)

    first = texts(post(daemon, prompt_embeds=packed(rows)))
    assert num_cached(prompt=ids) == 0
    assert num_cached(prompt_embeds=packed(rows)) == 48
    assert num_cached(prompt_embeds=packed(other)) == 32
    assert num_cached(prompt_embeds=packed(rows), cache_salt="s") == 0
    assert texts(post(daemon, prompt_embeds=packed(rows))) == first


def test_preempted_and_concurrent_requests_keep_their_embeddings(
    daemon: Daemon, reference: Reference
) -> None:
    """Six requests of 100 tokens and more in 23 blocks of 16: most are preempted once."""
    ids = reference.tokenizer.encode(TEXT * 2)  # type: ignore[attr-defined]
    prompts = [ids[start:] for start in range(6)]
    expected = [texts(post(daemon, prompt=prompt, max_tokens=60))[0] for prompt in prompts]
    before = daemon.metric("vllm:num_preemptions_total")
    packs = [packed(embedded(reference, prompt)) for prompt in prompts]
    found = post(daemon, prompt_embeds=packs, max_tokens=60)
    assert texts(found) == expected
    assert daemon.metric("vllm:num_preemptions_total") > before


def test_wrong_embeddings_are_refused_by_name(daemon: Daemon) -> None:
    rows = torch.zeros(3, 576)
    infinite = rows.clone()
    infinite[1, 1] = torch.inf
    two = safetensors.torch.save({"a": rows, "b": rows.clone()})
    for body, words in (
        ({"prompt_embeds": "no base64!"}, "base64"),
        ({"prompt_embeds": base64.b64encode(b"8" * 100).decode()}, "safetensors"),
        ({"prompt_embeds": base64.b64encode(two).decode()}, "2 tensors"),
        ({"prompt_embeds": packed(torch.zeros(3, 577))}, "[tokens, 576], got [3, 577]"),
        ({"prompt_embeds": packed(torch.zeros(0, 576))}, "[tokens, 576]"),
        ({"prompt_embeds": packed(torch.zeros(2, 3, 576))}, "[tokens, 576]"),
        ({"prompt_embeds": packed(rows.double())}, "float32"),
        ({"prompt_embeds": packed(rows.int())}, "float32"),
        ({"prompt_embeds": packed(infinite)}, "finite"),
        ({"prompt_embeds": []}, "empty"),
        ({"prompt_embeds": packed(torch.zeros(300, 576))}, "300"),
        ({"prompt_embeds": packed(rows), "prompt": "x"}, "prompt does not go with"),
        ({"prompt_embeds": packed(rows), "echo": True}, "echo does not go with"),
        ({"prompt_embeds": packed(rows), "prompt_logprobs": 1}, "prompt_logprobs does not"),
        ({"prompt_embeds": packed(rows), "suffix": "x"}, "suffix does not go with"),
    ):
        response = post(daemon, **body)
        assert response.status_code == 400, (body.keys(), response.text)
        assert words in response.json()["error"]["message"], response.text


def test_a_server_without_the_flag_refuses_them(daemons: Any) -> None:
    with daemons.borrow() as plain:
        response = post(plain, prompt_embeds=packed(torch.zeros(3, 576)))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_embeds"
    assert "--enable-prompt-embeds" in response.json()["error"]["message"]
