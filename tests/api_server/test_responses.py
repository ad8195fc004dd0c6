"""/v1/responses: responses and events checked with OpenAI's types; storage and its ownership."""

import asyncio
import json

import openai
import pytest
from openai.types.responses.response_create_params import (
    ResponseCreateParamsBase,
    ResponseCreateParamsStreaming,
)

from api_server.protocol.fields import HARMLESS
from api_server.protocol.responses.request import ResponsesRequest
from proto.errors import ErrorInfo
from proto.messages.engine_io import FinishReason
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import concurrently
from tests.api_server.responses_client import (
    PATH,
    answer,
    ask,
    client,
    decoded,
    error,
    events,
    prompt_of,
)

TAKEN = ResponsesRequest.model_fields.keys() | HARMLESS
TEXT = "Hi 😀 there"
REPEATED = {
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tool_calls": None},
    **{"safety_identifier": None, "prompt_cache_key": None, "user": None},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
}
"""Fields of every response that the Open Responses schema requires."""


async def test_non_streaming_response(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        found = await answer(front_end, model="toy", metadata={"a": "b"}, temperature=0.5)
        assert found["status"] == "completed"
        assert found["id"].startswith("resp_")
        (message,) = found["output"]
        assert message["content"][0]["text"] == TEXT
        assert message["status"] == "completed"
        assert found["metadata"] == {"a": "b"}
        assert found["temperature"] == 0.5
        assert found["store"] is True
        assert {name: found[name] for name in REPEATED} == REPEATED
        given = {
            **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "max_tool_calls": 3},
            **{"safety_identifier": "s", "prompt_cache_key": "p", "user": "u"},
        }
        response = await ask(front_end, **given)
        assert {name: response.json()[name] for name in given} == given
        assert "x-tokend-ignored" not in response.headers
        usage = found["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == 0


async def test_the_order_of_events(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        found = await events(front_end)
        names = [each["type"].removeprefix("response.") for each in found]
        deltas = [each["delta"] for each in found if each["type"].endswith("text.delta")]
        assert "".join(deltas) == TEXT
        assert names == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            *["output_text.delta"] * len(deltas),
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        last = found[-1]["response"]
        assert last["output"] == [found[-2]["item"]]
        assert last["output"][0]["content"] == [found[-3]["part"]]
        assert {each["item_id"] for each in found if "item_id" in each} == {last["output"][0]["id"]}
        whole = await answer(front_end)
        assert whole["usage"] == last["usage"]
        assert whole["output"][0]["content"] == last["output"][0]["content"]


async def test_cached_tokens(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        front_end.engine.num_cached_tokens = 3
        found = await answer(front_end)
        assert found["usage"]["input_tokens_details"]["cached_tokens"] == 3


async def test_input_is_rendered_for_the_model(start, scripted, tokenizer):
    async with start(scripted("!")) as front_end:
        items = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "two", "annotations": []}],
            },
            {"type": "message", "role": "developer", "content": "Now in French."},
            {"type": "message", "role": "user", "content": "three"},
        ]
        await answer(front_end, input=items, instructions="You help.")
        assert prompt_of(front_end, tokenizer) == (
            "<|im_start|>system\nYou help.\n\nBe brief.<|im_end|>\n"
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
            "<|im_start|>system\nNow in French.<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


async def test_images_in_tool_results_are_replaced_by_text(start, scripted, tokenizer):
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [
                {"type": "input_text", "text": "here"},
                {"type": "input_image", "image_url": "data:image/png;base64,eA=="},
            ],
        },
    ]
    async with start(scripted("!")) as front_end:
        response = await ask(front_end, input=items)
        assert response.status_code == 200, response.text
        assert response.headers["x-tokend-ignored"] == "input.output.input_image"
        assert "here\n[image: not shown" in prompt_of(front_end, tokenizer)


async def test_parameters_reach_the_engine(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        await answer(
            front_end,
            max_output_tokens=9,
            temperature=0.25,
            top_p=0.5,
            top_k=7,
            seed=5,
            cache_salt="x",
            text={"format": {"type": "json_object"}},
        )
        request = front_end.engine.requests.get_nowait()
        params = request.sampling_params
        assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.25, 0.5)
        assert (params.top_k, request.seed) == (7, 5)
        assert request.cache_salt
        assert request.grammar.kind == "json_schema"
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        found = await answer(front_end, text={"format": form, "verbosity": "medium"})
        assert found["text"]["format"] == {"description": None} | form
        assert json.loads(front_end.engine.requests.get_nowait().grammar.source) == schema


@pytest.mark.parametrize("stream", [False, True])
async def test_a_truncated_answer_is_incomplete(start, scripted, stream):
    async with start(scripted(TEXT)) as front_end:
        if stream:
            found = await events(front_end, max_output_tokens=2)
            assert found[-1]["type"] == "response.incomplete"
            found = found[-1]["response"]
        else:
            found = await answer(front_end, max_output_tokens=2)
        assert found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
        assert found["output"][0]["status"] == "incomplete"
        assert found["usage"]["output_tokens"] == 2


async def test_an_answer_without_text_has_a_message(start, scripted):
    async with start(scripted("")) as front_end:
        found = await events(front_end)
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""
        assert len((await answer(front_end))["output"]) == 1


async def test_log_probabilities(start, scripted):
    async with start(scripted("the fox")) as front_end:
        include = ["message.output_text.logprobs"]
        found = await events(front_end, include=include, top_logprobs=2)
        deltas = [each for each in found if each["type"] == "response.output_text.delta"]
        entries = [entry for each in deltas for entry in each["logprobs"]]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert "".join(entry["token"] for entry in entries).startswith("the fox")
        part = found[-1]["response"]["output"][0]["content"][0]
        assert part["logprobs"][: len(entries)] == entries
        assert part["logprobs"][-1]["token"] == "<|im_end|>"
        whole = await answer(front_end, include=include, top_logprobs=2)
        assert whole["output"][0]["content"][0]["logprobs"] == part["logprobs"]
        assert (await error(front_end, top_logprobs=2))["param"] == "top_logprobs"


async def test_a_stream_that_fails(start):
    async with start(accepts=True) as front_end:
        body = {"input": "hello", "stream": True}
        async with front_end.http.stream("POST", PATH, json=body) as response:
            request = await front_end.engine.requests.get()
            front_end.engine.emit(request, [5])
            front_end.engine.refuse(request, ErrorInfo("internal", "it broke"))
            found = decoded((await response.aread()).decode())
        assert [each["type"] for each in found[-3:]] == [
            "response.output_item.done",
            "error",
            "response.failed",
        ]
        assert found[-2]["message"] == found[-1]["response"]["error"]["message"] == "it broke"
        assert found[-1]["response"]["status"] == "failed"
        assert found[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_errors_of_the_engine_name_fields_of_this_api(start):
    for fields in ({"stream": True}, {}, {"background": True, "store": True}):
        async with start() as front_end:
            asking = asyncio.create_task(ask(front_end, **fields))
            request = await front_end.engine.requests.get()
            front_end.engine.refuse(
                request, ErrorInfo("invalid_request", "response_format: no", "response_format")
            )
            found = (await asking).json()["error"]
            assert (found["message"], found["code"]) == ("text.format: no", 400)
            assert found["param"] == "text.format"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": 5}, "input", "string"),
        ({"input": [5]}, "input", "object"),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, "input", "4096"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role"),
        ({"input": [{"type": {"a": 1}}]}, "input", "input[0]"),
        ({"input": [{"type": "\ud800"}]}, "input", "\\ud800"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "input[0].content"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, "input", "surrogate"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "content[0]: takes text only: this model reads no part of the type input_image",
        ),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input", "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input", "output"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "21"}]},
            "input",
            "input[0].call_id",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens 5000"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"top_p": 2}, "top_p", "top_p"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages", "not available"),
        ({"n": 2}, "n", "not available"),
        ({"max_tokens": 5}, "max_tokens", "not available"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not available"),
        ({"conversation": "c"}, "conversation", "not available"),
        ({"prompt": {"id": "p"}}, "prompt", "not available"),
        ({"service_tier": "flex"}, "service_tier", "not available"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, None, "obfuscation"),
        ({"stream_options": {}}, "stream_options", "needs stream"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, None, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
            "text.format",
            "text.format.name must match",
        ),
        ({"background": True, "store": False}, "background", "store"),
        ({"background": True, "store": True, "stream": True}, "background", "stream"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "no such"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "longer"),
        ({"metadata": {"a" * 65: "x"}}, "metadata", "longer"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "at most 16"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": "some"}, "tool_choice", "auto"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "no tool x"),
        ({"tools": [{"name": "x"}]}, "tools", "type"),
        ({"tools": [{"type": "function"}]}, "tools", "name"),
        ({"truncation": "some"}, "truncation", "auto"),
    ],
)
async def test_invalid_requests_are_refused(start, fields, param, words):
    async with start() as front_end:
        found = await error(front_end, **fields)
        assert words in found["message"]
        assert param is None or found["param"] == param


async def test_every_openai_field_is_accepted_or_refused_by_name(start, scripted):
    """With any value: no server error, and no error that names another field."""
    async with start(scripted("!")) as front_end:

        async def check(name: str) -> None:
            for value in (5, "x", True, ["x"], [{}], {"type": "x"}):
                response = await ask(front_end, **{name: value})
                if response.status_code != 200:
                    assert response.status_code in (400, 404), (name, value, response.text)
                    assert response.json()["error"]["param"].partition(".")[0] == name
                else:
                    assert name in TAKEN or name in response.headers.get("x-tokend-ignored", "")

        await concurrently(
            check,
            ResponseCreateParamsStreaming.__annotations__
            | ResponseCreateParamsBase.__annotations__,
        )


async def test_ignored_fields_are_named(start, scripted):
    async with start(scripted("!")) as front_end:
        response = await ask(
            front_end,
            input=[
                {"role": "user", "content": "hi", "mood": 1},
                {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                {"role": "user", "content": "there"},
            ],
            tools=[{"type": "web_search"}, {"type": "local_shell"}],
            include=["reasoning.encrypted_content"],
            text={"verbosity": "low"},
            prompt_cache_key="thread",
            prompt_cache_retention="24h",
            client_metadata={"x": "y"},
            service_tier="auto",
            user="ann",
        )
        assert response.status_code == 200, response.text
        assert set(response.headers["x-tokend-ignored"].split(", ")) == {
            "client_metadata",
            "include.reasoning.encrypted_content",
            "input.mood",
            "input.reasoning",
            "input.web_search_call",
            "prompt_cache_retention",
            "text.verbosity",
            "tools.local_shell",
            "tools.web_search",
        }


async def test_truncation_auto_drops_the_beginning_of_a_long_conversation(start, scripted):
    async with start(scripted("!")) as front_end:
        long = "the quick brown fox " * 200
        assert (await error(front_end, input=long))["param"] == "input"
        found = await answer(front_end, input=long, truncation="auto", max_output_tokens=6)
        assert found["usage"]["input_tokens"] == 250
        found = await answer(front_end, input=long, truncation="auto")
        assert found["usage"]["input_tokens"] == 256 - 64, "there is room for an answer"


async def test_stored_responses_can_be_continued(start, scripted, tokenizer):
    async with start(scripted(TEXT)) as front_end, client(front_end) as api:
        first = await api.responses.create(
            model="toy", input="one", instructions="Only now.", store=True
        )
        assert (await api.responses.retrieve(first.id)).output_text == TEXT
        prompt_of(front_end, tokenizer)
        stream = await api.responses.create(
            model="toy", input="two", previous_response_id=first.id, store=True, stream=True
        )
        second = [event async for event in stream][-1].response
        assert prompt_of(front_end, tokenizer) == (
            f"<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>\n"
            "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
        )
        third = await api.responses.create(
            model="toy", input="three", previous_response_id=second.id, store=False
        )
        assert prompt_of(front_end, tokenizer).count("<|im_start|>user") == 3
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(third.id)
        await api.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.delete(first.id)
        assert (await api.responses.retrieve(second.id)).previous_response_id == first.id


async def test_input_tokens_are_counted(start, scripted):
    """The count equals that of the same request, including the previous conversation."""
    async with start(scripted(TEXT)) as front_end, client(front_end) as api:
        body = {"input": [{"role": "user", "content": "one"}]}
        first = await answer(front_end, **body)
        found = await front_end.http.post(f"{PATH}/input_tokens", json=body)
        number = first["usage"]["input_tokens"]
        assert found.json() == {"object": "response.input_tokens", "input_tokens": number}
        following = {"input": "two", "previous_response_id": first["id"], "instructions": "Brief."}
        counted = await api.responses.input_tokens.count(model="toy", **following)
        second = await answer(front_end, **following)
        assert counted.input_tokens == second["usage"]["input_tokens"] > number
        long = await api.responses.input_tokens.count(model="toy", input="fox " * 1000)
        assert long.input_tokens > 256, "also beyond the context"
        with pytest.raises(openai.NotFoundError):
            await api.responses.input_tokens.count(model="other", input="one")
        refused = await front_end.http.post(f"{PATH}/input_tokens", json={"input": 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("path", ["", "/input_tokens", "/compact"])
async def test_errors_count_only_the_items_of_the_request(start, scripted, path):
    """Items of previous responses, and items replaced by a summary, do not count."""
    async with start(scripted(TEXT)) as front_end:
        first = await answer(front_end, input=[{"role": "user", "content": "one"}] * 3)
        pending = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        body = {
            "model": "toy",
            "input": [pending, {"role": "user", "content": "two"}, {"role": "tool"}],
            "previous_response_id": first["id"],
        }
        refused = await front_end.http.post(f"{PATH}{path}", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("input[2].role must be")


@pytest.mark.parametrize("instructions", [None, "Brief."])
async def test_errors_name_the_item_of_a_merged_message(start, scripted, instructions):
    """Initial system messages are merged, and so are the items of an assistant turn."""
    items = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "half \ud83d"},
    ]
    async with start(scripted(TEXT)) as front_end:
        body = json.dumps({"model": "toy", "input": items, "instructions": instructions})
        headers = {"content-type": "application/json"}
        refused = await front_end.http.post(PATH, content=body, headers=headers)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["message"].startswith("input[5].content holds half of a surrogate pair")
        assert error["param"] == "input"


async def test_input_items_are_listed(start, scripted):
    async with start(scripted(TEXT)) as front_end, client(front_end) as api:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": "21"}
        given = [{"role": "user", "content": "one", "id": "msg_mine"}, call, result]
        first = await api.responses.create(model="toy", input=given, truncation="auto")
        second = await api.responses.create(model="toy", input="two", previous_response_id=first.id)

        async def page(response_id=second.id, **query):
            url = f"{PATH}/{response_id}/input_items"
            return await front_end.http.get(url, params=query)

        everything = (await page(order="asc")).json()
        items = everything["data"]
        kinds = ["message", "function_call", "function_call_output", "message", "message"]
        assert [item["type"] for item in items] == kinds
        assert items[0]["content"] == [{"type": "input_text", "text": "one"}]
        assert items[3]["id"] == first.output[0].id
        ids = [item["id"] for item in items]
        assert ids[0] == "msg_mine"
        assert len(set(ids)) == 5
        assert all(isinstance(name, str) for name in ids)
        ends = (everything["first_id"], everything["last_id"], everything["has_more"])
        assert ends == (ids[0], ids[-1], False)
        paged = [item.id async for item in api.responses.input_items.list(second.id, limit=2)]
        assert paged == ids[::-1], "the newest first, over several pages"
        tail = (await page(order="asc", after=ids[2], limit=1)).json()
        assert ([item["id"] for item in tail["data"]], tail["has_more"]) == ([ids[3]], True)
        empty = (await page(after=ids[0])).json()
        assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)
        for name, value in (("limit", "0"), ("limit", "101"), ("limit", "x"), ("order", "up")):
            assert (await page(**{name: value})).json()["error"]["param"] == name
        assert (await page(after="nothing")).json()["error"]["param"] == "after"
        assert (await page("resp_none")).status_code == 404


async def test_store_false_stores_nothing(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        found = await answer(front_end, store=False)
        await events(front_end, store=False)
        assert len(front_end.app_state.responses) == 0
        for method, path in (
            *(("GET", ""), ("DELETE", ""), ("POST", "/cancel")),
            ("GET", "/input_items"),
        ):
            response = await front_end.http.request(method, f"{PATH}/{found['id']}{path}")
            assert response.status_code == 404


async def test_storage_can_be_disabled(start, scripted):
    async with start(
        scripted(TEXT), config=FrontEndConfig(max_stored_responses_mib=0)
    ) as front_end:
        assert (await error(front_end, store=True))["param"] == "store"


async def test_an_oversized_conversation_is_not_stored(start, scripted):
    config = FrontEndConfig(max_stored_responses_mib=1)
    async with start(scripted(TEXT), config=config) as front_end:
        fields = {"input": "x" * 200_000, "truncation": "auto"}
        for must_store in ({"store": True}, {"background": True}):
            assert (await error(front_end, **fields, **must_store))["param"] == "store"
        found = await answer(
            front_end, input=[{"role": "user", "content": "x", "id": "y" * 200_000}]
        )
        assert found["store"] is False
        assert len(front_end.app_state.responses) == 0


async def test_a_response_is_complete_once_its_last_event_is_created(start, scripted):
    """Its stream may still be open."""
    async with start(scripted(TEXT)) as front_end:
        responses = front_end.app_state.responses
        remove, finished = responses.remove_running, asyncio.Event()
        responses.remove_running = lambda *given: finished.set()
        found = await events(front_end)
        await asyncio.wait_for(finished.wait(), 10)
        url = f"{PATH}/{found[-1]['response']['id']}"
        assert (await front_end.http.get(url)).json() == found[-1]["response"]
        assert (await front_end.http.post(f"{url}/cancel")).json()["status"] == "completed"
        assert (await front_end.http.delete(url)).json()["deleted"]
        assert (await front_end.http.get(url)).status_code == 404
        responses.remove_running = remove


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice a1\nbob b1\n")
    return str(path)


async def test_responses_of_other_keys_are_hidden(start, scripted, keys):
    async with start(scripted(TEXT), config=FrontEndConfig(api_key_file=keys)) as front_end:
        alice, bob = client(front_end, "a1"), client(front_end, "b1")
        made = await alice.responses.create(model="toy", input="one", store=True)
        for use in (
            *(bob.responses.retrieve, bob.responses.cancel, bob.responses.delete),
            bob.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                await use(made.id)
        with pytest.raises(openai.BadRequestError):
            await bob.responses.create(model="toy", input="x", previous_response_id=made.id)
        assert (await alice.responses.retrieve(made.id)).output_text == TEXT
        nobody = client(front_end, "x")
        for use in (nobody.responses.retrieve, nobody.responses.cancel, nobody.responses.delete):
            with pytest.raises(openai.AuthenticationError):
                await use(made.id)


async def test_responses_of_other_tenants_behind_a_proxy_are_hidden(start, scripted):
    async with start(scripted(TEXT), config=FrontEndConfig(tenant_by="header")) as front_end:
        ann, ben = {"x-tenant-id": "ann"}, {"x-tenant-id": "ben"}
        body = {"input": "hi", "store": True}
        made = (await front_end.http.post(PATH, json=body, headers=ann)).json()
        url = f"{PATH}/{made['id']}"
        assert (await front_end.http.get(url, headers=ben)).status_code == 404
        assert (await front_end.http.get(url)).status_code == 404
        assert (await front_end.http.get(url, headers=ann)).status_code == 200


async def test_background_responses(start):
    async with start(accepts=True) as front_end, client(front_end) as api:
        made = await api.responses.create(model="toy", input="x", background=True, store=True)
        assert made.status == "in_progress"
        assert front_end.app_state.in_flight.number == 1
        request = await front_end.engine.requests.get()
        assert (await api.responses.retrieve(made.id)).output == []
        front_end.engine.emit(request, [5], finish=FinishReason.LENGTH)
        (task,) = front_end.app_state.background
        await task
        found = await api.responses.retrieve(made.id)
        assert found.status == "incomplete"
        assert found.usage.output_tokens == 1
        assert front_end.app_state.in_flight.number == 0
        assert (await api.responses.cancel(made.id)).status == "incomplete"


async def test_a_failed_background_response_has_the_error(start):
    async with start(accepts=True) as front_end, client(front_end) as api:
        made = await api.responses.create(model="toy", input="x", background=True, store=True)
        request = await front_end.engine.requests.get()
        (task,) = front_end.app_state.background
        front_end.engine.refuse(request, ErrorInfo("internal", "it broke"))
        await task
        found = await api.responses.retrieve(made.id)
        assert (found.status, found.error.message) == ("failed", "it broke")


async def test_cancelling_a_background_response(start):
    async with start(accepts=True) as front_end, client(front_end) as api:
        made = await api.responses.create(model="toy", input="x", background=True, store=True)
        request = await front_end.engine.requests.get()
        (task,) = front_end.app_state.background
        assert (await api.responses.cancel(made.id)).status == "cancelled"
        assert (await front_end.engine.aborts.get()).request_id == request.request_id
        await task
        assert (await api.responses.retrieve(made.id)).status == "cancelled"
        assert (await api.responses.cancel(made.id)).status == "cancelled"


@pytest.mark.parametrize("store", [False, True])
async def test_cancelling_a_stream(start, tokenizer, store):
    async with start(accepts=True) as front_end, client(front_end) as api:
        stream = await api.responses.create(model="toy", input="x", stream=True, store=store)
        created = await anext(stream)
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [5])
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        assert (await api.responses.cancel(created.response.id)).status == "cancelled"
        assert (await front_end.engine.aborts.get()).request_id == request.request_id
        last = [event async for event in stream][-1]
        assert last.type == "response.incomplete"
        assert last.response.status == "cancelled"
        assert last.response.output_text == tokenizer.decode([5])
        assert bool(len(front_end.app_state.responses)) == store


async def test_cancelling_before_it_is_accepted(start):
    async with start() as front_end:
        asking = asyncio.create_task(ask(front_end, request_id="mine"))
        await front_end.engine.requests.get()
        response = await front_end.http.post(f"{PATH}/resp_mine/cancel")
        assert response.json()["status"] == "cancelled"
        assert (await asking).status_code == 410


async def test_a_disconnect_aborts_the_response_and_stores_nothing(start):
    async with start(accepts=True) as front_end, client(front_end) as api:
        stream = await api.responses.create(model="toy", input="x", stream=True, store=True)
        await anext(stream)
        request = await front_end.engine.requests.get()
        await stream.close()
        assert (await front_end.engine.aborts.get()).request_id == request.request_id
        assert len(front_end.app_state.responses) == 0


async def test_a_stored_response_is_not_streamed_again(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        made = await answer(front_end, store=True)
        response = await front_end.http.get(f"{PATH}/{made['id']}?stream=true")
        assert response.status_code == 400


async def test_the_clients_stream_helper(start, scripted):
    async with start(scripted(TEXT)) as front_end, client(front_end) as api:
        async with api.responses.stream(model="toy", input="hello") as stream:
            final = await stream.get_final_response()
        assert final.output_text == TEXT
        raw = await api.responses.with_raw_response.create(
            model="toy", input="hello", extra_headers={"X-Request-Id": "mine"}
        )
        assert raw.headers["x-request-id"] == "mine"
        assert raw.parse().id == "resp_mine"
