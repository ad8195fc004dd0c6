"""Tools told to a model whose chat template knows none.

    system      You are helpful.            system      You are helpful.
                                                        # Tools … one JSON object a line …
    user        Is it cold?                 user        Is it cold?
    assistant   calls weather          ─▶   assistant   <tool_call>{"name": "weather", …
    tool        3 degrees                   user        <tool_response>3 degrees</tool_response>

A template that does not read the tools would leave them out, and the model could not know what to
call; nor would it show what was called before. So they become text of messages that every template
has, in the form that the parser reads. Owns those words, which are like the ones that the templates
of Hermes and Qwen have.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from api_server.inputs.conversation import Conversation
from api_server.outputs.tool_parsers.formats import ToolFormat

Message = dict[str, Any]


def with_told_tools(conversation: Conversation, written: ToolFormat) -> Conversation:
    """The conversation with tools, calls and answers to them as text. written: how calls are."""
    messages: list[Message] = []
    role = ""
    for message in conversation.messages:
        if message["role"] != "tool":
            messages.append(_with_calls(message, written))
        elif role == "tool":  # answers to calls that were made together are one message
            messages[-1]["content"] += f"\n{_response(message)}"
        else:
            messages.append({"role": "user", "content": _response(message)})
        role = message["role"]
    if conversation.tools:
        messages = _with_tools(messages, conversation.tools, written)
    return replace(conversation, messages=messages, tools=None)


def _with_tools(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], written: ToolFormat
) -> list[Message]:
    """In the system message, which becomes the first one where there is none."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = written.written([("function-name", '{"argument-name": "value"}')])
    told = (
        "# Tools\n\nYou may call one or more functions. Their signatures are within <tools> and "
        f"</tools>:\n<tools>\n{lines}\n</tools>\n\nTo call a function answer with:\n{example}"
    )
    if messages and messages[0]["role"] in ("system", "developer"):
        first, *rest = messages
        return [{**first, "content": f"{_text(first['content'])}\n\n{told}"}, *rest]
    return [{"role": "system", "content": told}, *messages]


def _with_calls(message: Mapping[str, Any], written: ToolFormat) -> Message:
    """What was called is a part of what was said."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    called = [call["function"] for call in calls]
    pairs = [(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in called]
    said = [text for text in (_text(message["content"]), written.written(pairs)) if text]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(said)}


def _response(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{_text(message['content'])}\n</tool_response>"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
