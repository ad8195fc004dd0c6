"""Agent conversations with the chat templates of well-known models."""

import json
from pathlib import Path

import pytest

from api_server.protocol.responses.input import with_merged_roles
from api_server.text.chat_prompt import with_call_ids_of_length
from api_server.text.chat_template import template_environment, template_facts
from tests.api_server.conftest import prepared

TEMPLATES = Path(__file__).parent / "templates"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
JSON_CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALLS = {
    "mistral": f"[TOOL_CALLS][{JSON_CALL}]",
    "llama3": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "gemma3": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "qwen2.5": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "qwen3": f"<think>\nx\n</think>\n\n<tool_call>\n{JSON_CALL}\n</tool_call>",
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "glm4.5": (
        "\n<think>x</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n</tool_call>"
    ),
    "deepseek_r1": (
        "x\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "granite3.3": (f"<think>x</think><response>See.</response>\n<|tool_call|>[{JSON_CALL}]"),
    "phi4_mini": f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>",
    "hunyuan_a13b": (
        f"<think>\nx\n</think>\n<answer>\n<tool_calls>[{JSON_CALL}]</tool_calls>\n</answer>"
    ),
}
FORMATS = {
    "mistral": "mistral",
    "llama3": "llama3_json",
    "gemma3": "hermes",
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm4.5": "glm45",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v3.1": "deepseek_v31",
    "kimi_k2": "kimi_k2",
    "granite3.3": "granite",
    "phi4_mini": "phi4_mini",
    "hunyuan_a13b": "hunyuan_a13b",
}


@pytest.fixture
def serve(tokenizer, tmp_path):
    def served(name: str):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        template = (TEMPLATES / f"{name}.jinja").read_text()
        (tmp_path / "chat_template.jinja").write_text(template)
        tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
        return prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)

    return served


async def posted(front_end, path: str, body: dict) -> dict:
    response = await front_end.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("name", CALLS)
async def test_a_tool_call_can_be_sent_back(start, scripted, serve, name):
    """By each API, with the order of roles of Codex and Claude Code."""
    async with start(scripted(CALLS[name]), served=serve(name), max_model_len=8192) as front_end:
        body = {
            "input": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": "on Linux"},
                {"role": "user", "content": "weather?"},
            ],
            "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        }
        first = await posted(front_end, "/v1/responses", body)
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
        late = [{"role": "developer", "content": "hm"}, {"role": "user", "content": "and?"}]
        for more in ([result], [result, *late]):
            said = [*body["input"], *first["output"], *more]
            await posted(front_end, "/v1/responses", body | {"input": said})

        asked = [{"role": "user", "content": "weather?"}, {"role": "system", "content": "hm"}]
        body = {
            "model": "toy",
            "max_tokens": 200,
            "messages": asked,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
        }
        first = await posted(front_end, "/v1/messages", body)
        result = {
            "type": "tool_result",
            "tool_use_id": first["content"][-1]["id"],
            "content": [{"type": "text", "text": "21"}],
        }
        for more in ([result], [result, {"type": "text", "text": "and?"}]):
            said = [
                *asked,
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": more},
            ]
            await posted(front_end, "/v1/messages", body | {"messages": said})

        body = {
            "messages": asked[:1],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
        }
        message = (await posted(front_end, "/v1/chat/completions", body))["choices"][0]["message"]
        result = {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": "21",
        }
        said = [*asked[:1], message, result]
        await posted(front_end, "/v1/chat/completions", body | {"messages": said})


async def events_of(front_end, path: str, body: dict) -> list[dict]:
    """Return the events of a stream."""
    response = await front_end.http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("name", CALLS)
async def test_streams_have_the_calls_of_whole_answers(start, scripted, serve, name):
    """In each API, with the format that the template tells."""
    async with start(scripted(CALLS[name]), served=serve(name), max_model_len=8192) as front_end:
        app_state = front_end.app_state
        assert app_state.tool_calls(app_state.chat_template).format.name == FORMATS[name]
        reasons = "x\n" in CALLS[name] or "<think>" in CALLS[name]
        asked = [{"role": "user", "content": "weather?"}]
        function = {"name": "weather", "parameters": SCHEMA}
        body = {"messages": asked, "tools": [{"type": "function", "function": function}]}
        choice = (await posted(front_end, "/v1/chat/completions", body))["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        assert choice["message"].get("reasoning") == ("x" if reasons else None)
        said = "See." if name == "granite3.3" else None
        assert choice["message"]["content"] == said
        deltas = [
            each["choices"][0]["delta"]
            for each in await events_of(front_end, "/v1/chat/completions", body)
        ]
        calls = [part for delta in deltas for part in delta.get("tool_calls") or []]
        assert next(part["function"].get("name") for part in calls) == "weather"
        joined = "".join(part["function"].get("arguments") or "" for part in calls)
        assert joined == call["function"]["arguments"]
        assert "".join(delta.get("content") or "" for delta in deltas) == (said or "")

        body = {"input": asked, "tools": [{"type": "function", **function}]}
        whole = await posted(front_end, "/v1/responses", body)
        assert whole["output"][-1]["arguments"] == joined
        events = await events_of(front_end, "/v1/responses", body)
        deltas = [e["delta"] for e in events if e["type"].endswith("call_arguments.delta")]
        assert "".join(deltas) == joined

        tools = [{"name": "weather", "input_schema": SCHEMA}]
        body = {"model": "toy", "max_tokens": 900, "messages": asked, "tools": tools}
        whole = await posted(front_end, "/v1/messages", body)
        assert whole["content"][-1]["input"] == {"city": "Paris"}
        events = await events_of(front_end, "/v1/messages", body)
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        parts = [each["partial_json"] for each in deltas if each["type"] == "input_json_delta"]
        assert "".join(parts) == joined


async def test_kimi_reads_the_ids_that_it_wrote(start, scripted, serve):
    """Clients see unique ids; the prompt numbers the calls of the whole conversation."""
    text, served = CALLS["kimi_k2"], serve("kimi_k2")
    async with start(scripted(text), served=served, max_model_len=8192) as front_end:
        tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
        body = {"messages": [{"role": "user", "content": "weather?"}], "tools": tools}
        ids = []
        for _ in range(2):
            answer = await posted(front_end, "/v1/chat/completions", body)
            message = answer["choices"][0]["message"]
            ids.append(message["tool_calls"][0]["id"])
            result = {"role": "tool", "tool_call_id": ids[-1], "content": "21"}
            body["messages"] += [message, result]
        assert len({*ids}) == 2
        await posted(front_end, "/v1/chat/completions", body)
        for _ in range(3):
            request = front_end.engine.requests.get_nowait()
        prompt = front_end.app_state.tokenizer.decode(
            request.prompt_token_ids, skip_special_tokens=False
        )
        assert prompt.count("functions.weather:0<|") == prompt.count("functions.weather:1<|") == 1
        assert prompt.count("## Return of functions.weather:0\n") == 1
        assert prompt.count("## Return of functions.weather:1\n") == 1
        assert "call_" not in prompt.replace("tool_call_", "")


async def test_a_template_that_knows_calls_and_no_tools(start, scripted, serve):
    """Of DeepSeek R1: the system message describes the tools, the template writes the calls."""
    text, served = CALLS["deepseek_r1"], serve("deepseek_r1")
    async with start(scripted(text), served=served, max_model_len=8192) as front_end:
        tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
        body = {"messages": [{"role": "user", "content": "weather?"}], "tools": tools}
        message = (await posted(front_end, "/v1/chat/completions", body))["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21"}
        body["messages"] += [message, result]
        await posted(front_end, "/v1/chat/completions", body)
        for _ in range(2):
            request = front_end.engine.requests.get_nowait()
        prompt = front_end.app_state.tokenizer.decode(
            request.prompt_token_ids, skip_special_tokens=False
        )
        system, _, rest = prompt.partition("<｜User｜>")
        assert "# Tools" in system
        assert "function<｜tool▁sep｜>function-name\n```json\n" in system
        assert 'weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>' in rest
        assert "<｜tool▁output▁begin｜>21<｜tool▁output▁end｜>" in rest


def test_call_ids_are_shortened_for_templates_that_require_it():
    def length(source: str) -> int:
        return template_facts(template_environment().parse(source)).call_id_length

    assert length((TEMPLATES / "mistral.jinja").read_text()) == 9
    assert length("{% if message['tool_call_id']|length == 7 %}x{% endif %}") == 7
    assert [length((TEMPLATES / f"{name}.jinja").read_text()) for name in ("qwen3", "llama3")] == [
        0,
        0,
    ]
    assert length("{% if ids|length != 9 or message.id|length > 9 %}x{% endif %}") == 0
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call | {"id": "call_1"}, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "x"},
        {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "y"},
    ]
    found = with_call_ids_of_length(messages, 9)
    changed = found[0]["tool_calls"][0]["id"]
    assert len(changed) == 9
    assert changed.isalnum()
    assert found[0]["tool_calls"][1] == call
    assert [each.get("tool_call_id") for each in found[1:]] == [changed, "aB3dE6gH9"]
    assert messages[0]["tool_calls"][0]["id"] == "call_1", "the request's own ids are unchanged"
    assert with_call_ids_of_length(messages, 0) is messages


def test_folding():
    calls = [{"id": "c"}]
    turns = [
        ("system", "be brief"),
        ("user", "on Linux"),
        ("system", ""),
        ("user", "weather?"),
        ("assistant", "look"),
        ("tool", "21"),
        ("tool", "22"),
        ("user", "and?"),
        ("assistant", "so"),
        ("system", "hm"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    messages[4]["tool_calls"] = calls
    found = with_merged_roles(messages)
    assert [(each["role"], each["content"]) for each in found] == [
        ("system", "be brief"),
        ("user", "on Linux\nweather?"),
        ("assistant", "look"),
        ("tool", "21"),
        ("tool", "22\nand?"),
        ("assistant", "so"),
        ("user", "hm"),
    ]
    assert found[2]["tool_calls"] is calls
    assert with_merged_roles(found) == found
