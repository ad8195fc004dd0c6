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
