"""Every wrong request is answered in OpenAI's error shape and never reaches the engine."""

import json

import pytest

JSON = {"content-type": "application/json"}
PATH = "/v1/completions"

BAD_FIELDS = [
    ({"prompt": ""}, "prompt", ""),
    ({"prompt": []}, "prompt", ""),
    ({"prompt": [[]]}, "prompt", ""),
    ({"prompt": ["x", ""]}, "prompt", ""),
    ({"prompt": None}, "prompt", ""),
    ({"prompt": 5}, "prompt", ""),
    ({"prompt": {"a": 1}}, "prompt", ""),
    ({"prompt": ["x", [1]]}, "prompt", ""),
    ({"prompt": [1, "x"]}, "prompt", ""),
    ({"prompt": [1.5]}, "prompt", ""),
    ({"prompt": [1.0]}, "prompt", ""),
    ({"prompt": [True]}, "prompt", ""),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [2**63]}, "prompt", str(2**63)),
    ({"prompt": [10**6]}, "prompt", "vocabulary"),
    ({"prompt": ["x"] * 1025}, "prompt", "1024"),
    ({"prompt": "a\ud800"}, "prompt", "surrogate"),
    ({"prompt": [5] * 300}, "prompt", "300"),
    ({"prompt": [5] * 300}, "prompt", "256"),
    ({"prompt": "x" * 10**6}, "prompt", "256"),
    ({"prompt": [5] * 200, "max_tokens": 57}, "max_tokens", "257"),
    ({"prompt": [5] * 200, "max_tokens": 57}, "max_tokens", "256"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens", "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens", "max_tokens"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"temperature": float("nan")}, "temperature", "temperature"),
    ({"temperature": float("inf")}, "temperature", "temperature"),
    ({"temperature": "1"}, "temperature", "temperature"),
    ({"temperature": 10**400}, "temperature", "temperature"),
    ({"top_p": 0}, "top_p", "top_p"),
    ({"top_p": 1.1}, "top_p", "top_p"),
    ({"top_k": -2}, "top_k", "top_k"),
    ({"min_p": 2}, "min_p", "min_p"),
    ({"n": 10**6}, "n", "less_than_equal"),
    ({"n": 0}, "n", "n"),
    ({"n": True}, "n", "n"),
    ({"n": 128, "prompt": [[5]] * 9}, "n", "1024"),
    ({"n": 2, "temperature": 0}, "n", "temperature"),
    ({"seed": 2**63}, "seed", "less_than_equal"),
    ({"seed": -(2**63) - 1}, "seed", "greater_than_equal"),
    ({"stop": ""}, "stop", "stop"),
    ({"stop": [""]}, "stop", "stop"),
    ({"stop": ["a"] * 5}, "stop", "stop"),
    ({"stop": "a" * 10**6}, "stop", "stop"),
    ({"stop": "\udc00"}, "stop", "stop"),
    ({"stop": [1]}, "stop", "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "vocabulary"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "vocabulary"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "128"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids", "vocabulary"),
    ({"min_tokens": 17}, "min_tokens", "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": -2}, "logprobs", "20"),
    ({"logprobs": True}, "logprobs", ""),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "x"),
    ({"stream": "yes"}, "stream", "stream"),
    ({"request_id": "a b\n"}, "request_id", ""),
    ({"temprature": 1}, "temprature", "temprature"),
    ({"presence_penalty": 1.0}, "presence_penalty", "not available yet"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "not available yet"),
    ({"best_of": 2}, "best_of", "not available yet"),
    ({"suffix": "x"}, "suffix", "not available yet"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not available yet"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "not available yet"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not available yet"),
    ({"priority": True}, "priority", ""),
    ({"priority": 1.5}, "priority", ""),
    ({"priority": "1"}, "priority", ""),
    ({"priority": 1 << 63}, "priority", ""),
]


async def expect_error(front_end, path: str, body: bytes, status: int) -> dict:
    response = await front_end.http.post(path, content=body, headers=JSON)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"]
    return error


async def test_bad_fields(start, say):
    async with start(say("!")) as front_end:
        for fields, param, words in BAD_FIELDS:
            body = json.dumps({"prompt": "hello", **fields}).encode()
            error = await expect_error(front_end, PATH, body, 400)
            assert error["param"] == param, (fields, error)
            assert words in error["message"], (fields, error)
            assert error["type"] == "BadRequestError"
        assert front_end.engine.requests.empty()
        assert (await front_end.complete()).json()["choices"][0]["text"] == "!"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1, 2]",
        b'"text"',
        b"null",
        b'{"prompt": "x"',
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
    ],
    ids=lambda body: repr(body[:12]),
)
async def test_bad_bodies(start, say, body):
    async with start(say("!")) as front_end:
        await expect_error(front_end, PATH, body, 400)
        assert front_end.engine.requests.empty()


async def test_content_types(start, say):
    async with start(say("!")) as front_end:
        body = b'{"prompt": "x"}'
        for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
            response = await front_end.http.post(
                PATH, content=body, headers={"content-type": content_type}
            )
            assert response.status_code == 415
            assert response.json()["error"]["type"] == "UnsupportedMediaTypeError"
        response = await front_end.http.post(
            PATH, content=body, headers={"content-type": "Application/JSON; charset=utf-8"}
        )
        assert response.status_code == 200


async def test_models(start, say):
    async with start(say("!")) as front_end:
        error = await expect_error(front_end, PATH, b'{"prompt": "x", "model": "gpt-9"}', 404)
        assert "gpt-9" in error["message"]
        assert error["param"] == "model"
        await expect_error(front_end, PATH, b'{"prompt": "x", "model": "\\ud800"}', 400)
        assert (await front_end.complete(model="toy")).status_code == 200


async def test_large_bodies(start, say):
    async with start(say("!")) as front_end:
        response = await front_end.http.post(PATH, content=b" " * ((32 << 20) + 1), headers=JSON)
        assert response.status_code == 413

        async def endless():
            for _ in range(40):
                yield b" " * (1 << 20)

        response = await front_end.http.post(PATH, content=endless(), headers=JSON)
        assert response.status_code == 413
        assert (await front_end.complete()).status_code == 200


async def test_unknown_paths_and_methods(start, say):
    async with start(say("!")) as front_end:
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("GET", PATH, 405),
            ("DELETE", "/health", 405),
        ):
            response = await front_end.http.request(method, path)
            assert response.status_code == status
            assert response.json()["error"]["code"] == status
        assert "POST" in (await front_end.http.get(PATH)).headers["allow"]


async def test_neutral_and_ignored_fields(start, say):
    neutral = {
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "response_format": {"type": "text"},
        "use_beam_search": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "priority": 0,
        "user": "ann",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    names = "stop max_tokens temperature seed logprobs n stream_options suffix model top_k"
    later = "structured_outputs cache_salt bad_words timeout_ms"
    nothing = dict.fromkeys(f"{names} {later}".split())
    chat = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "reasoning_effort": None,
        "top_logprobs": None,
        "max_completion_tokens": None,
        "chat_template": None,
        "add_generation_prompt": True,
    }
    async with start(say("!")) as front_end:
        response = await front_end.complete(**neutral, **nothing)
        assert response.status_code == 200, response.text
        chat_fields = {**neutral, **nothing, **chat}
        del chat_fields["suffix"]
        response = await front_end.chat(**chat_fields)
        assert response.status_code == 200, response.text
        for fields in ({"tools": [{}]}, {"tool_choice": "auto"}, {"chat_template": "x"}):
            response = await front_end.chat(**fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(fields))
        response = await front_end.chat(top_logprobs=2)
        assert response.json()["error"]["param"] == "top_logprobs"
