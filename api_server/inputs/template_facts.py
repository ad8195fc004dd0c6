"""What a chat template reads, found in its source.

Owns nothing. A template is not run for it: whether a loop would end is unknown.
"""

from dataclasses import dataclass
from typing import Final

from jinja2 import meta, nodes

_IDS: Final = ("id", "tool_call_id")


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """names: of the variables that it expects from outside.

    takes_parts: it goes through the parts of a message's content, which may be a list; one that
    does not can only take text. call_id_length: characters that the id of a tool call must have;
    0 for any.
    """

    names: frozenset[str] = frozenset()
    takes_parts: bool = False
    call_id_length: int = 0


def facts_of(template: nodes.Template) -> TemplateFacts:
    """Of a template as it was parsed."""
    names = frozenset(meta.find_undeclared_variables(template))
    return TemplateFacts(names, _goes_through_content(template), _call_id_length(template))


def _goes_through_content(template: nodes.Template) -> bool:
    """Whether a loop is over `message.content`, or over a variable or parameter that holds it.

    `{% for part in message['content'] %}`, `{% set content = message.content %}` and then
    `{% for part in content %}`, or that in a macro with a parameter `content`.
    """
    holders = {"content"}
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, holders):
            holders.add(assignment.target.name)
    return any(_is_content(loop.iter, holders) for loop in template.find_all(nodes.For))


def _call_id_length(template: nodes.Template) -> int:
    """With what `tool_call.id|length` or `message.tool_call_id|length` is compared."""
    for each in template.find_all(nodes.Compare):
        measured, compared = each.expr, each.ops[0].expr
        if (
            isinstance(measured, nodes.Filter)
            and measured.name == "length"
            and _is_id(measured.node)
            and isinstance(compared, nodes.Const)
            and isinstance(compared.value, int)
            and each.ops[0].op in ("ne", "eq")
        ):
            return compared.value
    return 0


def _is_id(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr in _IDS
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value in _IDS
    return False


def _is_content(node: nodes.Node, holders: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in holders
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
