"""POST /v1/chat/completions over HTTP, against a scripted engine."""

import json

import pytest

from api_server.text.chat_template import ChatTemplate
from tests.api_server.conftest import prepared

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_non_streaming_response(start, scripted, tokenizer):
    async with start(scripted("Hi 😀")) as front_end:
        body = (await front_end.chat()).json()
        choice = body["choices"][0]
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert choice["message"] == {"role": "assistant", "content": "Hi 😀", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert choice["logprobs"] is None
        request = front_end.engine.requests.get_nowait()
        assert request.prompt_token_ids == tokenizer.encode(PROMPT).ids
        assert request.sampling_params.max_tokens == 256 - len(request.prompt_token_ids)
        assert body["usage"]["prompt_tokens"] == len(request.prompt_token_ids)


async def test_streaming_response(start, scripted):
    async with start(scripted("Hi 😀 there")) as front_end:
        options = {"include_usage": True}
        events = await front_end.events(PATH, messages=MESSAGES, stream_options=options)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"] == []
        choices = [event["choices"][0] for event in events[:-2]]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hi 😀 there"
        assert [choice["finish_reason"] for choice in choices].count("stop") == 1
        assert choices[-1]["finish_reason"] == "stop"
        assert all(event["object"] == "chat.completion.chunk" for event in events[:-1])
        assert (await front_end.chat()).json()["usage"] == events[-2]["usage"]


async def test_every_choice_begins_with_its_role(start, scripted):
    async with start(scripted("Hi there")) as front_end:
        events = await front_end.events(PATH, messages=MESSAGES, n=2)
        for index in range(2):
            deltas = [
                event["choices"][0]["delta"]
                for event in events[:-1]
                if event["choices"][0]["index"] == index
            ]
            assert deltas[0]["role"] == "assistant"
            assert "".join(delta.get("content", "") for delta in deltas) == "Hi there"
            assert not any("role" in delta for delta in deltas[1:])


async def test_text_parts_are_joined_by_newlines(start, scripted, tokenizer):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    async with start(scripted("Hi")) as front_end:
        await front_end.chat(messages=[{"role": "user", "content": parts}])
        prompt = front_end.engine.requests.get_nowait().prompt_token_ids
        assert prompt == tokenizer.encode(PROMPT.replace("hello", "hel\nlo")).ids


@pytest.mark.parametrize("fields", [{}, {"name": "f"}, {"tool_call_id": "1"}])
@pytest.mark.parametrize("role", ["ipython", "critic", "function"])
async def test_custom_roles_are_passed_to_the_template(start, scripted, tokenizer, role, fields):
    async with start(scripted("Hi")) as front_end:
        messages = [*MESSAGES, {"role": role, "content": "42", **fields}]
        response = await front_end.chat(messages=messages)
        assert response.status_code == 200, response.text
        prompt = front_end.engine.requests.get_nowait().prompt_token_ids
        user, answer = PROMPT.split("<|im_start|>assistant")
        text = f"{user}<|im_start|>{role}\n42<|im_end|>\n<|im_start|>assistant{answer}"
        assert prompt == tokenizer.encode(text).ids


async def test_max_completion_tokens_wins(start, scripted):
    async with start(scripted("Hi there you")) as front_end:
        choice = (await front_end.chat(max_tokens=9, max_completion_tokens=1)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert front_end.engine.requests.get_nowait().sampling_params.max_tokens == 1
        await front_end.chat(max_tokens=9)
        assert front_end.engine.requests.get_nowait().sampling_params.max_tokens == 9


async def test_length_errors_name_the_clients_field(start, scripted):
    async with start(scripted("Hi")) as front_end:
        for name in ("max_tokens", "max_completion_tokens"):
            for value in (0, 10**6):
                error = (await front_end.chat(**{name: value})).json()["error"]
                assert error["param"] == name
                assert f"{name} {value}" in error["message"] or f"{name} must" in error["message"]


@pytest.mark.parametrize(
    "messages", [MESSAGES * 4097, [{"role": "user", "content": "x" * 20_000}] * 10]
)
async def test_an_oversized_conversation_is_not_rendered(start, scripted, messages, monkeypatch):
    async with start(scripted("Hi")) as front_end:
        rendered = []
        monkeypatch.setattr(ChatTemplate, "render", lambda _, given: rendered.append(given))
        response = await front_end.chat(messages=messages)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert rendered == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "asistant"}, "messages[1].role must be one of system, developer, user, "),
        ({"role": "user", "audio": {"id": "1"}}, "messages[1].audio is not available here"),
        ({"role": "user", "reasoning": "Hm."}, "messages[1].reasoning is for messages of the"),
        ({"role": "user", "content": 7}, "messages[1].content must be a string or a list"),
    ],
)
async def test_errors_name_the_path(start, scripted, message, expected):
    async with start(scripted("Hi")) as front_end:
        messages = [*MESSAGES, {"content": "x", **message}]
        error = (await front_end.chat(messages=messages)).json()["error"]
        assert error["message"].startswith(expected)
        assert error["param"] == "messages"


@pytest.mark.parametrize("fields", [{"verbosity": "medium"}, {"kv_transfer_params": {}}])
async def test_defaults_of_other_servers_are_taken(start, scripted, fields):
    async with start(scripted("Hi")) as front_end:
        assert (await front_end.chat(**fields)).status_code == 200


async def test_null_content_has_its_own_error(start, scripted):
    async with start(scripted("Hi")) as front_end:
        response = await front_end.chat(messages=[{"role": "user", "content": None}])
        assert response.json()["error"]["message"] == "messages[0].content must not be null"


async def test_logprobs(start, scripted, tokenizer):
    async with start(scripted("Hi 😀")) as front_end:
        body = (await front_end.chat(logprobs=True, top_logprobs=2)).json()
        content = body["choices"][0]["logprobs"]["content"]
        ids = [*tokenizer.encode("Hi 😀").ids, 2]
        assert len(content) == len(ids)
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert content[0]["token"] == tokenizer.decode(ids[:1])
        raw = bytes(byte for entry in content for byte in entry["bytes"])
        assert raw == b"Hi \xf0\x9f\x98\x80<|im_end|>"
        plain = (await front_end.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in plain)
        events = await front_end.events(PATH, messages=MESSAGES, logprobs=True, top_logprobs=2)
        streamed = [
            entry
            for event in events[1:-1]
            for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == content


async def test_prompt_logprobs_and_token_ids(start, scripted):
    async with start(scripted("Hi")) as front_end:
        body = (await front_end.chat(prompt_logprobs=1, return_token_ids=True)).json()
        assert body["prompt_token_ids"] == front_end.engine.requests.get_nowait().prompt_token_ids
        assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"])
        assert body["choices"][0]["token_ids"][-1] == 2
        events = await front_end.events(PATH, messages=MESSAGES, return_token_ids=True)
        assert events[0]["prompt_token_ids"] == body["prompt_token_ids"]
        assert not any("prompt_token_ids" in event for event in events[1:-1])
        streamed = [
            token for event in events[1:-1] for token in event["choices"][0].get("token_ids", [])
        ]
        assert streamed == body["choices"][0]["token_ids"]


async def test_continuous_usage(start, scripted):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with start(scripted("Hi there you all")) as front_end:
        events = await front_end.events(PATH, messages=MESSAGES, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts[0] == 0
        assert counts[:-1] == sorted(set(counts[:-1]))


async def test_a_base_model_refuses_chats(start, scripted, tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    base = prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=False)
    async with start(scripted("Hi"), served=base) as front_end:
        response = await front_end.chat()
        assert response.status_code == 400
        assert "chat template" in response.json()["error"]["message"]
        assert (await front_end.complete()).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hello", "messages"),
        ([{}], "messages"),
        ([{"role": "user"}], "messages"),
        ([{"role": "user", "content": None}], "messages"),
        ([{"role": "user", "content": []}], "messages"),
        ([{"role": "user", "content": "a\ud800"}], "messages"),
        ([{"role": "", "content": "x"}], "messages"),
        ([{"role": "asistant", "content": "x"}], "messages"),
        ([{"role": 7, "content": "x"}], "messages"),
        ([{"role": "x\ud800", "content": "x"}], "messages"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages"),
        ([{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}], "messages"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}],
            "messages",
        ),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages"),
        ([{"role": "user", "content": "x", "reasoning": "y"}], "messages"),
    ],
)
async def test_bad_messages(start, scripted, messages, param):
    async with start(scripted("Hi")) as front_end:
        body = json.dumps({"messages": messages}).encode()
        response = await front_end.http.post(
            PATH, content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert front_end.engine.requests.empty()


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
async def test_media_are_refused_because_models_read_text_only(start, scripted, kind):
    async with start(scripted("Hi")) as front_end:
        content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {}}]
        messages = [{"role": "user", "content": content}]
        response = await front_end.http.post(PATH, json={"messages": messages})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == "messages"
        reason = f"takes text only: this model reads no part of the type {kind}"
        assert error["message"].startswith(f"messages[0].content[1]: {reason}")
        assert front_end.engine.requests.empty()


@pytest.mark.parametrize(
    "fields", [{"tool_calls": None}, {"tool_calls": []}, {"refusal": None}, {"name": "ann"}]
)
async def test_messages_with_neutral_fields(start, scripted, fields):
    async with start(scripted("Hi")) as front_end:
        message = {"role": "assistant", "content": "x", **fields}
        response = await front_end.chat(messages=[message, *MESSAGES])
        assert response.status_code == 200, response.text
