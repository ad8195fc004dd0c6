"""The formats of calls by name, and which one a chat template speaks of.

Owns the list. A format is added here and nowhere else; proto/config.py has the names for the flag.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from api_server.outputs.tool_parsers.formats import Hermes, Llama3, Mistral, Pythonic, ToolFormat
from api_server.outputs.tool_parsers.json_parser import ARGUMENTS_MARK
from proto.config import ToolCallParser

FORMATS: Final[Mapping[ToolCallParser, ToolFormat]] = {
    "hermes": Hermes(),
    "llama3_json": Llama3(),
    "mistral": Mistral(named=False),
    "mistral_named": Mistral(named=True),
    "pythonic": Pythonic(),
}
DEFAULT: Final[ToolCallParser] = "hermes"
"""Of templates that know no tools: what is told of them in their place asks for this one."""

_SIGNS: Final[Sequence[tuple[ToolCallParser, Sequence[str]]]] = (
    ("mistral_named", ("[TOOL_CALLS]", ARGUMENTS_MARK)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('"parameters": ',)),
    ("llama3_json", ("<|python_tag|>",)),
)
"""What a template says of calls; the first that fits."""
_OTHERS: Final = (
    "<function=",
    "<arg_key>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
)
"""Signs of formats that there is no parser for."""


def format_of(
    wanted: ToolCallParser, template: str | None, *, knows_tools: bool
) -> ToolFormat | None:
    """How calls are written; None where that is not known.

    wanted: by the operator, "auto" for what the template says. knows_tools: the template reads
    the tools.
    """
    if wanted != "auto":
        return FORMATS[wanted]
    if template is None or not knows_tools:
        return FORMATS[DEFAULT]
    if any(sign in template for sign in _OTHERS):
        return None
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return None
