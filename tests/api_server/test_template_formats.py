"""Published chat templates render like `transformers`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.fields import IgnoredFields
from api_server.text.chat_prompt import build_conversation
from api_server.text.chat_template import ChatTemplate, Conversation
from proto.errors import InvalidRequestError

TEMPLATES = {
    path.stem: path.read_text() for path in Path(__file__, "../templates").resolve().glob("*.jinja")
}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather in a <city> & "place" — naïve 天气',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "東京"]},
                    "days": {"type": "integer", "minimum": 1},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object"}},
    },
]


def call(name: str, arguments: Any, call_id: str = "abcdef123") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


WEATHER = call("weather", {"city": "Zürich", "days": 2, "note": "<b> & 'q' \"z\" 😀"})
CONVERSATIONS = {
    "one": [said("user", "Hello")],
    "turns": [
        said("system", "  Be brief.  \n"),
        said("user", 'naïve 你好 😀 <|im_end|> "quoted" & <b>'),
        said("assistant", "line\nline\n\n"),
        said("user", " \t and then? "),
    ],
    "a tool": [
        said("user", "Weather?"),
        said("assistant", "", tool_calls=[WEATHER]),
        said("tool", '{"degrees": 21.5, "sky": "clear — 晴"}', tool_call_id="abcdef123"),
    ],
    "tools and more": [
        said("system", "Use tools."),
        said("user", "Weather, and the time?"),
        said("assistant", "I look.", tool_calls=[WEATHER]),
        said("tool", "21", tool_call_id="abcdef123"),
        said("assistant", "Warm.\n"),
        said("user", "Thanks"),
    ],
    "two calls": [
        said("user", "Both?"),
        said("assistant", "", tool_calls=[WEATHER, call("now", {}, "abcdef124")]),
        said("tool", "21", tool_call_id="abcdef123"),
        said("tool", "noon", tool_call_id="abcdef124"),
    ],
    "thoughts": [
        said("user", "1+1?"),
        said("assistant", "<think>\nEasy.\n</think>\n\n2"),
        said("user", "2+2?"),
        said("assistant", "4", reasoning="Twice two."),
    ],
    "reasoning with a tool": [
        said("user", "Weather?"),
        said("assistant", "", reasoning_content="Look it up.", tool_calls=[WEATHER]),
        said("tool", "21", tool_call_id="abcdef123"),
    ],
    "to go on with": [said("user", "A story"), said("assistant", " Once upon a time ")],
    "thoughts to go on with": [said("user", "A story"), said("assistant", "<think>\nOnce")],
    "parts": [
        said("user", [{"type": "text", "text": " one "}, {"type": "text", "text": "two\n"}]),
        said("assistant", [{"type": "text", "text": "three "}]),
    ],
    "wrong order": [said("assistant", "Hello"), said("assistant", "Hello")],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "prompted": {"add_generation_prompt": True},
    "closed": {"add_generation_prompt": False},
    "continued": {"continue_final_message": True},
    "with tools": {"add_generation_prompt": True, "tools": TOOLS},
    "with documents": {
        "add_generation_prompt": True,
        "documents": [{"title": "Ö", "text": "a & b"}, {"text": "none"}],
    },
    "with variables": {
        "add_generation_prompt": True,
        "variables": {
            "enable_thinking": False,
            "tools_in_user_message": False,
            "date_string": "1 May 2025",
            "bos_token": "<own>",
            "controls": {"length": "long", "a": [1, None, {"b": 0.5}]},
        },
        "tools": TOOLS,
    },
    "thinking": {"add_generation_prompt": True, "variables": {"enable_thinking": True}},
    "built in": {
        "add_generation_prompt": True,
        "tools": TOOLS,
        "variables": {"builtin_tools": ["code_interpreter", "now"]},
    },
}


def expected(name: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """Return the text that transformers renders, None if it raises."""
    given = {key: value for key, value in options.items() if key != "variables"}
    variables = {**SPECIALS, **options.get("variables", {})}
    try:
        (text,), _ = render_jinja_template(
            conversations=[messages], chat_template=TEMPLATES[name], **given, **variables
        )
    except Exception:  # of Jinja, or of expressions in the template
        return None
    return text


@cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], SPECIALS)


def rendered(name: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    template = compiled(name)
    options = {"add_generation_prompt": False, **options}
    try:
        return template.render(Conversation(messages, **options))
    except InvalidRequestError:
        return None


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_like_transformers(name: str, option: str) -> None:
    refused = []
    for label, messages in CONVERSATIONS.items():
        before = json.dumps(messages)
        want = expected(name, messages, OPTIONS[option])
        assert rendered(name, messages, OPTIONS[option]) == want, label
        assert json.dumps(messages) == before, "the caller's messages are unchanged"
        refused.append(want is None)
    assert not all(refused)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_format_accepts_its_typical_messages(name: str) -> None:
    """So the comparison above does not only compare errors."""
    for label in ("one", "turns"):
        assert rendered(name, CONVERSATIONS[label], OPTIONS["prompted"])
    assert rendered(name, CONVERSATIONS["to go on with"], OPTIONS["continued"])
    if name not in ("chatml", "gemma3", "documents", "deepseek_r1"):
        for label in ("a tool", "tools and more"):
            text = rendered(name, CONVERSATIONS[label], OPTIONS["with tools"])
            assert text
            assert "Zürich" in text
    if name not in ("chatml", "gemma3", "documents", "deepseek_r1", "llama3"):
        assert rendered(name, CONVERSATIONS["two calls"], OPTIONS["with tools"])


@pytest.mark.parametrize(
    ("name", "knows_tools", "takes_parts"),
    [
        ("chatml", False, False),
        ("llama3", True, False),
        ("qwen2.5", True, False),
        ("qwen3", True, False),
        ("mistral", True, False),
        ("gemma3", False, True),
        ("documents", False, False),
        ("deepseek_r1", False, False),
        ("kimi_k2", True, False),
    ],
)
def test_features_of_a_template_are_detected(
    name: str, knows_tools: bool, takes_parts: bool
) -> None:
    facts = compiled(name).facts
    assert ("tools" in facts.names) is knows_tools
    assert facts.takes_parts is takes_parts
    assert not facts.needs_parts
    assert ("documents" in facts.names) is (name == "documents")
    assert ("enable_thinking" in facts.names) is (name == "qwen3")
    assert facts.renders_calls is (knows_tools or name == "deepseek_r1")
    assert facts.joins_arguments is (name == "deepseek_r1")
    assert not facts.pairs_texts


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set text = m['content'] %}"
        "{% for part in text %}{{ part.text }}{% endfor %}{% endfor %}",
        "{% macro show(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% for m in messages %}{% for part in m['content'] | selectattr('type', 'equalto', 'text')"
        " %}{{ part['text'] }}{% endfor %}{% endfor %}",
    ],
)
def test_templates_that_iterate_over_content_parts_are_detected(source: str) -> None:
    assert ChatTemplate(source, {}).facts.takes_parts


PARTS_ONLY = (
    "{% for m in messages %}{{ m['role'] | capitalize }}"
    "{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)
"""In the form of SmolVLM's, which would read the characters of a text as parts."""


CALLS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{% if call.function.arguments is mapping %}{{ call.function.arguments | tojson }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
"""Asks for the type of something else than content."""


@pytest.mark.parametrize("source", [PARTS_ONLY, CALLS + PARTS_ONLY], ids=["alone", "with-calls"])
def test_a_template_that_knows_only_parts_gets_parts(source: str) -> None:
    template = ChatTemplate(source, SPECIALS)
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "user", "content": "And?"},
    ]
    request = ChatCompletionRequest(model="m", messages=messages)
    conversation = build_conversation(request, template.facts, IgnoredFields())
    assert template.render(conversation) == "User: Hello\nAssistant: Hi\nUser: And?\n"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
        "{% for m in messages %}{% set c = m['content'] %}{% if c[0] is mapping %}"
        "{% for part in c %}{{ part.text }}{% endfor %}{% else %}{{ c }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% for part in m.content %}"
        "{{ part if part is string else part.text }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_asks_for_text_gets_text(source: str) -> None:
    facts = ChatTemplate(source, {}).facts
    assert (facts.takes_parts, facts.needs_parts) == (True, False)


@pytest.mark.parametrize(
    ("source", "pairs_texts"),
    [
        (
            "{% for m in messages %}{% if m.role == 'query' %}Q: {{ m.content }}"
            "{% elif m.role == 'document' %} D: {{ m.content }}{% endif %}{% endfor %}",
            True,
        ),
        ("{{ query }}{% for document in documents %}{{ document.text }}{% endfor %}", False),
    ],
)
def test_templates_of_rerankers_are_detected(source: str, pairs_texts: bool) -> None:
    assert ChatTemplate(source, {}).facts.pairs_texts is pairs_texts


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content }}", "{% for w in messages[0].content.split() %}{{ w }}{% endfor %}"],
)
def test_other_templates_get_text(source: str) -> None:
    assert not ChatTemplate(source, {}).facts.takes_parts


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [said("user", None)],
        [said("user", [])],
        [said("user", "Hello"), said("assistant", "<think>\na\n</think>\nb", reasoning="c")],
    ],
)
def test_an_empty_conversation_cannot_be_continued(messages: list[dict[str, Any]]) -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequestError) as caught:
        template.render(Conversation(messages, continue_final_message=True))
    assert caught.value.param == "continue_final_message"
