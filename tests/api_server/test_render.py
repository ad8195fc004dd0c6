"""/render routes: what an endpoint would have computed, in vLLM's form, and nothing computed."""

import pytest

from api_server.protocol.completions import DEFAULT_MAX_TOKENS
from proto.settings.config import FrontEndConfig

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions/render"
COMPLETION = "/v1/completions/render"
RESPONSE = "/v1/responses/render"


async def test_a_chat_has_the_prompt_that_its_endpoint_computes(start, scripted):
    fields = {"max_tokens": 3, "temperature": 0, "seed": 7, "stop": ["x"], "cache_salt": "a"}
    async with start(scripted("!")) as front_end:
        found = await front_end.http.post(CHAT, json={"messages": MESSAGES, **fields})
        rendered = found.json()
        assert front_end.engine.requests.empty(), "nothing is computed"
        assert not front_end.app_state.open_streams
        answer = (await front_end.chat(return_token_ids=True, **fields)).json()
        assert rendered["token_ids"] == answer["prompt_token_ids"]
        assert rendered["model"] == answer["model"]
        assert rendered["request_id"] == found.headers["x-request-id"]
        assert (rendered["stream"], rendered["features"], rendered["priority"]) == (False, None, 0)
        assert rendered["cache_salt"] == "a"
        params = rendered["sampling_params"]
        assert params.items() >= {"max_tokens": 3, "temperature": 0, "seed": 7, "n": 1}.items()
        assert (params["stop"], params["stop_token_ids"]) == (["x"], [])


async def test_limits_and_defaults_are_those_that_apply(start):
    async with start() as front_end:
        rendered = (await front_end.http.post(CHAT, json={"messages": MESSAGES})).json()
        room = 256 - len(rendered["token_ids"])
        assert rendered["sampling_params"]["max_tokens"] == room
        (rendered,) = (await front_end.http.post(COMPLETION, json={"prompt": "a"})).json()
        assert rendered["sampling_params"]["max_tokens"] == DEFAULT_MAX_TOKENS


async def test_a_completion_has_an_entry_for_each_prompt(start, tokenizer):
    async with start() as front_end:
        texts = ["the fox", "hello"]
        rendered = (await front_end.http.post(COMPLETION, json={"prompt": texts})).json()
        assert [each["token_ids"] for each in rendered] == [
            tokenizer.encode(text).ids for text in texts
        ]
        assert len({each["request_id"] for each in rendered}) == 2
        (rendered,) = (await front_end.http.post(COMPLETION, json={"prompt": [5, 6]})).json()
        assert rendered["token_ids"] == [5, 6]


async def test_a_response_continues_a_stored_one(start, scripted):
    async with start(scripted("!")) as front_end:
        first = (await front_end.http.post("/v1/responses", json={"input": "hello"})).json()
        body = {"input": "and?", "previous_response_id": first["id"]}
        rendered = (await front_end.http.post(RESPONSE, json=body)).json()
        counted = await front_end.http.post("/v1/responses/input_tokens", json=body)
        assert len(rendered["token_ids"]) == counted.json()["input_tokens"]
        alone = (await front_end.http.post(RESPONSE, json={"input": "and?"})).json()
        assert len(rendered["token_ids"]) > len(alone["token_ids"])
        stored = await front_end.http.get(f"/v1/responses/{rendered['request_id']}")
        assert stored.status_code == 404, "nothing is stored"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 10**6}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "separate_reasoning": False}, "separate_reasoning"),
        (COMPLETION, {}, "prompt"),
        (COMPLETION, {"prompt": "x" * 10**6}, "prompt"),
        (COMPLETION, {"prompt": "x", "temperature": -1}, "temperature"),
        (COMPLETION, {"prompt": ["x"] * 64, "stop": ["y" * 60_000]}, "prompt"),
        (RESPONSE, {"input": []}, "input"),
    ],
)
async def test_errors_are_those_of_the_endpoint(start, path, body, param):
    async with start(config=FrontEndConfig(max_response_bytes=1 << 20)) as front_end:
        refused = await front_end.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert front_end.engine.requests.empty()


async def test_what_vllm_router_adds_to_a_chat_asks_for_nothing(start, scripted):
    added = {
        **{"no_stop_trim": False, "return_hidden_states": False, "include_reasoning": True},
        **{"separate_reasoning": True, "stream_reasoning": True, "continue_final_message": False},
        **{"ignore_eos": False, "skip_special_tokens": True, "logprobs": False},
    }
    async with start(scripted("!")) as front_end:
        answer = await front_end.chat(**added)
        assert answer.status_code == 200
        assert "x-tokend-ignored" not in answer.headers
        body = {"messages": MESSAGES, **added, "mystery": 1}
        rendered = await front_end.http.post(CHAT, json=body)
        assert rendered.headers["x-tokend-ignored"] == "mystery"


async def test_a_daemon_that_drains_renders_nothing(start):
    async with start() as front_end:
        await front_end.http.post("/admin/drain")
        refused = await front_end.http.post(COMPLETION, json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
