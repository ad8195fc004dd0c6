"""The guess at which tool an answer calls, from its text alone."""

import random
import re

import pytest

from api_server.parsers.called_tool import KEPT_CHARACTERS, AgentTurn, called_tool, tool_of
from api_server.parsers.parts import PLAIN_TEXT, CallArguments, CallBegins, Content, Reasoning

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
def test_a_call_is_seen(name):
    text, tool = CALLS[name]
    assert called_tool(text) == tool


@pytest.mark.parametrize("text", NO_CALLS)
def test_other_text_calls_nothing(text):
    assert called_tool(text) == ""


def test_any_text_gives_a_short_plain_name():
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
        assert re.fullmatch(r"[A-Za-z0-9_.:/-]{0,64}", called_tool(text)), text


PIECES = (
    *("```", "```bash", "   ```", "<tool_call>", "<tool_call>{", "<function=", '"name"', '"name":'),
    *('{"name": "', "[", "{ ", "f(", "a.", "a", "\n", " ", "\t", "(", ")", "A=b "),
)


@pytest.mark.parametrize("piece", PIECES)
def test_the_work_grows_with_the_text_alone(piece):
    """Of anything else, so much of a piece would take minutes."""
    text = piece * (KEPT_CHARACTERS // len(piece))
    for each in (text, f"```bash\n{text}", f"<tool_call>{text}", f"[{text}", f'{{"name"{text}'):
        assert len(called_tool(each)) <= 64


class Parser:
    """Text in capitals is thought, <…> is a call."""

    def __init__(self):
        self._text = ""

    def feed(self, text):
        self._text += text
        return ()

    def end(self):
        parts = []
        for word in re.findall(r"<\w+>|[^<]+", self._text):
            if word.startswith("<"):
                parts += [CallBegins(len(parts), "call_1", word[1:-1]), CallArguments(0, "{}")]
            else:
                parts.append((Reasoning if word.isupper() else Content)(word))
        return parts


def test_a_parser_knows_better():
    assert tool_of(Parser(), "get_time()<weather><other>") == "weather"
    assert tool_of(Parser(), "get_time()") == "get_time"
    assert tool_of(Parser(), "```BASH\nLS\n```") == ""
    assert tool_of(PLAIN_TEXT, "get_time()") == "get_time"


def test_the_first_choice_that_calls_one_tells():
    turn = AgentTurn(Parser, str.upper)
    for text in ("no call", "a<b>", "c<d>"):
        listen = turn.listener()
        for character in text:
            listen(character)
    assert turn.tool() == "B"


def test_of_a_long_text_the_end_is_kept():
    turn = AgentTurn(lambda: PLAIN_TEXT, str)
    listen = turn.listener()
    listen("```bash\nold\n```\n")
    for _ in range(5 * KEPT_CHARACTERS // 100):
        listen("x" * 100)
    listen("\n```bash\nnew\n```")
    assert turn.tool() == "new"


def test_a_parser_that_fails_is_a_turn_without_a_tool(caplog):
    class Broken:
        def feed(self, text):
            raise ValueError(text)

    turn = AgentTurn(Broken, str)
    turn.listener()("secret")
    assert turn.tool() == ""
    assert "not understood" in caplog.text
