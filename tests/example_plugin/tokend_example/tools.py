"""A tool-call format: that of Hermes with other markers."""

from dataclasses import replace

from api_server.parsers.tools.registry import TOOL_CALL_FORMATS

_HERMES = TOOL_CALL_FORMATS["hermes"]
ANGLED = replace(
    _HERMES,
    name="angled",
    layout=replace(_HERMES.layout, call_begin='<<call>>\n{"name": "', call_end="}\n<</call>>"),
    markers=("<<call>>", "<</call>>"),
    openings=("<<call>>",),
    closings=("<</call>>",),
)
