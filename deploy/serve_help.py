"""The text of `tokend serve --help`, read from the config Structs.

Python drops the strings under the fields, so they are read from the source.
"""

import ast
import inspect
import textwrap
import typing

from deploy.flags import Flag, all_flags
from proto import config
from proto.config import ServeConfig

_LEFT = 2
_INDENT = 30
_WIDTH = 100
_METAVARS = {"int": "N", "float": "X", "bytes": "BYTES", "str": "TEXT"}


def render() -> str:
    """Flags by section, each with its help and default."""
    helps = field_helps()
    lines = [
        "usage: tokend serve [MODEL] [flags]",
        "",
        "Serves a model over HTTP: a Hugging Face folder, a .gguf file or a packaged model.",
        *_entry(
            "--config FILE.yaml",
            "Read flags from a file (keys without the dashes); the command line goes before it.",
        ),
    ]
    flags = all_flags()
    for section, struct in typing.get_type_hints(ServeConfig).items():
        title = (struct.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"{section}: {title}"]
        for flag in flags:
            if flag.section == section:
                lines += _entry(_usage(flag), helps[flag.field] + _default(flag))
    return "\n".join(lines)


def markdown_table() -> str:
    """The same as a table for docs/configuration.md."""
    helps = field_helps()
    rows = [
        f"| `{_usage(flag).replace('|', ' ')}` | {_default_value(flag)} | {helps[flag.field]} |"
        for flag in all_flags()
    ]
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows])


def field_helps() -> dict[str, str]:
    """Help by field: the string literal that follows each field of each Struct."""
    helps = {}
    for node in ast.parse(inspect.getsource(config)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                helps[field.target.id] = " ".join(after.value.value.split())
    return helps


def _usage(flag: Flag) -> str:
    if flag.kind == "bool":
        return f"{flag.name}, {flag.negation}"
    if flag.kind == "choice":
        return f"{flag.name} {{{','.join(flag.choices)}}}"
    return f"{flag.name} {_METAVARS[flag.kind]}"


def _default(flag: Flag) -> str:
    value = _default_value(flag)
    return f" (default: {value})" if value else ""


def _default_value(flag: Flag) -> str:
    if flag.default is None:
        return ""
    return {True: "on", False: "off"}[flag.default] if flag.kind == "bool" else str(flag.default)


def _entry(usage: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, _WIDTH - _INDENT)
    head = " " * _LEFT + usage
    if len(head) + 2 <= _INDENT:
        return [head.ljust(_INDENT) + wrapped[0], *(" " * _INDENT + line for line in wrapped[1:])]
    return [head, *(" " * _INDENT + line for line in wrapped)]
