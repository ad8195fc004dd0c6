"""Whatever an API returns can be sent back to it: whole and cut answers, as clients keep them."""

import json

import anthropic.types
import openai.types.chat
import openai.types.responses
import pytest

from api_server.generation import app_state
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import concurrently, prepared
from tests.api_server.harmony_model import SOURCE, harmony_tokenizer, library_encoding
from tests.api_server.test_agents_with_templates import CALLS, TEMPLATES, events_of
from tests.api_server.test_harmony_chats import CALLED
from tests.api_server.tools.test_chats_with_tools import TEXT

ASKED = [{"role": "user", "content": "weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
SHOWING = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{{ '' if tools else '' }}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template that shows all of every message."""
ESCAPED = '<tool_call>\n{"name": "now", "arguments": {"half": "\\ud83d"}}\n</tool_call>'
SCRIPTS = {
    "text": (SHOWING, "<think>\nthe fox 😀\n</think>\n\nover the sea", 4),
    "calls": (SHOWING, f"<think>\nthe fox\n</think>\n\n{TEXT}", 11),
    "half a character": (SHOWING, ESCAPED, 99),
    "harmony": (SOURCE, CALLED, 13),
    **{
        name: ((TEMPLATES / f"{name}.jinja").read_text(), CALLS[name], 99)
        for name in ("mistral", "gemma3", "glm4.5", "deepseek_r1", "granite3.3")
    },
}
"""Chat template, answer, and tokens between two of its cuts."""
NAMES = ("weather", "now", "find")


def joined(answer: dict, delta: dict) -> None:
    """Add a delta to an answer as simple clients do: join texts, and lists by their indices."""
    for name, value in delta.items():
        if isinstance(value, str) and name not in ("role", "type", "id"):
            answer[name] = (answer.get(name) or "") + value
        elif isinstance(value, dict):
            joined(answer.setdefault(name, {}), value)
        elif isinstance(value, list):
            parts = answer.setdefault(name, [])
            for part in value:
                if part["index"] == len(parts):
                    parts.append({})
                joined(parts[part["index"]], part)
        else:
            answer.setdefault(name, value)


async def post(front_end, path: str, body: dict) -> dict:
    content, headers = json.dumps(body), {"content-type": "application/json"}
    response = await front_end.http.post(path, content=content, headers=headers)
    assert response.status_code == 200, (response.text, body)
    return response.json()


class Chat:
    path = "/v1/chat/completions"
    limit = "max_tokens"
    history = "messages"
    tools = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in NAMES]

    async def answers(self, front_end, body: dict) -> list:
        whole = (await post(front_end, self.path, body))["choices"][0]["message"]
        dumped = openai.types.chat.ChatCompletionMessage.model_validate(whole).model_dump()
        streamed: dict = {}
        for event in await events_of(front_end, self.path, body):
            joined(streamed, event["choices"][0]["delta"])
        return [[whole], [dumped], [streamed]]

    def results(self, answer: list) -> list:
        calls = answer[0].get("tool_calls") or []
        return [{"role": "tool", "tool_call_id": call["id"], "content": "21"} for call in calls]


class Responses:
    path = "/v1/responses"
    limit = "max_output_tokens"
    history = "input"
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]

    async def answers(self, front_end, body: dict) -> list:
        whole = await post(front_end, self.path, body)
        dumped = openai.types.responses.Response.model_validate(whole).model_dump()["output"]
        events = await events_of(front_end, self.path, body)
        streamed = [each["item"] for each in events if each["type"].endswith("output_item.done")]
        return [whole["output"], dumped, streamed]

    def results(self, answer: list) -> list:
        return [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "21"}
            for item in answer
            if item["type"] == "function_call"
        ]


class Messages:
    path = "/v1/messages"
    limit = "max_tokens"
    history = "messages"
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]

    async def answers(self, front_end, body: dict) -> list:
        whole = await post(front_end, self.path, body)
        dumped = anthropic.types.Message.model_validate(whole).model_dump()
        streamed: list = []
        for event in await events_of(front_end, self.path, body):
            if event["type"] == "content_block_start":
                streamed.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                joined(streamed[-1], event["delta"])
        for block in streamed:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block.pop("partial_json", "{}"))
        contents = (whole["content"], dumped["content"], streamed)
        return [[{"role": "assistant", "content": content}] for content in contents]

    def results(self, answer: list) -> list:
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "21"}
            for block in answer[0]["content"]
            if block["type"] == "tool_use"
        ]
        return [{"role": "user", "content": results}] if results else []


@pytest.mark.parametrize("api", [Chat(), Responses(), Messages()], ids=lambda api: api.path)
@pytest.mark.parametrize("name", SCRIPTS)
async def test_an_answer_cut_anywhere_can_be_sent_back(
    start, tokenizer, tmp_path, monkeypatch, name, api
):
    template, text, step = SCRIPTS[name]
    config = FrontEndConfig()
    if name == "harmony":
        encoding, tokenizer = library_encoding(), harmony_tokenizer()
        monkeypatch.setattr(app_state, "load_encoding", lambda path: encoding)
    elif template is SHOWING:
        config = FrontEndConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(template)
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    model = prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)
    ids = [*tokenizer.encode(text).ids, 2]
    cuts = {*range(1, len(ids), step), len(ids)}

    async with start(
        lambda request, choice: ids, served=model, max_model_len=8192, config=config
    ) as front_end:

        async def check(cut: int) -> None:
            body = {"model": "toy", api.history: ASKED, "tools": api.tools, api.limit: cut}
            for answer in await api.answers(front_end, body):
                more = api.results(answer) or [{"role": "user", "content": "and?"}]
                await post(front_end, api.path, body | {api.history: [*ASKED, *answer, *more]})

        await concurrently(check, cuts)
        if name == "calls":
            await check(len(ids))
            while not front_end.engine.requests.empty():
                request = front_end.engine.requests.get_nowait()
            prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            for shown in ("<think>the fox</think>Let me see.", '{"city": "Zürich 😀"}', "now{}"):
                assert shown in prompt
