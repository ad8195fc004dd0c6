"""Invalid requests get an error in OpenAI's shape and never reach the engine."""

import json

import pytest

from tests.api_server.conftest import concurrently

JSON = {"content-type": "application/json"}
PATH = "/v1/completions"
BAD_FIELDS = [
    ({"prompt": ""}, "prompt", ""),
    ({"prompt": []}, "prompt", ""),
    ({"prompt": [[]]}, "prompt", ""),
    ({"prompt": ["x", ""]}, "prompt", ""),
    ({"prompt": None}, "prompt", "prompt is missing"),
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
    ({"temperature": 10001}, "temperature", "between 0 and 10000"),
    ({"n": 128, "prompt": ["x"] * 1024}, "n", "131072"),
    ({"prompt": [10**4000]}, "prompt", "308 digits"),
    ({"prompt": ["x"] * (10**5)}, "prompt", "1024"),
    ({"stop_token_ids": [10**4000]}, "stop_token_ids", "308 digits"),
    ({"stop_token_ids": ["x"] * 10**5}, "stop_token_ids", ""),
    ({"max_tokens": 10**4000}, "max_tokens", "308 digits"),
    (
        {"n": 128, "prompt": [[5]] * 8, "max_tokens": 100, "logprobs": 20},
        "logprobs",
        "--max-response-bytes",
    ),
    ({"temperature": "1"}, "temperature", "temperature must be a number"),
    ({"temperature": 10**400}, "temperature", "temperature"),
    ({"top_p": 0}, "top_p", "top_p"),
    ({"top_p": 1.1}, "top_p", "top_p"),
    ({"top_k": -2}, "top_k", "top_k"),
    ({"min_p": 2}, "min_p", "min_p"),
    ({"n": 10**6}, "n", "n must be at most 128"),
    ({"n": 0}, "n", "n"),
    ({"n": True}, "n", "n must be a whole number"),
    ({"stop_token_ids": [5, "x"]}, "stop_token_ids", "stop_token_ids[1] must be a whole number"),
    ({"n": 128, "prompt": [[5]] * 9}, "n", "1024"),
    ({"n": 2, "temperature": 0}, "n", "temperature"),
    ({"use_beam_search": 1}, "use_beam_search", ""),
    ({"use_beam_search": True, "stream": True}, "stream", "use_beam_search"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature", "use_beam_search"),
    ({"use_beam_search": True, "top_p": 0.5}, "top_p", "use_beam_search"),
    ({"use_beam_search": True, "top_k": 5}, "top_k", "use_beam_search"),
    ({"use_beam_search": True, "min_p": 0.5}, "min_p", "use_beam_search"),
    ({"use_beam_search": True, "stop": "x"}, "stop", "use_beam_search"),
    ({"use_beam_search": True, "logprobs": 0}, "logprobs", "use_beam_search"),
    ({"use_beam_search": True, "prompt_logprobs": 0}, "prompt_logprobs", "use_beam_search"),
    ({"use_beam_search": True, "length_penalty": 5.1}, "length_penalty", "between -5 and 5"),
    ({"use_beam_search": True, "length_penalty": float("nan")}, "length_penalty", "finite"),
    ({"use_beam_search": True, "length_penalty": "1"}, "length_penalty", ""),
    ({"early_stopping": "always"}, "early_stopping", "must be true or false or 'never'"),
    ({"use_beam_search": True, "early_stopping": 1}, "early_stopping", ""),
    ({"length_penalty": 2}, "length_penalty", "use_beam_search"),
    ({"early_stopping": True}, "early_stopping", "use_beam_search"),
    ({"agent_hint": {"job_id": "a", "ttl_ms": 0}}, "agent_hint", "ttl_ms must be more than 0"),
    ({"session_id": ""}, "session_id", "empty"),
    ({"seed": 2**63}, "seed", "at most"),
    ({"seed": -(2**63) - 1}, "seed", "at least"),
    ({"stop": ""}, "stop", "stop must not be empty"),
    ({"stop": [""]}, "stop", "stop"),
    ({"stop": ["a"] * 1025}, "stop", "stop"),
    ({"stop": "ä" * 2**15 + "a"}, "stop", "takes 65536 bytes of strings together, got 65537"),
    ({"stop": "\udc00"}, "stop", "stop"),
    ({"stop": [1]}, "stop", "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "vocabulary"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "vocabulary"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "128"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids", "vocabulary"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": -2}, "logprobs", "20"),
    ({"logprobs": True}, "logprobs", ""),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "20"),
    (
        {"return_routed_experts": True},
        "return_routed_experts",
        "needs a server with --enable-return-routed-experts",
    ),
    (
        {"use_beam_search": True, "return_routed_experts": True},
        "return_routed_experts",
        "use_beam_search",
    ),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "true or false"),
    ({"stream": True, "stream_options": []}, "stream_options", "must be an object"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options",
        "include_obfuscation",
    ),
    ({"stream": True, "stream_interval": 0}, "stream_interval", "at least 1"),
    ({"stream_interval": 2}, "stream_interval", "needs stream"),
    ({"stream": "yes"}, "stream", "stream"),
    ({"request_id": "a b\n"}, "request_id", ""),
    ({"best_of": 2}, "best_of", "not available here"),
    ({"suffix": "x"}, "suffix", "cannot fill in the middle"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "not available yet"),
    ({"store": True}, "store", "not available here"),
    ({"service_tier": "flex"}, "service_tier", "not available here"),
    ({"stop_sequences": ["x"]}, "stop_sequences", "not available here"),
    ({"thinking": {"type": "enabled"}}, "thinking", "not available here"),
    ({"kv_transfer_params": {"host": "x"}}, "kv_transfer_params", "has a PeerConnector"),
    ({"kv_transfer_params": [1]}, "kv_transfer_params", "must be an object"),
    ({"messages": []}, "messages", "not available here"),
    ({"presence_penalty": 3}, "presence_penalty", "between -2 and 2"),
    ({"presence_penalty": "1"}, "presence_penalty", "presence_penalty must be a number"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "between -2 and 2"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty", "finite"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
    ({"repetition_penalty": -1}, "repetition_penalty", "0.01"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty", "finite"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias", "finite"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "must be a number"),
    ({"logit_bias": {"5": True}}, "logit_bias", "must be a number"),
    ({"logit_bias": {"fox": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "more than once"),
    ({"logit_bias": {"400000": 1}}, "logit_bias", "vocabulary"),
    ({"logit_bias": {str(each): 1 for each in range(1025)}}, "logit_bias", "1024"),
    ({"logit_bias": [5]}, "logit_bias", "must be an object"),
    ({"bad_words": [""]}, "bad_words", "must not be empty"),
    ({"bad_words": ["  "]}, "bad_words", "spaces"),
    ({"bad_words": ["x"] * 129}, "bad_words", "128"),
    ({"bad_words": ["x" * 257]}, "bad_words", "256"),
    (
        {
            "bad_words": [
                "".join(map(chr, range(0x4E00 + 99 * n, 0x4E00 + 99 * n + 99))) for n in range(8)
            ]
        },
        "bad_words",
        "1024 tokens",
    ),
    ({"bad_words": ["\ud800"]}, "bad_words", "surrogate"),
    ({"bad_words": "x"}, "bad_words", "must be a list"),
    ({"allowed_token_ids": []}, "allowed_token_ids", ""),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "vocabulary"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "vocabulary"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids", "must be a whole number"),
    ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids", "min_tokens"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "needs logprobs"),
    ({"logprobs": 1, "logprob_token_ids": [5] * 129}, "logprob_token_ids", "128"),
    ({"logprobs": 1, "logprob_token_ids": [10**6]}, "logprob_token_ids", "vocabulary"),
    (
        {
            "n": 128,
            "prompt": [[5]] * 8,
            "max_tokens": 100,
            "logprobs": 0,
            "logprob_token_ids": list(range(128)),
        },
        "logprobs",
        "--max-response-bytes",
    ),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "nothing"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1"),
    ({"truncate_prompt_tokens": -1, "max_tokens": 256}, "truncate_prompt_tokens", "nothing"),
    ({"truncate_prompt_tokens": 300, "prompt": [5] * 400}, "prompt", "256"),
    ({"truncate_prompt_tokens": 5, "truncation_side": "top"}, "truncation_side", "'left'"),
    ({"truncation_side": "left"}, "truncation_side", "needs truncate_prompt_tokens"),
    ({"cache_salt": ""}, "cache_salt", "must not be empty"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "1024"),
    ({"cache_salt": "a\x00b"}, "cache_salt", "control characters"),
    ({"cache_salt": 5}, "cache_salt", "must be a string"),
    ({"detokenize": False, "stop": "x"}, "stop", "detokenize"),
    ({"repetition_detection": 5}, "repetition_detection", "must be an object"),
    ({"repetition_detection": {}}, "repetition_detection", "max_pattern_size is missing"),
    (
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
        "repetition_detection",
        "min_count of 2 or more",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 257, "min_count": 2}},
        "repetition_detection",
        "256",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
        "repetition_detection",
        "min_pattern_size",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 10**6}},
        "repetition_detection",
        "4096",
    ),
    *[
        ({"use_beam_search": True, **fields}, next(iter(fields)), "use_beam_search")
        for fields in (
            {"presence_penalty": 1},
            {"frequency_penalty": 1},
            {"repetition_penalty": 1.1},
            {"logit_bias": {"5": 1}},
            {"bad_words": ["x"]},
            {"allowed_token_ids": [5]},
            {"include_stop_str_in_output": True},
            {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}},
        )
    ],
    ({"priority": True}, "priority", ""),
    ({"priority": 1.5}, "priority", ""),
    ({"priority": "1"}, "priority", ""),
    ({"priority": 1 << 63}, "priority", ""),
]


async def expect_error(front_end, path: str, content: bytes, status: int) -> dict:
    response = await front_end.http.post(path, content=content, headers=JSON)
    assert response.status_code == status, (content[:200], response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    too_long = error["message"].startswith("This model's maximum context length is ")
    assert error["code"] == ("context_length_exceeded" if too_long else status)
    assert error["message"]
    return error


async def test_bad_fields(start, scripted):
    async with start(scripted("!")) as front_end:

        async def check(case):
            fields, param, words = case
            content = json.dumps({"prompt": "hello", **fields}).encode()
            error = await expect_error(front_end, PATH, content, 400)
            assert error["param"] == param, (fields, error)
            assert words in error["message"], (fields, error)
            assert len(error["message"]) < 400, fields
            assert not error["message"].endswith(")") or "[0, " in error["message"], error
            assert error["type"] == "BadRequestError"

        await concurrently(check, BAD_FIELDS)
        assert front_end.engine.requests.empty()
        assert (await front_end.complete()).json()["choices"][0]["text"] == "!"


async def test_models(start, scripted):
    async with start(scripted("!")) as front_end:
        error = await expect_error(front_end, PATH, b'{"prompt": "x", "model": "gpt-9"}', 404)
        assert "gpt-9" in error["message"]
        assert error["param"] == "model"
        await expect_error(front_end, PATH, b'{"prompt": "x", "model": "\\ud800"}', 400)
        assert (await front_end.complete(model="toy")).status_code == 200


async def test_unknown_paths_and_methods(start, scripted):
    async with start(scripted("!")) as front_end:
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("GET", PATH, 405),
            ("DELETE", "/health", 405),
        ):
            response = await front_end.http.request(method, path)
            assert response.status_code == status
            assert response.json()["error"]["code"] == status
        assert "POST" in (await front_end.http.get(PATH)).headers["allow"]


async def test_neutral_and_ignored_fields(start, scripted):
    neutral = {
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "response_format": {"type": "text"},
        "use_beam_search": False,
        "early_stopping": False,
        "length_penalty": 1,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "priority": 0,
        "user": "ann",
        "metadata": {"a": "b"},
        "store": False,
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
    async with start(scripted("!")) as front_end:
        response = await front_end.complete(**neutral, **nothing)
        assert response.status_code == 200, response.text
        chat_fields = {**neutral, **nothing, **chat}
        del chat_fields["suffix"]
        response = await front_end.chat(**chat_fields)
        assert response.status_code == 200, response.text
        for fields in ({"tools": {}}, {"tool_choice": "auto"}, {"chat_template": "x"}):
            response = await front_end.chat(**fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(fields))
        response = await front_end.chat(top_logprobs=2)
        assert response.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"prompt": "x" * 99_999}, "prompt"),
        (PATH, {"prompt": [5] * 300}, "prompt"),
        (PATH, {"prompt": "hi", "max_tokens": 999}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 999},
            "max_tokens",
        ),
        ("/v1/responses", {"input": "🦊" * 300}, "input"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 999}, "max_output_tokens"),
    ],
)
async def test_context_length_errors_match_what_clients_look_for(start, path, fields, param):
    """LiteLLM matches the first words, LangChain the code or "prompt is too long"."""
    async with start() as front_end:
        response = await front_end.http.post(path, json=fields)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 256 tokens")
        assert error["param"] == param
        assert ("prompt is too long" in error["message"]) == (param in ("prompt", "input"))


async def test_an_unknown_model_error_lists_the_available_models(start):
    async with start() as front_end:
        for response in (
            await front_end.complete(model="other"),
            await front_end.chat(model="other"),
            await front_end.http.post("/v1/responses", json={"model": "other", "input": "hi"}),
            await front_end.http.get("/v1/models/other"),
        ):
            assert response.status_code == 404
            message = "the model other does not exist; available: toy"
            assert response.json()["error"]["message"] == message
