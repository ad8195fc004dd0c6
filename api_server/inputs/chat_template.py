"""Messages to a prompt, through the model's own Jinja template.

The template comes with a model and is not trusted: it runs in Jinja's immutable
sandbox, with the few extras that templates rely on (`raise_exception`, `tojson`,
`strftime_now`, loop controls, the `generation` block) and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proto.errors import InvalidRequestError, ModelError


class ChatTemplate(Protocol):
    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt; raises InvalidRequestError when the template refuses the messages."""
        ...


class NoChatTemplate:
    """For a base model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
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
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        values = {**self._variables, "messages": list(messages), "tools": None, "documents": None}
        try:
            return self._template.render(values, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"chat template: {error.message}", "messages") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise InvalidRequestError(
                f"the chat template cannot take these messages: {error}", "messages"
            ) from None


def load_chat_template(
    folders: Sequence[str], model_name: str, variables: Mapping[str, Any]
) -> ChatTemplate:
    """The template of the first folder that has one, or one that refuses."""
    for folder in folders:
        path = Path(folder, "chat_template.jinja")
        if path.is_file():
            return JinjaChatTemplate(path.read_text(encoding="utf-8"), variables)
    return NoChatTemplate(model_name)


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; shown as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
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
