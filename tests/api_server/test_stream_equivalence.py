"""A joined stream equals the non-streaming answer, for all fields and forms of prompts."""

import pytest

TEXT = " world 😀 and 你好, e\u0301 done"
FIELDS = {
    "nothing": {},
    "echo": {"echo": True},
    "echo and logprobs": {"echo": True, "logprobs": 2},
    "echo alone": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "stop": {"stop": [" and", "zz"]},
    "stop across tokens": {"stop": "好, e", "logprobs": 1, "return_token_ids": True},
    "stop and min_tokens": {"stop": "o", "min_tokens": 6, "logprobs": 0},
    "logprobs": {"logprobs": 3},
    "seed": {"seed": 7, "ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": [2], "ignore_eos": True, "return_token_ids": True},
    "return_token_ids": {"return_token_ids": True, "echo": True},
    "half a character at the end": {"max_tokens": 5, "logprobs": 0},
}


def merged(whole: dict, event: dict) -> None:
    """Add the content of an event to its choice."""
    for choice in event["choices"]:
        known = whole.setdefault(choice["index"], {"text": "", "logprobs": {}, "token_ids": []})
        assert known.get("finish_reason") is None, "an event after the finish reason"
        known["text"] += choice["text"]
        for key, values in (choice["logprobs"] or {}).items():
            known["logprobs"].setdefault(key, []).extend(values)
        known["token_ids"] += choice.get("token_ids") or []
        known["prompt_token_ids"] = known.get("prompt_token_ids") or choice.get("prompt_token_ids")
        for key in ("finish_reason", "stop_reason"):
            known[key] = choice[key]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", FIELDS)
async def test_completions(start, scripted, tokenizer, name, n):
    ids = tokenizer.encode("hello").ids
    async with start(scripted(TEXT)) as front_end:
        for prompt in ("hello", ["hello", "fox"], ids, [ids, [40, 41]]):
            fields = {"max_tokens": 60, **FIELDS[name], "prompt": prompt, "n": n}
            body = (await front_end.complete(**fields)).json()
            fields["stream_options"] = {"include_usage": True}
            *events, end = await front_end.events("/v1/completions", **fields)
            assert end == "[DONE]"
            choices: dict[int, dict] = {}
            for event in events:
                merged(choices, event)
            assert events[-1]["usage"] == body["usage"]
            assert sorted(choices) == [each["index"] for each in body["choices"]]
            for choice in body["choices"]:
                streamed = choices[choice["index"]]
                for key in ("text", "finish_reason", "stop_reason"):
                    assert streamed[key] == choice[key], (key, prompt)
                assert streamed["logprobs"] == (choice["logprobs"] or {})
                assert streamed["token_ids"] == choice.get("token_ids", [])
                assert streamed["prompt_token_ids"] == choice.get("prompt_token_ids")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", ["nothing", "stop", "seed", "stop_token_ids"])
async def test_chats(start, scripted, name, n):
    messages = [{"role": "user", "content": "hello"}]
    async with start(scripted(TEXT)) as front_end:
        fields = {**FIELDS[name], "max_tokens": 60, "n": n, "logprobs": True, "top_logprobs": 2}
        body = (await front_end.chat(**fields)).json()
        fields["stream_options"] = {"include_usage": True}
        *events, _ = await front_end.events("/v1/chat/completions", messages=messages, **fields)
        assert events[-1]["usage"] == body["usage"]
        for choice in body["choices"]:
            parts = [
                part
                for event in events
                for part in event["choices"]
                if part["index"] == choice["index"]
            ]
            text = "".join(part["delta"].get("content", "") for part in parts)
            shown = [part["logprobs"]["content"] for part in parts if part["logprobs"]]
            assert text == choice["message"]["content"]
            assert [token for tokens in shown for token in tokens] == choice["logprobs"]["content"]
            assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
            assert parts[0]["delta"]["role"] == "assistant"
