"""Messages to a prompt, through the model's own Jinja template.

The template comes with a model and is not trusted: it runs in Jinja's immutable
sandbox, with the few extras that templates rely on (`raise_exception`, `tojson`,
`strftime_now`, loop controls, the `generation` block) and nothing else. How long it may
take is for whoever calls `render`; here no single operation can take for ever.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proto.errors import InvalidRequestError, ModelError, shown

MAX_TEMPLATE_BYTES: Final = 1 << 20
MAX_REPEATED: Final = 1 << 20
"""Items of what `*` makes of a string or list."""
MAX_INTEGER_BITS: Final = 4096
"""Of what `*` and `**` make of numbers."""


class ChatTemplate(Protocol):
    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt; raises InvalidRequestError when the template refuses the messages.

        add_generation_prompt: end with what an answer begins with.
        """
        ...

    @property
    def source(self) -> str | None:
        """As it was written; None where there is none."""
        ...


class NoChatTemplate:
    """For a base model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.source = None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        raise InvalidRequestError(
            f"the model {self._model_name} has no chat template; use /v1/completions", "messages"
        )


class JinjaChatTemplate:
    """`variables`: the special tokens that a template may name."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None
        except Exception as error:  # of what it computes from constants, or how deep it is
            raise ModelError(f"chat template: {type(error).__name__}: {error}") from None
        self._variables = dict(variables)
        self.source = source

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        values = {**self._variables, "messages": list(messages), "tools": None, "documents": None}
        try:
            return self._template.render(values, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"chat template: {shown(error)}", "messages") from None
        except Exception as error:  # a template is code that nobody here has read
            raise InvalidRequestError(
                f"the chat template cannot take these messages: {shown(error)}", "messages"
            ) from None


def load_chat_template(
    folders: Sequence[str], model_name: str, variables: Mapping[str, Any]
) -> ChatTemplate:
    """The template of the first folder that has one, or one that refuses."""
    for folder in folders:
        path = Path(folder, "chat_template.jinja")
        if path.is_file():
            return JinjaChatTemplate(_read(path), variables)
    return NoChatTemplate(model_name)


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: {error}") from None


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


def _environment() -> ImmutableSandboxedEnvironment:
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
