"""Guessing from the text of an answer which tool it calls."""

import random
import re

import pytest

from api_server.parsers.called_tool import (
    KEPT_CHARACTERS,
    AgentTurn,
    find_called_tool,
    guess_called_tool,
)
from api_server.parsers.output import (
    PLAIN_TEXT,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from api_server.protocol.agents import tool_name

CALLS = {
    "shell": ("I look.\n```bash\nls -la\n```\n", "ls"),
    "cut off": ("```bash\ngrep -rn x", "grep"),
    "sh": ("```sh\nmake\n```", "make"),
    "settings": ("```bash\n# all of them\nCI=1 PYTHONPATH=. pytest -x; true\n```", "pytest"),
    "prompt": ("```console\n$ git status\n```", "git"),
    "path": ("```bash\n./tools/run_tests.sh --fast\n```", "run_tests.sh"),
    "no name": ("```bash\n(cd x && make)\n```", "bash"),
    "slash": ("```bash\n/ x\n```", "bash"),
    "two blocks": ("```bash\ncat a\n```\n```bash\nrm a\n```", "cat"),
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"name": "x"}}\n</tool_call>',
        "weather",
    ),
    "arguments first": ('<tool_call>{"arguments": {}, "name": "time"}</tool_call>', "time"),
    "without its end": ('So:\n<tool_call>{"name":"search"', "search"),
    "xml": ("<tool_call>\n<function=read_file>\n<parameter=path>\nx", "read_file"),
    "function": ("<function=lookup>{}</function>", "lookup"),
    "glm": ("<tool_call>get_time\n<arg_key>zone</arg_key>", "get_time"),
    "mistral": ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "add"),
    "mistral, newer": ('[TOOL_CALLS]add[ARGS]{"a": 1}', "add"),
    "llama": ('{"name": "get_time", "parameters": {"zone": "UTC"}}', "get_time"),
    "llama, python": ("<|python_tag|>brave_search.call(query='x')", "brave_search.call"),
    "openai": ('[{"type": "function", "name": "f", "arguments": "{}"}]', "f"),
    "pythonic": ("[get_weather(city='Paris'), get_time()]", "get_weather"),
    "one call": ("get_weather(city='Paris')\n", "get_weather"),
    "gemma": ("```tool_code\nweather.today(city='Paris')\n```", "weather.today"),
}
NO_CALLS = (
    "",
    "The weather in Paris is fine.",
    "Use print(x) to see it, or a list [a(1)] of them.",
    '{"name": "Ada", "born": 1815}',
    '{"city": "Paris", "arguments": 3}',
    "```python\nprint(1)\n```",
    "```bash\n\n```",
    "```bash",
    '<tool_call>{"name": 5}</tool_call>',
    '<tool_call>{"name": "two words"}',
    "<tool_call>",
    "f(x",
    "[f(x)",
    "(f)",
)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_recognised(name):
    text, tool = CALLS[name]
    assert guess_called_tool(text) == tool


@pytest.mark.parametrize("text", NO_CALLS)
def test_other_text_is_not_a_call(text):
    assert guess_called_tool(text) == ""


def test_tool_names_are_short_and_printable():
    rng = random.Random(5)
    pieces = [
        *"{}[]()<>\"'`:,= \n\\$#/x1é",
        "```bash\n",
        "```",
        "<tool_call>",
        '"name"',
        '{"name": "',
    ]
    pieces += ["[TOOL_CALLS]", "<function=", "f(", ")]", "arguments", "a" * 70, "```tool_code\n"]
    for _ in range(20_000):
        text = "".join(rng.choices(pieces, k=rng.randrange(24)))
        assert re.fullmatch(r"[A-Za-z0-9_.:/-]{0,64}", guess_called_tool(text)), text


PIECES = (
    *("```", "```bash", "   ```", "<tool_call>", "<tool_call>{", "<function=", '"name"', '"name":'),
    *('{"name": "', "[", "{ ", "f(", "a.", "a", "\n", " ", "\t", "(", ")", "A=b "),
)


@pytest.mark.parametrize("piece", PIECES)
def test_the_run_time_is_linear_in_the_text(piece):
    """With quadratic time these texts would take minutes."""
    text = piece * (KEPT_CHARACTERS // len(piece))
    for each in (text, f"```bash\n{text}", f"<tool_call>{text}", f"[{text}", f'{{"name"{text}'):
        assert len(guess_called_tool(each)) <= 64


class Parser:
    """A parser: text in capitals is reasoning, <…> is a call."""

    def __init__(self):
        self._text = ""

    def parse_delta(self, text):
        self._text += text
        return ()

    def parse_end(self):
        parts = []
        for word in re.findall(r"<\w+>|[^<]+", self._text):
            if word.startswith("<"):
                parts += [
                    ToolCallStart(len(parts), "call_1", word[1:-1]),
                    ToolCallArguments(0, "{}"),
                ]
            else:
                parts.append((ReasoningText if word.isupper() else ContentText)(word))
        return parts


def test_a_parser_takes_precedence():
    assert find_called_tool(Parser(), "get_time()<weather><other>") == "weather"
    assert find_called_tool(Parser(), "get_time()") == "get_time"
    assert find_called_tool(Parser(), "```BASH\nLS\n```") == ""
    assert find_called_tool(PLAIN_TEXT, "get_time()") == "get_time"


def test_the_first_choice_with_a_call_decides():
    turn = AgentTurn([Parser(), Parser(), Parser()], tenant=5)
    for tail, text in zip(turn.tails, ("no call", "a<b>", "c<d>"), strict=True):
        for character in text:
            tail.append_text(character)
    assert turn.called_tool() == tool_name("b", 5)


def test_the_tool_that_the_client_declares_wins():
    turn = AgentTurn([Parser()], tenant=0, declared_tool="pytest")
    assert turn.tails == []
    assert turn.called_tool() == "pytest"


def test_only_the_end_of_a_long_text_is_kept():
    turn = AgentTurn([PLAIN_TEXT], tenant=0)
    listen = turn.tails[0].append_text
    listen("```bash\nold\n```\n")
    for _ in range(5 * KEPT_CHARACTERS // 100):
        listen("x" * 100)
    listen("\n```bash\nnew\n```")
    assert turn.called_tool() == "new"


def test_a_turn_has_no_tool_if_the_parser_fails(caplog):
    class Broken:
        def parse_delta(self, text):
            raise ValueError(text)

    turn = AgentTurn([Broken()], tenant=0)
    turn.tails[0].append_text("secret")
    assert turn.called_tool() == ""
    assert "could not be parsed" in caplog.text
