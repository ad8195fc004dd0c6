"""A harmony model behind the three chat APIs, with their clients, against a scripted engine."""

import json
import random

import anthropic
import jsonschema
import numpy as np
import openai
import pytest

from api_server.generation import app_state
from api_server.parsers.harmony import END_MARKERS
from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.json_schema import SchemaWork
from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import mask_words
from proto.errors import InvalidRequestError, ModelError
from proto.messages.grammar import GrammarSource
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import prepared
from tests.api_server.harmony_model import (
    SOURCE,
    harmony_of,
    harmony_tokenizer,
    joined,
    library_encoding,
    marked,
    read,
)
from tests.api_server.test_harmony import ANALYSIS, ARGUMENTS, CALL, FINAL, FIND, NEXT, NOW

HELLO = [{"role": "user", "content": "hello"}]
ANSWER = f"{ANALYSIS}the fox 😀{NEXT}{FINAL}over the sea<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>Look:"
CALLED = f"{ANALYSIS}the fox 😀{NEXT}{PREAMBLE}{NEXT}{CALL}{ARGUMENTS}<|call|>"
RESULT = "<|start|>functions.find to=assistant<|channel|>commentary<|message|>3<|end|>"


@pytest.fixture
def serve(start, tmp_path, monkeypatch):
    """serve(said): a front end whose engine samples this text."""
    encoding = library_encoding()
    monkeypatch.setattr(app_state, "load_encoding", lambda path: encoding)
    tokenizer = harmony_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(SOURCE)
    model = prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)

    def running(said, **fields):
        ids = tokenizer.encode(said).ids
        return start(lambda request, choice: ids, served=model, max_model_len=4096, **fields)

    return running


def openai_client(front_end) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front_end.url}/v1", api_key="none", max_retries=0)


def prompt_of(front_end) -> str:
    request = front_end.engine.requests.get_nowait()
    tokenizer = front_end.app_state.tokenizer
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


async def test_chat(serve):
    async with serve(CALLED) as front_end:
        client = openai_client(front_end)
        fields = {
            "model": "toy",
            "messages": HELLO,
            "tools": [FIND, NOW],
            "reasoning_effort": "high",
        }
        whole = await client.chat.completions.create(**fields)
        (choice,) = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning == "the fox 😀"
        assert choice.message.content == "Look:"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("find", ARGUMENTS)
        number = len(harmony_tokenizer().encode("the fox 😀").ids)
        assert whole.usage.completion_tokens_details.reasoning_tokens == number
        prompt = prompt_of(front_end)
        assert "Reasoning: high" in prompt
        assert "namespace functions" in prompt
        assert prompt.endswith("<|start|>user<|message|>hello<|end|><|start|>assistant")
        for interval in (1, 3):
            stream = await client.chat.completions.create(
                **fields, stream=True, extra_body={"stream_interval": interval}
            )
            reasoning = content = arguments = ""
            async for chunk in stream:
                (part,) = chunk.choices
                reasoning += getattr(part.delta, "reasoning", None) or ""
                content += part.delta.content or ""
                for each in part.delta.tool_calls or ():
                    arguments += each.function.arguments or ""
            assert (reasoning, content, arguments) == ("the fox 😀", "Look:", ARGUMENTS)
            assert part.finish_reason == "tool_calls"
        # The answer goes back with its result: the reasoning is kept, as it is the same turn.
        said = {"role": "assistant", "content": "Look:", "reasoning": "the fox 😀"}
        said["tool_calls"] = [call.model_dump()]
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        while not front_end.engine.requests.empty():
            front_end.engine.requests.get_nowait()
        await client.chat.completions.create(**fields | {"messages": [*HELLO, said, result]})
        prompt = prompt_of(front_end)
        assert f"assistant{ANALYSIS}the fox 😀<|end|>" in prompt
        assert f"<|message|>{ARGUMENTS}<|call|><|start|>functions.find to=assistant" in prompt


async def test_chat_without_tools_and_with_raw_output(serve):
    async with serve(ANSWER) as front_end:
        whole = (await front_end.chat()).json()
        message = whole["choices"][0]["message"]
        assert message["reasoning"] == "the fox 😀"
        assert message["content"] == "over the sea"
        assert whole["choices"][0]["finish_reason"] == "stop"
        request = front_end.engine.requests.get_nowait()
        ids = {harmony_tokenizer().token_to_id(f"<|{name}|>") for name in END_MARKERS}
        assert ids <= set(request.sampling_params.eos_token_ids)
        assert request.grammar is None
        hidden = (await front_end.chat(include_reasoning=False)).json()["choices"][0]["message"]
        assert "reasoning" not in hidden
        assert hidden["content"] == "over the sea"
        without_text = (await front_end.chat(detokenize=False)).json()
        assert without_text["usage"] == whole["usage"]
        raw = (await front_end.chat(skip_special_tokens=False)).json()["choices"][0]["message"]
        assert raw["content"] == ANSWER.removesuffix("<|return|>")


async def test_a_limit_cuts_the_call(serve):
    async with serve(CALLED) as front_end:
        number = len(harmony_tokenizer().encode(CALLED).ids) - 4
        body = (await front_end.chat(tools=[FIND], max_tokens=number)).json()
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "length"
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == "Look:"


async def test_continued_answer(serve):
    async with serve(" the sea<|return|>") as front_end:
        messages = [*HELLO, {"role": "assistant", "content": "over"}]
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        body = (await front_end.chat(messages=messages, **fields)).json()
        assert body["choices"][0]["message"]["content"] == " the sea"
        assert prompt_of(front_end).endswith(f"<|start|>assistant{FINAL}over")


async def test_responses(serve):
    function = FIND["function"]
    tool = {"type": "function", **function, "strict": False}
    async with serve(CALLED) as front_end:
        client = openai_client(front_end)
        fields = {"model": "toy", "input": "hello", "tools": [tool], "reasoning": {"effort": "low"}}
        response = await client.responses.create(**fields)
        reasoning, message, call = response.output
        assert reasoning.content[0].text == "the fox 😀"
        assert message.content[0].text == "Look:"
        assert (call.type, call.name, call.arguments) == ("function_call", "find", ARGUMENTS)
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        assert "Reasoning: low" in prompt_of(front_end)
        done = None
        async with client.responses.stream(**fields) as stream:
            async for event in stream:
                done = event
        assert [item.type for item in done.response.output] == [
            "reasoning",
            "message",
            "function_call",
        ]
        assert done.response.output[2].arguments == ARGUMENTS
        while not front_end.engine.requests.empty():
            front_end.engine.requests.get_nowait()
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        items = [item.model_dump(exclude_none=True) for item in response.output]
        sent = [{"role": "user", "content": "hello"}, *items, result]
        await client.responses.create(**fields | {"input": sent})
        prompt = prompt_of(front_end)
        assert f"assistant{ANALYSIS}the fox 😀<|end|>" in prompt
        assert (
            "<|start|>functions.find to=assistant<|channel|>commentary<|message|>3<|end|>" in prompt
        )


async def test_messages(serve):
    function = FIND["function"]
    tool = {
        "name": "find",
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    async with serve(CALLED) as front_end:
        client = anthropic.AsyncAnthropic(base_url=front_end.url, api_key="none", max_retries=0)
        fields = {"model": "toy", "max_tokens": 999, "messages": HELLO, "tools": [tool]}
        message = await client.messages.create(**fields)
        thinking, text, call = message.content
        assert (thinking.thinking, text.text) == ("the fox 😀", "Look:")
        assert (call.name, call.input) == ("find", json.loads(ARGUMENTS))
        assert message.stop_reason == "tool_use"
        async with client.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
        assert streamed.content[2].input == json.loads(ARGUMENTS)
        while not front_end.engine.requests.empty():
            front_end.engine.requests.get_nowait()
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        history = [
            *HELLO,
            {"role": "assistant", "content": [block.model_dump() for block in message.content]},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(**fields | {"messages": history, "system": "Be brief."})
        prompt = prompt_of(front_end)
        assert "developer<|message|># Instructions\n\nBe brief." in prompt
        assert f"assistant{ANALYSIS}the fox 😀<|end|>" in prompt
        assert (
            "<|start|>functions.find to=assistant<|channel|>commentary<|message|>3<|end|>" in prompt
        )


async def test_the_flags_choose_the_format(serve):
    config = FrontEndConfig(reasoning_parser="none")
    async with serve(ANSWER, config=config) as front_end:
        assert front_end.app_state.harmony is None
    with pytest.raises(ModelError, match="--tool-call-parser hermes"):
        async with serve(ANSWER, config=FrontEndConfig(tool_call_parser="hermes")):
            pass


# Grammars of whole answers.

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
STRICT = {"type": "function", "function": FIND["function"] | {"strict": True}}


@pytest.fixture(scope="module")
def backend(tmp_path_factory) -> LLGuidanceBackend:
    path, tokenizer = tmp_path_factory.mktemp("toy") / "tokenizer.json", harmony_tokenizer()
    tokenizer.save(str(path))
    ends = harmony_of(tokenizer).end_token_ids
    return LLGuidanceBackend(path, tokenizer.get_vocab_size(), ends)


def grammar(**fields) -> GrammarSource | None:
    context = IgnoredFields()
    body = ChatCompletionRequest.model_validate({"messages": HELLO, **fields}, context=context)
    text_grammar = body.grammar_source(context, SchemaWork())
    return harmony_of(harmony_tokenizer()).answer_grammar(body, text_grammar, context, SchemaWork())


def admits(backend, source, said) -> bool:
    """Return whether the grammar admits this answer, with its end."""
    tokenizer = harmony_tokenizer()
    matcher = backend.compile(source).copy()
    masks = np.empty((1, mask_words(tokenizer.get_vocab_size())), dtype=np.int32)
    for token_id in tokenizer.encode(said).ids:
        backend.fill_masks([matcher], masks)
        if not masks.view(np.uint32)[0, token_id >> 5] >> (token_id & 31) & 1:
            return False
        matcher.consume([token_id])
    return True


def walk(backend, source, seed) -> str:
    """Return an answer of random tokens that the grammar admits."""
    tokenizer, draw = harmony_tokenizer(), random.Random(seed)
    matcher, ids = backend.compile(source).copy(), []
    ends = harmony_of(tokenizer).end_token_ids
    masks = np.empty((1, mask_words(tokenizer.get_vocab_size())), dtype=np.int32)
    special = {tokenizer.token_to_id(f"<|{name}|>") for name in ("end", "message")}
    while len(ids) < 2000:
        backend.fill_masks([matcher], masks)
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        choices = np.flatnonzero(bits).tolist()
        found = [one for one in choices if one in ends]
        if found:
            return tokenizer.decode([*ids, draw.choice(found)], skip_special_tokens=False)
        markers = special.intersection(choices)  # texts end soon
        ids.append(min(markers) if markers and draw.random() < 0.3 else draw.choice(choices))
        matcher.consume(ids[-1:])
    raise AssertionError(f"it does not end: {tokenizer.decode(ids, skip_special_tokens=False)}")


THINKS = f"{ANALYSIS}Hm.{NEXT}"


def test_response_format_applies_to_the_final_message(backend):
    source = grammar(response_format=FORMAT)
    assert source.field == "response_format"
    assert admits(backend, source, f'{THINKS}{FINAL}{{"n": 5}}<|return|>')
    assert admits(backend, source, f'{FINAL}{{"n": 5}}<|return|>')
    for said in (
        f"{THINKS}{FINAL}Five<|return|>",
        f"{ANALYSIS}Hm.<|return|>",
        f'{FINAL}{{"n": 100}}<|return|>',
        "Hm",
    ):
        assert not admits(backend, source, said)
    for seed in range(5):
        _, content, calls = joined(read([marked(walk(backend, source, seed))]))
        jsonschema.validate(json.loads(content), SCHEMA)
        assert calls == []


def test_tools_beside_a_response_format(backend):
    source = grammar(response_format=FORMAT, tools=[FIND])
    assert admits(backend, source, f'{THINKS}{FINAL}{{"n": 5}}<|return|>')
    assert admits(backend, source, f"{THINKS}{CALL}{{}}<|call|>")
    assert not admits(backend, source, f"{THINKS}{FINAL}Five<|return|>")


@pytest.mark.parametrize(
    ("fields", "text", "other"),
    [
        ({"structured_outputs": {"regex": r"[a-c/]+\/\d"}}, "a/b/7", "d/7"),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'n"o', "no"),
        ({"response_format": {"type": "json_object"}}, '{"a": []}', "[]"),
    ],
)
def test_other_forms_of_the_final_message(backend, fields, text, other):
    source = grammar(**fields)
    assert admits(backend, source, f"{THINKS}{FINAL}{text}<|return|>")
    assert not admits(backend, source, f"{THINKS}{FINAL}{other}<|return|>")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_call_is_required(backend, choice):
    source = grammar(tools=[FIND, NOW], tool_choice=choice)
    assert not admits(backend, source, f"{THINKS}{FINAL}Hi.<|return|>")
    assert admits(backend, source, f"{THINKS}{CALL}{ARGUMENTS}<|call|>")
    assert not admits(backend, source, f"{THINKS}{CALL}{{}}<|call|>")  # text is required
    called = set()
    for seed in range(10):
        _, _, calls = joined(read([marked(walk(backend, source, seed))]))
        ((name, arguments),) = calls
        called.add(name)
        if name == "find":
            jsonschema.validate(json.loads(arguments), FIND["function"]["parameters"])
    assert called == ({"find", "now"} if choice == "required" else {"find"})


def test_strict_tools(backend):
    assert grammar(tools=[FIND]) is None
    assert grammar(tools=[FIND], parallel_tool_calls=False) is None  # there is one call at most
    source = grammar(tools=[STRICT])
    assert source.field == "tools[0].function.parameters"
    assert admits(backend, source, f"{THINKS}{FINAL}Hi.<|return|>")
    assert admits(backend, source, f"{THINKS}{PREAMBLE}{NEXT}{CALL}{ARGUMENTS}<|call|>")
    assert not admits(backend, source, f'{THINKS}{CALL}{{"other": 1}}<|call|>')


def test_reasoning_is_limited_or_left_out(backend):
    source = grammar(thinking_token_budget=3)
    number = len(harmony_tokenizer().encode("abc").ids)
    assert number == 3
    assert admits(backend, source, f"{ANALYSIS}abc{NEXT}{FINAL}Hi.<|return|>")
    assert not admits(backend, source, f"{ANALYSIS}abcd{NEXT}{FINAL}Hi.<|return|>")
    for fields in (
        {"thinking_token_budget": 0},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"reasoning_effort": "none"}},
    ):
        source = grammar(**fields)
        assert admits(backend, source, f"{FINAL}Hi.<|return|>")
        assert not admits(backend, source, f"{THINKS}{FINAL}Hi.<|return|>")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
        (
            {
                "tools": [FIND],
                "tool_choice": "required",
                "continue_final_message": True,
                "messages": [*HELLO, {"role": "assistant", "content": "Yes"}],
            },
            "tool_choice",
        ),
    ],
)
def test_what_does_not_go_together_names_the_field(fields, param):
    with pytest.raises(InvalidRequestError) as raised:
        grammar(**fields)
    assert raised.value.param == param
