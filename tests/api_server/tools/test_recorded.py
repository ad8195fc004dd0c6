"""Recorded outputs of every format: whole, split at every character, split at random."""

import codecs
import json
import random

import pytest

from api_server.parsers.output import ContentText, ToolCallArguments
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from tests.api_server.tools.parsing import NAMES, joined, read, recorded

RECORDED = tuple(name for name in TOOL_CALL_FORMATS if name != "mistral_named")
"""mistral_named is read by the parser of mistral."""
CASES = [
    pytest.param(name, case, id=f"{name}: {case['case']}")
    for name in RECORDED
    for case in recorded(name)
]


def test_every_format_has_enough_recordings():
    for name in RECORDED:
        cases = recorded(name)
        assert len(cases) >= 20
        assert sum(case["case"].startswith("malformed") for case in cases) >= 5
        assert len({case["text"] for case in cases}) == len(cases)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_whole_outputs(name, case):
    content, calls = joined(read(name, [case["text"]]))
    found = [{"name": called, "arguments": json.loads(text)} for called, text in calls]
    assert (content, found) == (case["content"], case["calls"])


@pytest.mark.parametrize(("name", "case"), CASES)
def test_outputs_split_anywhere(name, case):
    """At every byte, by which a detokenizer returns the characters that are complete."""
    text, data = case["text"], case["text"].encode()
    whole = joined(read(name, [text]))
    assert joined(read(name, text)) == whole
    for place in range(len(data) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")()
        pieces = [decoder.decode(data[:place]), decoder.decode(data[place:], final=True)]
        assert joined(read(name, pieces)) == whole
    for seed in range(5):
        draw, pieces, place = random.Random(seed), [], 0
        while place < len(text):
            end = place + draw.randint(1, 7)
            pieces.append(text[place:end])
            place = end
        assert joined(read(name, pieces)) == whole


@pytest.mark.parametrize(("name", "case"), CASES)
def test_outputs_truncated_anywhere(name, case):
    """Every returned call is valid, even if the output ends inside the next call."""
    text = case["text"]
    for end in range(len(text)):
        content, calls = joined(read(name, [text[:end]]))
        for called, arguments in calls:
            assert isinstance(json.loads(arguments), dict)
            assert called in NAMES
        if not calls:
            assert content == text[:end]


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_truncated_calls_are_dropped(name, in_pieces):
    """Truncated anywhere, an output is the text before the calls and the complete calls."""
    said = "" if name in ("llama3_json", "pythonic") else "It is <5 [sic]. "
    expected = [
        ("weather", {"city": "Paris", "days": [1, 2]}),
        ("now", {}),
        ("find", {"text": "]"}),
    ]
    rendered = [(called, json.dumps(arguments)) for called, arguments in expected]
    text = said + TOOL_CALL_FORMATS[name].render_calls(rendered)
    for end in range(len(text) + 1):
        cut = text[:end]
        content, calls = joined(read(name, cut if in_pieces else [cut], is_cut=True))
        found = [(called, json.loads(arguments)) for called, arguments in calls]
        assert found == expected[: len(found)]
        if end > len(said):
            assert content == said.rstrip()
        else:
            held = cut.removeprefix(content)
            assert not held or text[len(content) :].startswith(held)
            assert held.strip() in ("", "<", "[")
        if end == len(text):
            assert len(found) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"answer": [1, 2], "name": "Ada"}'),
        ("llama3_json", '{"name": "Ada", "age": 36}'),
        ("llama3_json", '{"type": "invoice", "total": 5}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[nowhere, else]"),
        ("hermes", "if a < b: return <b>[x]</b>"),
        ("mistral", "[x] or [TOOL] for a[TO]"),
        ("mistral_named", "[x] or [TOOL] for a[TO]"),
        ("granite", "if a <| b: return <|tool> x"),
        ("phi4_mini", "functions fu"),
        ("hunyuan_a13b", "if a < b: return <b>[x]</b> <tool x"),
        ("deepseek_v3", "if a <｜ b"),
        ("kimi_k2", "if a <| b: return <|tool_ca x"),
        ("qwen3_coder", "if a < b: return <b>[x]</b> <function> <f>"),
        ("glm45", "if a < b: return <b>[x]</b> <arg_key>"),
    ],
)
def test_truncated_text_is_kept(name, text):
    """At most the last few characters are dropped, which may have been the start of a call."""
    for end in range(1, len(text) + 1):
        content, calls = joined(read(name, text[:end], is_cut=True))
        assert not calls
        assert text.startswith(content)
        assert end - len(content) <= 10
    assert content == text


def test_a_truncated_marker_after_other_text_is_dropped():
    text = '{"answer": 1} <|python_t'
    assert joined(read("llama3_json", [text], is_cut=True)) == ('{"answer": 1}', [])


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_rendered_calls_are_parsed(name):
    """Templates without tool support get earlier calls as this text."""
    calls = [("find", '{"text": "a \\"b\\"", "limit": 3}'), ("now", "{}")]
    content, found = joined(read(name, [TOOL_CALL_FORMATS[name].render_calls(calls)]))
    assert content == ""
    assert [(called, json.loads(text)) for called, text in found] == [
        (called, json.loads(text)) for called, text in calls
    ]


_DEEPSEEK = [
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "now"),
    *("```json", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool", "\n"),
]
PIECES = {
    "granite": ["<|tool_call|>", "<tool_call>", '{"name": "now"', "[", "]", "}", ",", "<|to"],
    "phi4_mini": ["functools", "<|tool_call|>", "<|/tool_call|>", '{"name": "now"', "[", "]", "}"],
    "hunyuan_a13b": ["<tool_calls>", "</tool_calls>", "<tool", '{"name": "now"', "[", "]", "}"],
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.", "now", ":0", "\n"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|"),
    ],
    "qwen3_coder": [
        *("<tool_call>", "<function=", "now", ">", "<parameter=", "text", "\n", "[", "</para"),
        *("</parameter>", "</function>", "</tool_call>", "find", "<"),
        *("<tool_call>\n<function=find>\n<parameter=text>\n", "\n</parameter>\n</function>"),
    ],
    "glm45": [
        *("<tool_call>", "now", "find", "\n", "<arg_key>", "text", "limit", "</arg_key>", "<arg"),
        *("<arg_value>", "</arg_value>", "</tool_call>", "["),
        *("<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    ],
    "hermes": ["<tool_call>", "</tool_call>", "<tool", '{"name": "now"', "[", "]", "}", ",", "\n"],
    "llama3_json": ["<|python_tag|>", ";", '{"name": "now"', "}", '"parameters": {', "<|", " "],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", "[", "{", "}", "]", "[TOOL", ","],
    "mistral_named": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", "{", "}", '"a": ', "[AR"],
    "pythonic": ["[", "now", "(", ")", ", ", "]", "a=", "'", '"', "\\", "<|python_start|>", "1"],
}


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_unknown_tools(name):
    """A call that is marked is a call; one that may be text has to name a tool of the request."""
    text = TOOL_CALL_FORMATS[name].render_calls([("shout", '{"text": "5"}')])
    content, calls = joined(read(name, text))
    if name in ("llama3_json", "pythonic"):
        assert (content, calls) == (text, [])
    else:
        assert (content, [called for called, _ in calls]) == ("", ["shout"])
        assert json.loads(calls[0][1]) in ({"text": "5"}, {"text": 5})  # tags have no types


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_random_text(name):
    """No exception, valid calls, and the same result for every split."""
    common = ["x", '"', "\\", "{}", '{"name": "now", "arguments": {}}', "é😀", "\x00", " ", ": "]
    for seed in range(400):
        draw = random.Random(seed)
        pieces = [draw.choice([*PIECES[name], *common]) for _ in range(draw.randint(1, 40))]
        whole = joined(read(name, ["".join(pieces)]))
        assert joined(read(name, pieces)) == whole
        assert joined(read(name, "".join(pieces))) == whole
        content, calls = joined(read(name, ["".join(pieces)], is_cut=True))
        assert joined(read(name, pieces, is_cut=True)) == (content, calls)
        assert whole[0].startswith(content)
        assert calls == whole[1][: len(calls)]
        for _, arguments in whole[1]:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_content_is_streamed_without_delay(name):
    """Arguments are returned immediately, other text once it is known to be content."""
    long = "x" * 20_000
    reading = TOOL_CALL_FORMATS[name].render_calls([("run", json.dumps({"code": long}))])
    parts = read(name, reading)
    assert [part.text for part in parts if isinstance(part, ToolCallArguments)]
    text = "Some words. " * 1000
    parts = read(name, text)
    assert sum(isinstance(part, ContentText) for part in parts) > 5000
