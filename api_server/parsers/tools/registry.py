"""The tool-call formats by name, and detection of a model's format from its chat template.

    hermes         <tool_call>\n{"name": "find", "arguments": {…}}\n</tool_call>     Hermes, Qwen
    llama3_json    {"name": "find", "parameters": {…}}; {…}                            Llama 3
    mistral        [TOOL_CALLS] [{"name": "find", "arguments": {…}}, …]                Mistral, Nemo
    mistral_named  [TOOL_CALLS]find[ARGS]{…}                                           newer Mistral
    pythonic       [find(text="a"), …]                                                 Llama 4, 3.2

A new format is a class derived from `ToolCallFormat` and a line in `TOOL_CALL_FORMATS`.
"""

from collections.abc import Mapping
from typing import Final

from api_server.parsers.tools.base import ToolCallFormat
from api_server.parsers.tools.json_calls import Hermes, Llama3Json, Mistral, MistralNamed
from api_server.parsers.tools.pythonic import Pythonic
from proto.config import ToolCallParser

TOOL_CALL_FORMATS: Final[Mapping[ToolCallParser, ToolCallFormat]] = {
    tool_format.name: tool_format
    for tool_format in (
        MistralNamed(),  # before mistral, whose marker its templates contain as well
        Mistral(),
        Hermes(),
        Pythonic(),
        Llama3Json(),
    )
}
"""Name → format, in the order in which templates are compared with them."""

DEFAULT_FORMAT: Final = TOOL_CALL_FORMATS["hermes"]
"""For chat templates without tools: the text that describes the tools asks for this format."""

UNSUPPORTED_MARKERS: Final = (
    "<function=",
    "<arg_key>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
)
"""Strings in chat templates of formats that have no class yet. Some of these templates contain
markers of other formats too, so they are looked for first."""


def tool_call_format(
    name: ToolCallParser, template: str | None, *, template_has_tools: bool
) -> ToolCallFormat | None:
    """Return the format in which a model writes calls, or None if it is unknown.

    name: value of --tool-call-parser; "auto" detects the format from the source of the chat
    template. template_has_tools: the template renders tools.
    """
    if name != "auto":
        return TOOL_CALL_FORMATS.get(name)  # "harmony" is in api_server/parsers/harmony.py
    if template is None or not template_has_tools:
        return DEFAULT_FORMAT
    if any(marker in template for marker in UNSUPPORTED_MARKERS):
        return None
    for tool_format in TOOL_CALL_FORMATS.values():
        for group in tool_format.template_markers:
            if all(marker in template for marker in group):
                return tool_format
    return None
