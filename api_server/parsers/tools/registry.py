"""The tool-call formats by name, and detection of a model's format from its chat template.

    hermes         <tool_call>\n{"name": "find", "arguments": {…}}\n</tool_call>        Hermes, Qwen
    llama3_json    {"name": "find", "parameters": {…}}; {…}                               Llama 3
    mistral        [TOOL_CALLS] [{"name": "find", "arguments": {…}}, …]              Mistral, Nemo
    mistral_named  [TOOL_CALLS]find[ARGS]{…}                                         newer Mistral
    granite        <|tool_call|>[{"name": "find", "arguments": {…}}, …]                  Granite 3
    phi4_mini      <|tool_call|>[{"name": "find", "arguments": {…}}]<|/tool_call|>      Phi-4-mini
    hunyuan_a13b   <tool_calls>[{"name": "find", "arguments": {…}}]</tool_calls>           Hunyuan
    deepseek_v3    function<｜tool▁sep｜>find\n```json\n{…}\n```, in its markers   DeepSeek V3, R1
    deepseek_v31   find<｜tool▁sep｜>{…}, in its markers                             DeepSeek V3.1
    kimi_k2        functions.find:0<|tool_call_argument_begin|>{…}, in its markers         Kimi K2
    qwen3_coder    <tool_call>\n<function=find>\n<parameter=text>\na\n</parameter>…    Qwen3-Coder
    glm45          <tool_call>find\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>…     GLM-4.5
    pythonic       [find(text="a"), …]                                                Llama 4, 3.2

A new format is an entry of `TOOL_CALL_FORMATS`, or a class derived from `ToolCallFormat` for a new
kind. Formats of other than text, such as messages on channels, have no parser here;
their templates are refused by `UNSUPPORTED_MARKERS`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from api_server.parsers.tools.base import INDEX, NAME, CallLayout, ToolCallFormat
from api_server.parsers.tools.json_calls import CALL_ID, TOOL_ID, JsonCallFormat
from api_server.parsers.tools.pythonic import CLOSING, OPENING, PythonicFormat
from api_server.parsers.tools.tagged import ParameterLayout, TaggedCallFormat
from proto.errors import ConfigError
from proto.runtime.plugins import load_part
from proto.settings.config import PARTS

_OBJECT: Final = CallLayout(
    call_begin='{"name": "', name_end='", "arguments": ', call_end="}", between=", "
)
"""A call as a JSON object in a list."""

_MISTRAL: Final = JsonCallFormat(
    name="mistral",
    layout=replace(_OBJECT, begin="[TOOL_CALLS] [", end="]"),
    markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    template_markers=(("[TOOL_CALLS]",),),
    openings=("[TOOL_CALLS]",),
    header=(NAME, ("[CALL_ID]", CALL_ID), ("[ARGS]",)),
)
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_V31: Final = JsonCallFormat(
    name="deepseek_v31",
    layout=CallLayout(_CALLS, _CALL, _SEPARATOR, _CALL_END, end=_CALLS_END),
    markers=(_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END),
    template_markers=((_CALLS,),),
    openings=(_CALLS, _CALL),
    closings=(_CALLS_END,),
    call_closings=("```", _CALL_END),
    call_opening=_CALL,
    header=((f"function{_SEPARATOR}",), NAME, (_SEPARATOR,), ("```json",)),
)

_FORMATS: Final[tuple[ToolCallFormat, ...]] = (
    TaggedCallFormat(
        name="qwen3_coder",
        layout=CallLayout(
            call_begin="<tool_call>\n<function=",
            name_end=">\n",
            call_end="</function>\n</tool_call>",
            between="\n",
        ),
        markers=("<tool_call>", "</tool_call>"),
        template_markers=(("<function=", "<parameter="),),
        parameter=ParameterLayout("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    TaggedCallFormat(
        name="glm45",
        layout=CallLayout(
            call_begin="<tool_call>", name_end="\n", call_end="</tool_call>", between="\n"
        ),
        markers=(
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
        template_markers=(("<arg_key>", "<arg_value>"),),
        parameter=ParameterLayout("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    replace(
        _DEEPSEEK_V31,
        name="deepseek_v3",
        layout=replace(
            _DEEPSEEK_V31.layout,
            call_begin=f"{_CALL}function{_SEPARATOR}",
            name_end="\n```json\n",
            call_end=f"\n```{_CALL_END}",
            between="\n",
        ),
        template_markers=((_CALLS, "```json"),),
    ),
    _DEEPSEEK_V31,
    JsonCallFormat(
        name="kimi_k2",
        layout=CallLayout(
            begin="<|tool_calls_section_begin|>",
            call_begin="<|tool_call_begin|>functions.",
            name_end=f":{INDEX}<|tool_call_argument_begin|>",
            call_end="<|tool_call_end|>",
            end="<|tool_calls_section_end|>",
        ),
        markers=(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        template_markers=(("<|tool_calls_section_begin|>",), ("<|im_middle|>", "tool_declare")),
        call_id=f"functions.{NAME}:{INDEX}",
        openings=(
            *("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
            "<|tool_call_begin|>",
        ),
        closings=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        call_closings=("<|tool_call_end|>",),
        call_opening="<|tool_call_begin|>",
        header=(TOOL_ID, ("<|tool_call_argument_begin|>",)),
    ),
    JsonCallFormat(
        name="phi4_mini",
        layout=replace(_OBJECT, begin="<|tool_call|>[", end="]<|/tool_call|>"),
        markers=("<|tool_call|>", "<|/tool_call|>"),
        template_markers=(("<|/tool_call|>",), ("<|tool|>",), ("functools[",)),
        openings=("<|tool_call|>",),
        closings=("<|/tool_call|>",),
        start="functools",
    ),
    JsonCallFormat(
        name="granite",
        layout=replace(_OBJECT, begin="<|tool_call|>[", end="]"),
        markers=("<|tool_call|>",),
        template_markers=(("<|tool_call|>",), ("<|start_of_role|>available_tools",)),
        openings=("<|tool_call|>", "<tool_call>"),
        closings=("</tool_call>",),
    ),
    JsonCallFormat(
        name="hunyuan_a13b",
        layout=replace(_OBJECT, begin="<tool_calls>[", end="]</tool_calls>"),
        markers=("<tool_calls>", "</tool_calls>"),
        template_markers=(("<tool_calls>",),),
        openings=("<tool_calls>", "<tool_call>"),
        closings=("</tool_calls>", "</tool_call>"),
    ),
    replace(
        _MISTRAL,
        name="mistral_named",
        layout=CallLayout(call_begin="[TOOL_CALLS]", name_end="[ARGS]"),
        template_markers=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    _MISTRAL,
    JsonCallFormat(
        name="hermes",
        layout=replace(
            _OBJECT,
            call_begin='<tool_call>\n{"name": "',
            call_end="}\n</tool_call>",
            between="\n",
        ),
        markers=("<tool_call>", "</tool_call>"),
        template_markers=(("<tool_call>",),),
        openings=("<tool_call>", "<tool_calls>"),
        closings=("</tool_call>", "</tool_calls>"),
    ),
    PythonicFormat(
        name="pythonic",
        layout=CallLayout(begin="[", name_end="(", call_end=")", between=", ", end="]"),
        markers=(OPENING, CLOSING),
        template_markers=((OPENING,), ("[func_name1(",)),
        free_text=r"/([ \n]*([^ \n\r\t\[<]|<[^|])[\s\S]*)?/",
    ),
    JsonCallFormat(
        name="llama3_json",
        layout=replace(_OBJECT, name_end='", "parameters": ', between="; "),
        markers=("<|python_tag|>",),
        template_markers=(('"parameters": ',), ("<|python_tag|>",)),
        optional_opening="<|python_tag|>",
        free_text=r"/([ \n]*([^ \n\r\t{<]|<[^|])([^<]|<[^|])*)?/",
        openings=("<|python_tag|>",),
        may_start_answer=True,
    ),
)

TOOL_CALL_FORMATS: Final[Mapping[str, ToolCallFormat]] = {each.name: each for each in _FORMATS}
"""Name → format, in the order in which templates are compared with them: templates of formats that
stand first contain markers of later ones as well."""

DEFAULT_FORMAT: Final = TOOL_CALL_FORMATS["hermes"]
"""For chat templates without tools: the text that describes the tools asks for this format."""

UNSUPPORTED_MARKERS: Final = (
    *("<function=", "<|channel|>", "｜DSML｜", "<minimax:tool_call>", "<seed:tool_call>"),
)
"""Strings in chat templates of formats that have no entry. A template with one of them is unknown,
although it may contain markers of other formats, unless the string is a marker of its format."""


def tool_call_format(
    name: str, template: str | None, *, template_has_tools: bool
) -> ToolCallFormat | None:
    """Return the format in which a model writes calls, or None if it is unknown.

    name: value of --tool-call-parser; "auto" detects the format from the source of the chat
    template. template_has_tools: the template renders tools. Raises ConfigError for a format from
    outside that cannot be loaded.
    """
    if name in PARTS["tool_call_parser"][1] and name != "auto":
        return TOOL_CALL_FORMATS.get(name)  # "harmony" is in api_server/parsers/harmony.py
    if name != "auto":
        return outside_format(name)
    if template is None:
        return DEFAULT_FORMAT
    unsupported = {marker for marker in UNSUPPORTED_MARKERS if marker in template}
    for tool_format in TOOL_CALL_FORMATS.values():
        for group in tool_format.template_markers:
            if all(marker in template for marker in group) and unsupported <= {*group}:
                return tool_format
    return None if template_has_tools else DEFAULT_FORMAT


def outside_format(name: str) -> ToolCallFormat:
    """Return a format from outside: a ToolCallFormat. Raises ConfigError."""
    field = "tool_call_parser"
    found = load_part("tool_parser", name, field)
    if not isinstance(found, ToolCallFormat):
        raise ConfigError(f"{field}: {name} is no ToolCallFormat", field)
    return found
