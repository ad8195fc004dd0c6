"""POST /v1/responses/compact: the window that replaces a conversation, and its continuation."""

import pytest
from openai.types.responses import ResponseCompactionItem, ResponseUsage

from tests.api_server.responses_client import ask, client, prompt_of

PATH = "/v1/responses/compact"
SUMMARY = "They launch on Tuesday."
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "21"}
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    CALL,
    RESULT,
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
]


async def compact(front_end, **fields):
    return await front_end.http.post(PATH, json={"model": "toy", **fields})


async def window(front_end, **fields) -> list[dict]:
    response = await compact(front_end, **fields)
    assert response.status_code == 200, response.text
    found = response.json()
    assert (found["object"], found["id"][:5]) == ("response.compaction", "resp_")
    assert ResponseUsage.model_validate(found["usage"]).output_tokens > 0
    return found["output"]


async def test_the_window_has_the_users_messages_and_a_summary(start, scripted, tokenizer):
    async with start(scripted(SUMMARY), max_model_len=2000) as front_end:
        output = await window(front_end, input=CONVERSATION, instructions="You help.")
        prompt = prompt_of(front_end, tokenizer)
        assert [part in prompt for part in ("You help.", "one", "21", "two", "three")] == [True] * 5
        assert prompt.index("three") < prompt.index("Summarise")
        kinds = [(item["type"], item.get("role")) for item in output]
        assert kinds == [
            ("message", "system"),
            ("message", "user"),
            ("message", "user"),
            ("compaction", None),
        ]
        assert all(item["id"] for item in output)
        ResponseCompactionItem.model_validate(output[-1])
        assert output[2]["content"] == [{"type": "input_text", "text": "three"}]

        following = [*output, {"role": "user", "content": "And now?"}]
        assert (await ask(front_end, input=following)).status_code == 200
        prompt = prompt_of(front_end, tokenizer)
        assert prompt.index("three") < prompt.index(SUMMARY) < prompt.index("And now?")
        assert "two" not in prompt


async def test_the_openai_client_sends_the_window_back(start, scripted, tokenizer):
    async with start(scripted(SUMMARY), max_model_len=2000) as front_end:
        responses = client(front_end).responses
        compacted = await responses.compact(model="toy", input="one")
        prompt_of(front_end, tokenizer)
        items = [item.to_dict(warnings=False) for item in compacted.output]
        await responses.create(model="toy", input=[*items, {"role": "user", "content": "And?"}])
        assert SUMMARY in prompt_of(front_end, tokenizer)


async def test_a_window_can_be_compacted_again(start, scripted, tokenizer):
    async with start(scripted(SUMMARY), max_model_len=2000) as front_end:
        first = await window(front_end, input=CONVERSATION)
        prompt_of(front_end, tokenizer)
        second = await window(front_end, input=[*first, {"role": "user", "content": "four"}])
        assert SUMMARY in prompt_of(front_end, tokenizer)
        assert [item["type"] for item in second].count("compaction") == 1


async def test_a_call_without_result_is_kept(start, scripted):
    async with start(scripted(SUMMARY), max_model_len=2000) as front_end:
        pending = CALL | {"call_id": "d"}
        output = await window(front_end, input=[*CONVERSATION, pending])
        assert [item["type"] for item in output[-2:]] == ["compaction", "function_call"]
        result = RESULT | {"call_id": "d"}
        assert (await ask(front_end, input=[*output, result])).status_code == 200


async def test_long_old_user_messages_are_dropped(start, scripted):
    long = [{"role": "user", "content": f"{number} " + "x" * 290} for number in range(9)]
    async with start(scripted(SUMMARY), max_model_len=1000) as front_end:
        output = await window(front_end, input=[CONVERSATION[0], *long])
        texts = [item["content"][0]["text"][:8] for item in output[:-1]]
        assert texts == ["be brief", "6 xxxxxx", "7 xxxxxx", "8 xxxxxx"]


async def test_a_stored_conversation_can_be_compacted(start, scripted, tokenizer):
    async with start(scripted("two"), max_model_len=2000) as front_end:
        first = (await ask(front_end, input="one")).json()
        prompt_of(front_end, tokenizer)
        output = await window(front_end, previous_response_id=first["id"])
        assert [item["type"] for item in output] == ["message", "compaction"]
        assert "two" in prompt_of(front_end, tokenizer)


async def test_a_conversation_that_fills_the_context_can_be_compacted(start, scripted):
    async with start(scripted(SUMMARY), max_model_len=400) as front_end:
        await window(front_end, input="word " * 500)
        request = front_end.engine.requests.get_nowait()
        assert request.sampling_params.max_tokens == 100
        assert len(request.prompt_token_ids) == 300


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None, "input": "a"}, "model"),
        ({"model": "toy"}, "input"),
        ({"model": "toy", "input": [CALL]}, "input"),
        ({"model": "toy", "input": "a", "previous_response_id": "resp_x"}, "previous_response_id"),
        ({"model": "toy", "input": [{"type": "compaction"}]}, "input"),
        ({"model": "toy", "input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "input"),
    ],
)
async def test_invalid_requests_are_refused(start, fields, param):
    async with start() as front_end:
        response = await front_end.http.post(PATH, json=fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


async def test_unsupported_response_fields_are_named(start, scripted):
    async with start(scripted(SUMMARY), max_model_len=2000) as front_end:
        response = await compact(front_end, input="a", tools=[], prompt_cache_key="k")
        assert response.headers["x-tokend-ignored"] == "tools"


async def test_a_failed_summary_replaces_nothing(start, scripted):
    async with start(scripted(""), max_model_len=2000) as front_end:
        response = await compact(front_end, input="a")
        assert response.status_code == 500
        assert "no summary" in response.json()["error"]["message"]
