"""A tiny random gpt-oss behind the real daemon: it chooses the harmony format by itself.

Grammars make its random tokens a call, in chat, Responses and Messages.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from transformers import GptOssConfig

from api_server.text.harmony import VOCABULARY_FOLDER
from tests.api_server.harmony_model import SOURCE, harmony_tokenizer
from tests.e2e.daemon import Daemon
from tests.fakes.o200k import write_vocabulary
from tests.fakes.tiny_checkpoints import CONFIGS, save_mxfp4, tiny_model

pytestmark = pytest.mark.suite("models")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"], "type": "string"}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "weather", "description": "The weather."}
ASKED: list[Any] = [{"role": "user", "content": "the fox"}]
FIELDS: dict[str, Any] = {"model": "model", "temperature": 0}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon of a model with a small vocabulary; the library gets its own from a folder."""
    folder, library = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("library")
    if not write_vocabulary(library):
        pytest.skip("the vocabulary o200k is not installed")
    tokenizer = harmony_tokenizer()
    sizes = CONFIGS["gptoss"].to_dict() | {"max_position_embeddings": 1024}
    ends = [tokenizer.token_to_id(f"<|{name}|>") for name in ("return", "call")]
    config = GptOssConfig(
        **sizes | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": ends}
    )
    save_mxfp4(tiny_model(config), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(SOURCE)
    flags = ("--served-model-name", "model")
    with Daemon(str(folder), *flags, environment={VOCABULARY_FOLDER: str(library)}) as running:
        yield running


def check(name: str, arguments: Any) -> None:
    assert name == "weather"
    assert arguments["unit"] in SCHEMA["properties"]["unit"]["enum"]


def test_chat(daemon: Daemon) -> None:
    client = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        messages=ASKED,
        tools=[{"type": "function", "function": TOOL | {"parameters": SCHEMA}}],
        tool_choice="required",
        extra_body={"thinking_token_budget": 4, "return_prompt_text": True},
        **FIELDS,
    )
    prompt = answer.model_extra["prompt_text"] if answer.model_extra else ""
    assert prompt.startswith("<|start|>system<|message|>You are ChatGPT")
    assert prompt.endswith("<|start|>user<|message|>the fox<|end|><|start|>assistant")
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    check(call.function.name, json.loads(call.function.arguments))


def test_responses(daemon: Daemon) -> None:
    client = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0)
    response = client.responses.create(
        input="the fox",
        tools=[{"type": "function", "strict": True, **TOOL, "parameters": SCHEMA}],
        tool_choice="required",
        extra_body={"thinking_token_budget": 4},
        **FIELDS,
    )
    *_, call = response.output
    assert call.type == "function_call"
    check(call.name, json.loads(call.arguments))


def test_messages(daemon: Daemon) -> None:
    client = anthropic.Anthropic(base_url=daemon.url, api_key="none", max_retries=0)
    message = client.messages.create(
        max_tokens=400,
        messages=ASKED,
        tools=[{**TOOL, "input_schema": SCHEMA}],
        tool_choice={"type": "any"},
        thinking={"type": "enabled", "budget_tokens": 4},
        model="model",
        extra_body={"temperature": 0},
    )
    *_, call = message.content
    assert message.stop_reason == "tool_use"
    assert call.type == "tool_use"
    check(call.name, call.input)
