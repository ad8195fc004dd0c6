"""Beam search through the daemon returns the sequences of transformers in the same order."""

import asyncio
import json

import httpx
import pytest
import torch

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.prompts import prompts
from tests.e2e.reference import TIE_GAP, Reference, packaged_model

pytestmark = pytest.mark.suite("settings")

MAX_TOKENS = 20
QUESTIONS = ("What is the capital of France?", "Name a colour.")
REQUEST_PARAMS = [
    {"n": 2},
    {"n": 4},
    {"n": 4, "length_penalty": 2.0, "early_stopping": "never"},
    {"n": 4, "length_penalty": 0.0, "early_stopping": True},
    {"n": 2, "length_penalty": -1.0, "early_stopping": "never"},
]


@pytest.fixture
def daemon(exact_daemon: Daemon) -> Daemon:
    return exact_daemon


@pytest.fixture(scope="module")
def token_prompts(reference: Reference) -> list[list[int]]:
    """Questions, whose answers end early, and text, which continues to the limit."""
    chats = [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS
    ]
    return [reference.tokenizer.encode(chat) for chat in chats] + prompts(
        reference.tokenizer.encode
    )[13:14]


def body(prompt: list[int], params: dict[str, object]) -> dict[str, object]:
    return {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "use_beam_search": True,
        "return_token_ids": True,
        **params,
    }


def complete(daemon: Daemon, prompt: list[int], params: dict[str, object]) -> list[list[int]]:
    url = f"{daemon.url}/v1/completions"
    response = httpx.post(url, json=body(prompt, params), timeout=300)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    for choice in choices:
        ended = choice["token_ids"][-1] in packaged_model().eos_token_ids
        assert choice["finish_reason"] == ("stop" if ended else "length")
    return [choice["token_ids"] for choice in choices]


class ReferenceSearches:
    """Beam searches by transformers, each computed once."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._found: dict[str, list[list[int]]] = {}

    def find(self, prompt: list[int], params: dict[str, object]) -> list[list[int]]:
        key = f"{prompt} {params}"
        if key not in self._found:
            self._found[key] = self._search(prompt, dict(params))
        return self._found[key]

    @torch.inference_mode()
    def _search(self, prompt: list[int], params: dict[str, object]) -> list[list[int]]:
        stop_ids = list(packaged_model().eos_token_ids)
        width = params.pop("n")
        sequences = self._reference.model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
            **params,
        )
        outputs = sequences[:, len(prompt) :].tolist()
        return [_until_stop(output, stop_ids) for output in outputs]

    @torch.inference_mode()
    def score(self, prompt: list[int], output: list[int]) -> float:
        """Sum of the log-probabilities of `output`."""
        logits = self._reference.model(torch.tensor([prompt + output[:-1]])).logits[0]
        logprobs = logits[len(prompt) - 1 :].log_softmax(dim=-1)
        return float(logprobs.gather(1, torch.tensor(output)[:, None]).sum())

    def assert_equal(
        self, prompt: list[int], params: dict[str, object], outputs: list[list[int]]
    ) -> None:
        """The sequences are the same in the same order, except for equally likely ones."""
        for ours, theirs in zip(outputs, self.find(prompt, params), strict=True):
            if ours != theirs:
                gap = abs(self.score(prompt, ours) - self.score(prompt, theirs))
                assert gap < TIE_GAP, f"{params}: {ours} instead of {theirs}"
                print(f"a tie: {gap}")


def _until_stop(output: list[int], stop_ids: list[int]) -> list[int]:
    ends = [index for index, token_id in enumerate(output) if token_id in stop_ids]
    return output[: ends[0] + 1] if ends else output


@pytest.fixture(scope="module")
def searches(reference: Reference) -> ReferenceSearches:
    return ReferenceSearches(reference)


@pytest.mark.parametrize("params", REQUEST_PARAMS, ids=str)
def test_beam_search_alone_equals_transformers(
    daemon: Daemon,
    searches: ReferenceSearches,
    token_prompts: list[list[int]],
    params: dict[str, object],
) -> None:
    for prompt in token_prompts:
        searches.assert_equal(prompt, params, complete(daemon, prompt, params))


async def test_concurrent_beam_searches_in_a_small_pool(
    searches: ReferenceSearches, token_prompts: list[list[int]]
) -> None:
    """Rows are preempted, and a disconnect aborts all rows of its request."""
    flags = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "28")
    with Daemon("--dtype", "float32", *flags) as daemon:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:
            pairs = [(prompt, params) for prompt in token_prompts for params in REQUEST_PARAMS[:2]]
            leaving = asyncio.create_task(
                client.post(
                    "/v1/completions", json=body(token_prompts[2], {"n": 4, "max_tokens": 200})
                )
            )
            pending = [
                client.post("/v1/completions", json=body(prompt, params))
                for prompt, params in pairs
            ]
            gathered = asyncio.gather(*pending)
            await asyncio.to_thread(eventually, lambda: daemon.metric("vllm:num_requests_running"))
            leaving.cancel()
            responses = await gathered
        assert daemon.metric("vllm:num_preemptions_total") > 0
        assert eventually(lambda: daemon.metric("vllm:kv_cache_usage_perc") == 0)
    for (prompt, params), response in zip(pairs, responses, strict=True):
        outputs = [choice["token_ids"] for choice in response.json()["choices"]]
        searches.assert_equal(prompt, params, outputs)


def test_beams_of_agents_whose_prompts_are_loaded(
    searches: ReferenceSearches, token_prompts: list[list[int]]
) -> None:
    """From host memory. A search ends its turn without KV retained: no row is the whole answer."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
    }
    flags = ("--num-gpu-blocks-override", "40", "--scheduling-policy", "continuum")
    flags = (*flags, "--pin-policy", "fixed", "--kv-transfer-config", json.dumps(transfer))
    params: dict[str, object] = {"n": 3}
    long = token_prompts[2]
    with Daemon("--dtype", "float32", *flags) as daemon:
        for turn in range(3):
            asked = params | {"agent_hint": {"job_id": "searching", "is_last_step": turn == 2}}
            for prompt in token_prompts[1:]:
                searches.assert_equal(prompt, params, complete(daemon, prompt, asked))
            complete(daemon, long[::-1] * 2, {"n": 1})  # evicts the searches' prompts
        assert daemon.metric("vllm:kv_offload_load_size_count") > 0
        assert daemon.metric("tokend:pins_taken_total") == 0
        assert daemon.metric("vllm:num_requests_running") == 0
