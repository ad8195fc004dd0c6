"""Models with a chat template of its own for requests with tools."""

from pathlib import Path

import pytest

from api_server.generation.app_state import ModelTexts
from proto.messages.prepared_model import CHAT_TEMPLATES
from proto.settings.config import FrontEndConfig, ModelConfig, ServeConfig
from tests.api_server.conftest import prepared

DEFAULT = "<think></think>{{ messages[0].content }}"
TOOL_USE = "<tool_call>{{ tools | length }}{{ '!' if enable_thinking }}{{ messages[0].content }}"
MESSAGES = [{"role": "user", "content": "hm"}]
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


@pytest.fixture
def serve(tokenizer, tmp_path):
    def served(**templates: str):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, text in templates.items():
            path = Path(tmp_path, CHAT_TEMPLATES[name])
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)

    return served


async def test_the_template_for_tools_is_used_with_tools(start, scripted, serve, tokenizer):
    """And tells how calls and reasoning are written."""
    served = serve(default=DEFAULT, tool_use=TOOL_USE)
    async with start(scripted(f"<think>a</think>{CALL}"), served=served) as front_end:

        async def answer(**fields):
            found = (
                await front_end.chat(messages=MESSAGES, return_token_ids=True, **fields)
            ).json()
            body = {"messages": MESSAGES, **fields}
            tokens = (await front_end.http.post("/tokenize", json=body)).json()["tokens"]
            assert tokens == found["prompt_token_ids"]
            return tokenizer.decode(tokens), found["choices"][0]["message"]

        prompt, message = await answer(tools=TOOLS, chat_template_kwargs={"enable_thinking": True})
        assert prompt == "<tool_call>1!hm"
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        assert message["content"] == "<think>a</think>"
        for more in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            prompt, message = await answer(**more)
            assert prompt == "<think></think>hm"
            assert (message["content"], message["reasoning"]) == (CALL, "a")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/responses/input_tokens",
            {"input": MESSAGES, "tools": [{"type": "function"} | FUNCTION]},
        ),
        (
            "/v1/messages/count_tokens",
            {
                "model": "toy",
                "messages": MESSAGES,
                "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
            },
        ),
    ],
)
async def test_the_other_apis_use_it_too(start, serve, tokenizer, path, body):
    async with start(served=serve(default=DEFAULT, tool_use=TOOL_USE)) as front_end:
        for text in ("<tool_call>1hm", "<think></think>hm"):
            found = (await front_end.http.post(path, json=body)).json()
            assert found["input_tokens"] == len(tokenizer.encode(text).ids)
            body = {name: value for name, value in body.items() if name != "tools"}


async def test_without_a_default_template_chats_need_tools(start, scripted, serve):
    config = FrontEndConfig(enable_tokenizer_info_endpoint=True)
    served = serve(tool_use=TOOL_USE)
    async with start(scripted(CALL), served=served, config=config) as front_end:
        response = await front_end.chat(messages=MESSAGES)
        assert response.status_code == 400
        assert "has a chat template only for requests with tools" in response.text
        response = await front_end.chat(messages=MESSAGES, tools=TOOLS)
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
        info = (await front_end.http.get("/tokenizer_info")).json()
        assert info["chat_template"] == TOOL_USE


def test_a_template_given_at_the_start_is_for_all_requests(serve, tmp_path):
    served = serve(default=DEFAULT, tool_use=TOOL_USE)
    (tmp_path / "own.jinja").write_text("<|endoftext|>")
    for config, source, ends in (
        (ModelConfig(), TOOL_USE, (2,)),
        (ModelConfig(chat_template=str(tmp_path / "own.jinja")), "<|endoftext|>", (2, 0)),
    ):
        texts = ModelTexts.load(ServeConfig(model=config), served)
        assert texts.chat_template.with_tools.source == source
        assert texts.model.eos_token_ids == ends
