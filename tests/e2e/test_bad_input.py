"""Invalid input is answered with a 4xx that names the reason; other requests are unaffected."""

import httpx
import pytest

from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("daemons")

CONTROL = {"prompt": "The sun rises in the", "max_tokens": 8, "temperature": 0}

BAD_COMPLETIONS = {
    "malformed JSON": (b'{"prompt": "x"', 400, []),
    "not an object": (b"[1, 2]", 400, []),
    "unknown model": ({"prompt": "x", "model": "gpt-9"}, 404, ["gpt-9"]),
    "empty prompt": ({"prompt": ""}, 400, ["prompt"]),
    "empty list": ({"prompt": []}, 400, ["prompt"]),
    "no prompt": ({"max_tokens": 4}, 400, ["prompt"]),
    "prompt over the context": ({"prompt": [5] * 9000}, 400, ["9000", "8192"]),
    "prompt and output over": ({"prompt": [5] * 8000, "max_tokens": 500}, 400, ["8500", "8192"]),
    "token id too large": ({"prompt": [5, 49152]}, 400, ["49152"]),
    "negative token id": ({"prompt": [-1]}, 400, ["prompt"]),
    "enormous token id": ({"prompt": [2**63]}, 400, ["prompt"]),
    "fractional token id": ({"prompt": [1.5]}, 400, ["prompt"]),
    "NaN temperature": (b'{"prompt": "x", "temperature": NaN}', 400, ["temperature"]),
    "infinite temperature": (b'{"prompt": "x", "temperature": Infinity}', 400, ["temperature"]),
    "negative temperature": ({"prompt": "x", "temperature": -1}, 400, ["temperature"]),
    "negative max_tokens": ({"prompt": "x", "max_tokens": -1}, 400, ["max_tokens"]),
    "huge n": ({"prompt": "x", "n": 10**6}, 400, ["n"]),
    "no choices": ({"prompt": "x", "n": 0}, 400, ["n"]),
    "top_p of 0": ({"prompt": "x", "top_p": 0}, 400, ["top_p"]),
    "top_k below": ({"prompt": "x", "top_k": -2}, 400, ["top_k"]),
    "min_p above": ({"prompt": "x", "min_p": 2}, 400, ["min_p"]),
    "logprobs above": ({"prompt": "x", "logprobs": 21}, 400, ["logprobs"]),
    "min over max": ({"prompt": "x", "min_tokens": 9, "max_tokens": 4}, 400, ["min_tokens"]),
    "empty stop": ({"prompt": "x", "stop": ""}, 400, ["stop"]),
    "seed too large": ({"prompt": "x", "seed": 2**70}, 400, ["seed"]),
    "a field without effect": ({"prompt": "x", "suffix": "y"}, 400, ["suffix"]),
    "penalty above": ({"prompt": "x", "presence_penalty": 3}, 400, ["presence_penalty"]),
    "penalty of 0": ({"prompt": "x", "repetition_penalty": 0}, 400, ["repetition_penalty"]),
    "bias of an unknown token": ({"prompt": "x", "logit_bias": {"99999": 1}}, 400, ["logit_bias"]),
    "nothing allowed": ({"prompt": "x", "allowed_token_ids": []}, 400, ["allowed_token_ids"]),
    "bad word of spaces": ({"prompt": "x", "bad_words": [" "]}, 400, ["bad_words"]),
    "named without logprobs": (
        {"prompt": "x", "logprob_token_ids": [1]},
        400,
        ["logprob_token_ids"],
    ),
    "huge salt": ({"prompt": "x", "cache_salt": "s" * 10**6}, 400, ["cache_salt"]),
    "huge pattern": (
        {"prompt": "x", "repetition_detection": {"max_pattern_size": 10**9, "min_count": 2}},
        400,
        ["repetition_detection"],
    ),
    "stream options alone": (
        {"prompt": "x", "stream_options": {"include_usage": True}},
        400,
        ["stream_options"],
    ),
}


def control(daemon: Daemon) -> str:
    response = httpx.post(f"{daemon.url}/v1/completions", json=CONTROL, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_invalid_completions_are_refused(daemon: Daemon) -> None:
    before = control(daemon)
    for name, (body, status, words) in BAD_COMPLETIONS.items():
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        response = httpx.post(
            f"{daemon.url}/v1/completions", headers={"Content-Type": "application/json"}, **content
        )
        assert response.status_code == status, (name, response.text)
        error = response.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}, name
        for word in words:
            assert word in error["message"] or word == error["param"], (name, word, error)
    assert control(daemon) == before


def test_other_content_types_are_refused(daemon: Daemon) -> None:
    response = httpx.post(
        f"{daemon.url}/v1/completions", content=b"prompt=x", headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == 415


def test_invalid_chats_are_refused(daemon: Daemon) -> None:
    for messages in ([], [{"role": "user", "content": None}], "hello", [{}]):
        response = httpx.post(f"{daemon.url}/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 400, response.text
    assert control(daemon)


def test_a_request_beyond_the_pool_is_refused_with_both_lengths() -> None:
    with Daemon("--num-gpu-blocks-override", "9") as daemon:
        assert "128" in daemon.text, "one warning line names the usable length"
        url = f"{daemon.url}/v1/completions"
        response = httpx.post(url, json={"prompt": [5] * 100, "max_tokens": 29})
        assert response.status_code == 400
        assert "129" in response.json()["error"]["message"]
        assert "128" in response.json()["error"]["message"]
        fits = httpx.post(url, json={"prompt": [5] * 100, "max_tokens": 28}, timeout=60)
        assert fits.status_code == 200, fits.text
