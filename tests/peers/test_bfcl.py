"""Expected calls of the Berkeley function-calling leaderboard, as models of each format write them.

An answer is rendered by the layout of the format, and, as an oracle apart from it, by the chat
templates of models and by `openai-harmony`. It is parsed whole and in pieces.
"""

import ast
import json
import random
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from api_server.parsers.harmony import HarmonyParser
from api_server.parsers.tool_calls import with_arguments_as_text
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS, tool_call_format
from api_server.text.chat_template import Conversation
from api_server.text.harmony import HarmonyTemplate
from tests.api_server import harmony_model
from tests.api_server.test_template_formats import TEMPLATES, compiled
from tests.api_server.tools.parsing import joined
from tests.peers.packages import BFCL, unpack_package

pytestmark = pytest.mark.suite("peers")

Call = tuple[str, dict[str, Any]]
Answer = tuple[dict[str, dict[str, Any]], list[Call]]
"""Name → schema of the tools, and the calls."""
TYPES = {
    "dict": "object",
    "HashMap": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "tuple": "array",
    "Array": "array",
    "ArrayList": "array",
    "Boolean": "boolean",
    "String": "string",
    "char": "string",
}
"""Types of BFCL → types of JSON. Any other one that JSON has not is left out."""
JSON_TYPES = ("object", "number", "integer", "array", "boolean", "string")
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|end|>", "<|end_of_text|>")
END_TOKENS += ("<|eos|>", "<｜end▁of▁sentence｜>")
WITH_TEMPLATES = [
    name
    for name, source in TEMPLATES.items()
    if "tool_calls" in source and tool_call_format("auto", source, template_has_tools=True)
]
NUM_CUTS = 4


def schema_of(given: Any) -> Any:
    """Return a schema of BFCL as JSON schema."""
    if isinstance(given, list):
        return [schema_of(each) for each in given]
    if not isinstance(given, dict):
        return given
    found = {name: schema_of(value) for name, value in given.items() if name != "type"}
    if isinstance(given.get("type"), dict):
        return {**found, "type": schema_of(given["type"])}  # a property of this name
    kind = TYPES.get(given.get("type", ""), given.get("type"))
    return {**found, "type": kind} if kind in JSON_TYPES else found


def first_of(options: Any) -> Any:
    """Return one of the values that are expected, with one for each of its members."""
    value = next((option for option in options if option != ""), "")
    if isinstance(value, dict):
        members = {name: first_of(each) for name, each in value.items() if isinstance(each, list)}
        return {name: each for name, each in members.items() if each != ""}
    if isinstance(value, list):
        return [first_of([each]) if isinstance(each, dict) else each for each in value]
    return value


def fits(value: Any, schema: dict[str, Any], key: str) -> bool:
    """Return whether text without quotes tells a value: of the type text, or of any but text."""
    kind = schema["properties"].get(key, {}).get("type")
    if kind == "string" or not isinstance(value, str):
        return value is not None and (kind != "string" or isinstance(value, str))
    try:
        json.loads(value)
    except ValueError:
        return True
    return False


def lines(path: Path) -> Iterator[Any]:
    return map(json.loads, path.read_text("utf-8").splitlines())


@cache
def answers() -> list[Answer]:
    """The calls of questions with one turn, and of each turn of the others."""
    data = unpack_package(BFCL) / "bfcl_eval" / "data"
    found = []
    for path in sorted((data / "possible_answer").glob("*.json")):
        if "multi_turn" in path.name:
            continue
        questions = {each["id"]: each for each in lines(data / path.name)}
        for expected in lines(path):
            tools = questions[expected["id"]].get("function")
            if not tools or not all(isinstance(call, dict) for call in expected["ground_truth"]):
                continue
            schemas = {
                tool["name"].replace(".", "_"): schema_of(tool["parameters"]) for tool in tools
            }
            calls = []
            for call in expected["ground_truth"]:
                ((name, options),) = call.items()
                name = name.replace(".", "_")
                chosen = {key: first_of(values) for key, values in options.items()}
                required = schemas[name].get("required", [])
                arguments = {
                    key: value
                    for key, value in chosen.items()
                    if (value != "" or key in required) and fits(value, schemas[name], key)
                }
                calls.append((name, arguments))
            found.append((schemas, calls))
    return [*found, *(answer for answer, _ in turns())]


@cache
def turns() -> list[tuple[Answer, str]]:
    """The calls of each turn of a conversation, and their text in Python."""
    data = unpack_package(BFCL) / "bfcl_eval" / "data"
    schemas = {
        tool["name"]: schema_of(tool["parameters"])
        for path in sorted((data / "multi_turn_func_doc").glob("*.json"))
        for tool in lines(path)
    }
    found = []
    for expected in lines(data / "possible_answer" / "BFCL_v4_multi_turn_base.json"):
        for texts in expected["ground_truth"]:
            calls = [ast.parse(text, mode="eval").body for text in texts]
            if not calls or not all(isinstance(call, ast.Call) and not call.args for call in calls):
                continue
            read = [
                (
                    ast.unparse(call.func),
                    {each.arg: ast.literal_eval(each.value) for each in call.keywords},
                )
                for call in calls
            ]
            found.append(((schemas, read), f"[{', '.join(texts)}]"))
    return found


def num_common_characters(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def check(label: str, new_parser: Any, text: str, calls: list[Call], draw: random.Random) -> None:
    """Parse a text whole, and in pieces that end at random places."""
    for number in range(NUM_CUTS):
        places = sorted(draw.randint(0, len(text)) for _ in range(4 * number))
        parser, parts = new_parser(), []
        for start, end in zip([0, *places], [*places, len(text)], strict=True):
            parts += parser.parse_delta(text[start:end])
        content, found = joined([*parts, *parser.parse_end()])
        read = [(name, json.loads(arguments)) for name, arguments in found]
        assert (content, read) == ("", calls), (label, text, places)


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_calls_in_the_layout_of_a_format(name):
    call_format, draw, number = TOOL_CALL_FORMATS[name], random.Random(name), 0
    for tools, calls in answers():
        text = call_format.render_calls(
            [(called, json.dumps(arguments, ensure_ascii=False)) for called, arguments in calls]
        )
        check(name, partial(call_format.new_parser, tools), text, calls, draw)
        number += len(calls)
    assert number > 4000


@pytest.mark.parametrize("name", WITH_TEMPLATES)
def test_calls_as_a_chat_template_renders_them(name):
    call_format = tool_call_format("auto", TEMPLATES[name], template_has_tools=True)
    draw = random.Random(name)
    for tools, calls in answers()[::3]:
        calls = calls[:1] if name == "llama3" else calls  # its template refuses more
        given = [
            {
                "type": "function",
                "function": {"name": tool, "description": "", "parameters": schema},
            }
            for tool, schema in tools.items()
        ]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
        made = [
            {
                "id": f"functions.{tool}:{index}" if name == "kimi_k2" else f"call0{index:04}",
                "type": "function",
                "function": {"name": tool, "arguments": arguments},
            }
            for index, (tool, arguments) in enumerate(calls)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        if name == "deepseek_r1":  # its template adds them to a text
            messages = [*with_arguments_as_text(messages)]
        asked, prompt, whole = (
            compiled(name).render(
                Conversation(given_messages, given[:8], add_generation_prompt=is_prompt)
            )
            for given_messages, is_prompt in (
                (messages[:1], False),
                (messages[:1], True),
                (messages, False),
            )
        )
        marker = next(iter(call_format.call_markers), "")
        start = whole.find(marker, num_common_characters(asked, whole)) if marker else -1
        text = whole[start if start >= 0 else num_common_characters(prompt, whole) :].strip()
        for token in END_TOKENS:
            text = text.removesuffix(token).rstrip()
        check(name, partial(call_format.new_parser, tools), text, calls, draw)


def test_calls_as_text_of_python():
    pythonic, draw = TOOL_CALL_FORMATS["pythonic"], random.Random(0)
    for (tools, calls), text in turns():
        check("python", partial(pythonic.new_parser, tools), text, calls, draw)


def test_calls_as_openai_harmony_renders_them():
    encoding, draw = harmony_model.library_encoding(), random.Random(0)
    template = HarmonyTemplate(encoding, harmony_model.SOURCE)
    for tools, calls in answers()[::3]:
        for tool, arguments in calls:
            call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": "Go."},
                {"role": "assistant", "content": "", "tool_calls": [{"id": "a", **call}]},
            ]
            whole = template.render(Conversation(messages, None, add_generation_prompt=False))
            _, _, text = whole.rpartition("<|start|>assistant")
            check(
                "harmony",
                partial(HarmonyParser, encoding, None, tools),
                harmony_model.marked(text),
                [(tool, arguments)],
                draw,
            )
