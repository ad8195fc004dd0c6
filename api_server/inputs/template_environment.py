"""The sandbox that chat templates run in.

Owns the few extras that templates rely on (`raise_exception`, `tojson`, `strftime_now`, loop
controls, the `generation` block), as `transformers` has them, and what no operation may do.
"""

import json
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REPEATED: Final = 1 << 20
"""Items of what `*` makes of a string or list."""
MAX_INTEGER_BITS: Final = 4096
"""Of what `*` and `**` make of numbers."""


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; shown as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, where `*` and `**` make nothing enormous.

    One such operation is one instruction, which nothing can interrupt. Intercepted
    operators are not computed when the template is compiled either.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size_of(operator, left, right) > MAX_INTEGER_BITS:
            raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _size_of(operator: str, left: Any, right: Any) -> int:
    """Bits of the result; of a repetition its items, in proportion to what is allowed."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * max(0, right)
        return left.bit_length() + right.bit_length()
    items, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(times, int) and isinstance(items, str | list | tuple):
        return len(items) * times * MAX_INTEGER_BITS // MAX_REPEATED
    return 0


def template_environment() -> ImmutableSandboxedEnvironment:
    """One for each template; nothing is shared between them."""
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
