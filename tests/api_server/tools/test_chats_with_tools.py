"""Tools over HTTP: prompts, engine requests, and tool calls in answers."""

import asyncio
import itertools
import json
import logging

import openai
import pytest
from tokenizers import AddedToken

from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from proto.messages.engine_io import FinishReason
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import byte_level_tokenizer, prepared, samples

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
CALLS = [("weather", '{"city": "Zürich 😀"}'), ("now", "{}")]
TEXT = "Let me see.\n" + TOOL_CALL_FORMATS["hermes"].render_calls(CALLS)
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[TOOL_CALLS] "
    "{{ call.function.name }} {{ call.function.arguments.city }} {{ call.id }}{% endfor %}"
    "{% if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %};{% endfor %}"
)
MARK = 393
"""The id of [TOOL_CALLS] in the vocabulary of `marked`."""


@pytest.fixture
def marked(tmp_path):
    """A model whose template supports tools and whose calls begin with a special token."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    assert tokenizer.token_to_id("[TOOL_CALLS]") == MARK
    return prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)


def message_of(response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def prompt_of(front_end, request) -> str:
    return front_end.app_state.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


def accumulated(events, index=0) -> tuple[str, list[dict], str]:
    """Return (content, calls, finish_reason) of a stream, joined like clients do."""
    content, calls, finish = "", [], ""
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "name": call["function"]["name"], "text": ""})
                calls[call["index"]]["text"] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return content, calls, finish


def named(calls) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("interval", [1, 5])
async def test_streaming_and_non_streaming_calls(start, scripted, interval):
    async with start(scripted(TEXT), max_model_len=2048) as front_end:
        body = (await front_end.chat(tools=TOOLS)).json()
        choice = body["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        assert named(choice["message"]["tool_calls"]) == CALLS
        assert {call["type"] for call in choice["message"]["tool_calls"]} == {"function"}
        ids = [call["id"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == 2
        events = await front_end.events(
            PATH,
            messages=HELLO,
            tools=TOOLS,
            stream_interval=interval,
            stream_options={"include_usage": True},
        )
        content, calls, finish = accumulated(events)
        assert content == "Let me see."
        assert [(call["name"], call["text"]) for call in calls] == CALLS
        assert finish == "tool_calls"
        assert events[-2]["usage"] == body["usage"]
        found = await samples(front_end)
        assert found["vllm:tool_call_parser_invocations_total,tool_call"] == 2
        assert found["vllm:tool_call_parser_invocations_total,no_tool_call"] == 0


async def test_an_answer_without_calls(start, scripted):
    async with start(scripted("It is <b>cold</b>."), max_model_len=2048) as front_end:
        body = (await front_end.chat(tools=TOOLS)).json()
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["message"] == {
            "role": "assistant",
            "content": "It is <b>cold</b>.",
            "refusal": None,
        }
        events = await front_end.events(PATH, messages=HELLO, tools=TOOLS)
        assert accumulated(events) == ("It is <b>cold</b>.", [], "stop")
        assert (await samples(front_end))[
            "vllm:tool_call_parser_invocations_total,no_tool_call"
        ] == 2


@pytest.mark.parametrize("ending", ["see.\n<tool_", 'see.\n<tool_call>\n{"na', "</tool", "no"])
async def test_a_truncated_call_is_dropped(start, tokenizer, ending):
    """No API returns anything of an incomplete call; the finish reason is length."""
    half = TEXT[: TEXT.index(ending) + len(ending)]
    ids = tokenizer.encode(half).ids
    calls = CALLS[: TEXT[: TEXT.index(ending)].count("weather")]
    limit = len(ids)
    async with start(lambda request, choice: ids, max_model_len=2048) as front_end:
        response = await front_end.chat(tools=TOOLS, max_tokens=limit)
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert named(choice["message"].get("tool_calls", [])) == calls
        assert choice["message"]["content"] == "Let me see."
        events = await front_end.events(PATH, messages=HELLO, tools=TOOLS, max_tokens=limit)
        content, found, finish = accumulated(events)
        assert (content, finish) == ("Let me see.", "length")
        assert [(call["name"], call["text"]) for call in found] == calls

        fields = {"tools": [tool["function"] | {"type": "function"} for tool in TOOLS]}
        fields |= {"input": "hello", "max_output_tokens": limit, "top_logprobs": 1}
        fields["include"] = ["message.output_text.logprobs"]
        body = (await front_end.http.post("/v1/responses", json=fields)).json()
        assert body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        text = body["output"][0]["content"][0]
        assert text["text"] == "Let me see."
        assert "".join(each["token"] for each in text["logprobs"]).strip() == "Let me see."
        assert [item["status"] for item in body["output"][1:]] == ["completed"] * len(calls)
        fields["stream"] = True
        sent = (await front_end.http.post("/v1/responses", json=fields)).text
        assert "response.incomplete" in sent
        assert "<tool" not in sent
        assert "</tool" not in sent

        schema = {"type": "object"}
        tools = [{"name": tool["function"]["name"], "input_schema": schema} for tool in TOOLS]
        fields = {"model": "toy", "messages": HELLO, "tools": tools, "max_tokens": limit}
        body = (await front_end.http.post("/v1/messages", json=fields)).json()
        assert body["stop_reason"] == "max_tokens"
        blocks = [block["text"] for block in body["content"] if block["type"] == "text"]
        assert blocks == ["Let me see."]
        assert len(body["content"]) == 1 + len(calls)


async def test_a_stop_string_keeps_the_text_before_it(start, scripted):
    """The start of a call before a stop string is content: the client chose where to stop."""
    async with start(scripted(TEXT), max_model_len=2048) as front_end:
        response = await front_end.chat(tools=TOOLS, stop=["Z\u00fcrich"])
        assert message_of(response)["content"].endswith(
            '{"name": "weather", "arguments": {"city": "'
        )


async def test_a_stream_with_tools_does_not_begin_with_an_empty_text(start, scripted):
    async with start(scripted(TEXT.removeprefix("Let me see.\n")), max_model_len=2048) as front_end:
        for fields, expected in (({"tools": TOOLS}, []), ({}, [""])):
            events = await front_end.events(PATH, messages=HELLO, **fields)
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            assert deltas[0]["role"] == "assistant"
            texts = [delta["content"] for delta in deltas if delta.get("content") is not None]
            assert texts[:1] == expected


async def test_logprobs_and_token_ids_include_calls(start, scripted, tokenizer):
    """Log-probabilities and token ids of all tokens are returned, although calls are delayed."""
    ids = [*tokenizer.encode(TEXT).ids, 2]
    async with start(scripted(TEXT), max_model_len=2048) as front_end:
        fields = {
            "messages": HELLO,
            "tools": TOOLS,
            "n": 2,
            "logprobs": True,
            "return_token_ids": True,
        }
        whole = (await front_end.http.post(PATH, json=fields)).json()
        events = await front_end.events(PATH, **fields)
        for index in range(2):
            choice = whole["choices"][index]
            assert choice["token_ids"] == ids
            assert named(choice["message"]["tool_calls"]) == CALLS
            chunks = [
                each for event in events[:-1] for each in event["choices"] if each["index"] == index
            ]
            found = [chunk.get("token_ids") or [] for chunk in chunks]
            assert list(itertools.chain(*found)) == ids
            rows = [(chunk["logprobs"] or {"content": []})["content"] for chunk in chunks]
            assert list(itertools.chain(*rows)) == choice["logprobs"]["content"]
            content, calls, finish = accumulated(events, index)
            assert content == choice["message"]["content"]
            assert [(call["name"], call["text"]) for call in calls] == CALLS
            assert finish == choice["finish_reason"] == "tool_calls"


async def test_a_template_without_tools(start, scripted):
    """Tools, calls and results are described in the text of the prompt."""
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                },
                {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "cold"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}]},
    ]
    async with start(scripted("It is cold."), max_model_len=4096) as front_end:
        message_of(await front_end.chat(messages=messages, tools=TOOLS))
        prompt = prompt_of(front_end, front_end.engine.requests.get_nowait())
        system, user, assistant, answers, opened = prompt.split("<|im_start|>")[1:]
        assert system.startswith("system\nBe brief.\n\n# Tools")
        assert json.dumps(WEATHER) in system
        assert user == "user\nhello<|im_end|>\n"
        assert assistant == (
            'assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
            '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        )
        assert answers == (
            "user\n<tool_response>\ncold\n</tool_response>\n"
            "<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        )
        assert opened == "assistant\n"
        message_of(await front_end.chat(messages=messages))
        prompt = prompt_of(front_end, front_end.engine.requests.get_nowait())
        assert "# Tools" not in prompt
        assert "<tool_response>" in prompt
        body = {"messages": messages, "tools": TOOLS}
        response = await front_end.http.post("/tokenize", json=body)
        assert response.json()["count"] > len(front_end.app_state.tokenizer.longest_token * "a")


async def test_a_template_with_tools_and_a_call_marker(start, marked, scripted):
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "a", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "cold"},
    ]
    tokenizer = byte_level_tokenizer()
    ids = [*tokenizer.encode("So:").ids, MARK]
    ids += [*tokenizer.encode(' [{"name": "now", "arguments": {}}]').ids, 2]
    async with start(lambda request, choice: ids, served=marked, max_model_len=4096) as front_end:
        message = message_of(await front_end.chat(messages=messages, tools=TOOLS))
        assert message["content"] == "So:"
        assert named(message["tool_calls"]) == [("now", "{}")]
        request = front_end.engine.requests.get_nowait()
        assert request.grammar is None
        assert prompt_of(front_end, request) == (
            f"{json.dumps(WEATHER)};"
            + json.dumps(
                NOW
                | {"function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
            )
            + ";user:hello;assistant:[TOOL_CALLS] weather Rome a;tool:cold#a;"
        )
        message = message_of(await front_end.chat())
        assert message["content"] == 'So: [{"name": "now", "arguments": {}}]'
        strict = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
        message_of(await front_end.chat(tools=[strict]))
        for _ in range(2):
            request = front_end.engine.requests.get_nowait()
        assert request.grammar.trigger_token_id == MARK
        assert request.grammar.trigger == "[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("fields", "is_held"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, True),
        ({"parallel_tool_calls": False}, True),
        ({"parallel_tool_calls": True}, False),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
async def test_engine_requests_with_tools(start, scripted, fields, is_held):
    async with start(scripted("!"), max_model_len=4096) as front_end:
        message_of(await front_end.chat(tools=TOOLS, **fields))
        request = front_end.engine.requests.get_nowait()
        assert (request.grammar is not None) == is_held
        prompt = prompt_of(front_end, request)
        assert ("# Tools" in prompt) == (fields.get("tool_choice") != "none")


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_has_the_finish_reason_of_the_answer(start, scripted, caplog, stream):
    caplog.set_level(logging.INFO, "tokend.requests")
    async with start(scripted(TEXT), max_model_len=4096) as front_end:
        response = await front_end.chat(tools=TOOLS, stream=stream)
        assert '"finish_reason":"tool_calls"' in response.text.replace(": ", ":")
        assert "finish=tool_calls" in caplog.text


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools(start, scripted, mode):
    other = {"type": "function", "function": {"name": "other_tool"}}
    async with start(scripted("!"), max_model_len=4096) as front_end:
        message_of(await front_end.chat(tools=[NOW, other], tool_choice=allowed(mode, "now")))
        request = front_end.engine.requests.get_nowait()
        prompt = prompt_of(front_end, request)
        assert "now" in prompt
        assert "other_tool" not in prompt
        assert (request.grammar is not None) == (mode == "required")
        if mode == "required":
            assert "other_tool" not in str(request.grammar)


def tool(**function) -> list[dict]:
    return [NOW, {"type": "function", "function": {"name": "f", **function}}]


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return {"type": "object", "properties": {"a": schema}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "all"}, "tools"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": [NOW, 5]}, "tools[1]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": tool(name="a b")}, "tools[1].function.name"),
        ({"tools": tool(name="a" * 65)}, "tools[1].function.name"),
        ({"tools": tool(name=None)}, "tools[1].function.name"),
        ({"tools": tool(description=5)}, "tools[1].function.description"),
        ({"tools": tool(description="\ud800")}, "tools[1].function.description"),
        ({"tools": tool(strict="yes")}, "tools[1].function.strict"),
        ({"tools": tool(parameters=[])}, "tools[1].function.parameters"),
        ({"tools": tool(parameters={"type": "array"})}, "tools[1].function.parameters.type"),
        ({"tools": tool(parameters={"properties": 5})}, "tools[1].function.parameters.properties"),
        ({"tools": tool(parameters={"title": "a" * 70_000})}, "tools[1].function.parameters"),
        ({"tools": tool(parameters={"x-guidance": {}})}, "tools[1].function.parameters"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [NOW], "tool_choice": allowed("auto", "x")}, "tool_choice"),
        (
            {"tools": [NOW], "tool_choice": allowed("never", "now")},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tools": [NOW], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": [NOW], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [NOW], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [NOW], "tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        (
            {
                "tools": [NOW],
                "tool_choice": "required",
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs.regex",
        ),
    ],
)
async def test_bad_tools(start, scripted, fields, param):
    async with start(scripted("!"), max_model_len=4096) as front_end:
        content = json.dumps({"messages": HELLO, **fields}).encode()
        headers = {"content-type": "application/json"}
        response = await front_end.http.post(PATH, content=content, headers=headers)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert front_end.engine.requests.empty()


async def test_an_unknown_format(start, scripted, tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{{ tools }}{{ messages[0].content }}<tool_call><function="
    (tmp_path / "chat_template.jinja").write_text(template)
    served = prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)
    async with start(scripted("!"), served=served) as front_end:
        response = await front_end.chat(tools=[NOW])
        assert response.status_code == 400
        assert "--tool-call-parser" in response.json()["error"]["message"]
    config = FrontEndConfig(tool_call_parser="pythonic")
    async with start(scripted("[now()]"), served=served, config=config) as front_end:
        message = message_of(await front_end.chat(tools=[NOW]))
        assert named(message["tool_calls"]) == [("now", "{}")]


def use_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        answer = client.chat.completions.create(model="toy", messages=HELLO, tools=TOOLS)
        calls = answer.choices[0].message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
        assert answer.choices[0].finish_reason == "tool_calls"
        history = [
            *HELLO,
            answer.choices[0].message,
            *({"role": "tool", "tool_call_id": call.id, "content": "cold"} for call in calls),
        ]
        with client.chat.completions.stream(model="toy", messages=history, tools=TOOLS) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        assert final.message.content == "Let me see."
        calls = final.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
        assert final.finish_reason == "tool_calls"
        assert any(event.type == "tool_calls.function.arguments.done" for event in events)


async def test_the_openai_client(start, scripted):
    async with start(scripted(TEXT), max_model_len=4096) as front_end:
        await asyncio.to_thread(use_client, front_end.url)


async def test_the_length_limit_in_a_stream(start):
    """What was held back is dropped: it is the start of a call."""
    async with start(accepts=True, max_model_len=2048) as front_end:
        fields = {"messages": HELLO, "tools": TOOLS}
        events = asyncio.create_task(front_end.events(PATH, **fields))
        request = await front_end.engine.requests.get()
        tokens = byte_level_tokenizer().encode('<tool_call>\n{"name": "n').ids
        front_end.engine.emit(request, tokens, finish=FinishReason.LENGTH)
        assert accumulated(await events) == ("", [], "length")
