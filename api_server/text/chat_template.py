"""Messages to a prompt, through the model's own Jinja template.

The template comes with a model and is not trusted: it runs in a sandbox (see
template_environment.py). What it renders is what `transformers` renders of the same
messages. The caller of `render` limits its time; here no single operation can
take for ever.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proto.errors import InvalidRequestError, ModelError, shown

# What a chat template is given.


@dataclass(frozen=True, slots=True)
class Conversation:
    """The values of a template's variables.

    tools: JSON schemas of functions; documents: to answer from; None where there are none.
    add_generation_prompt: end with what an answer begins with.
    continue_final_message: end in the middle of the last message, which the answer goes on with.
    variables: more of them, by name, which win over those of the model.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


# What a chat template reads, found in its source.


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


# The sandbox that chat templates run in.


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


# A prompt that ends in the middle of its last message, so that the answer goes on with it.
#
#     messages   … {"role": "assistant", "content": "Once upon CONTINUED "}
#     rendered   <|im_start|>assistant
# Once upon CONTINUED <|im_end|>
#
#     prompt     <|im_start|>assistant
# Once upon


FIELD: Final = "continue_final_message"


def continued(
    messages: Sequence[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> str:
    """What `render` makes of the messages, up to the end of the last one's text.

    A template that trims messages drops the last blanks of that too. Raises InvalidRequestError
    where there is no text to go on with, or the template leaves out some of it.
    """
    mark = f"CONTINUED-{secrets.token_hex(16)} "
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        said = content
        last["content"] = content + mark
    elif isinstance(content, list) and any("text" in part for part in content):
        place = max(place for place, part in enumerate(content) if "text" in part)
        parts = [dict(part) for part in content]
        said = parts[place]["text"]
        parts[place]["text"] = said + mark
        last["content"] = parts
    else:
        raise InvalidRequestError("the last message has no text to go on with", FIELD)
    text = render([*messages[:-1], last])
    end = text.rfind(mark.strip())
    if end < 0 or said.strip() not in text:
        raise InvalidRequestError("the chat template leaves out some of the last message", FIELD)
    return text[:end] if text.startswith(mark, end) else text[:end].rstrip()


MAX_TEMPLATE_BYTES: Final = 1 << 20
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names that templates know a message's reasoning by; the first is the usual one."""


class ChatTemplate(Protocol):
    """source: as it was written; None where there is none. facts: what it reads."""

    @property
    def source(self) -> str | None: ...

    @property
    def facts(self) -> TemplateFacts: ...

    def render(self, conversation: Conversation) -> str:
        """The prompt; raises InvalidRequestError when the template refuses the messages."""
        ...


class NoChatTemplate:
    """For a base model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.source = None
        self.facts = TemplateFacts()

    def render(self, conversation: Conversation) -> str:
        raise InvalidRequestError(
            f"the model {self._model_name} has no chat template; use /v1/completions", "messages"
        )


class JinjaChatTemplate:
    """`variables`: the special tokens that a template may name."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = template_environment()
        try:
            self._template = environment.from_string(source)
            self.facts = facts_of(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None
        except Exception as error:  # of what it computes from constants, or how deep it is
            raise ModelError(f"chat template: {type(error).__name__}: {error}") from None
        self._variables = dict(variables)
        self.source = source

    def render(self, conversation: Conversation) -> str:
        messages = [_with_reasoning(message) for message in conversation.messages]
        if conversation.continue_final_message:
            return continued(messages, lambda marked: self._rendered(conversation, marked))
        return self._rendered(conversation, messages)

    def _rendered(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        values = {
            **self._variables,
            **conversation.variables,
            "messages": messages,
            "tools": _plain(conversation.tools),
            "documents": _plain(conversation.documents),
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"chat template: {shown(error)}", "messages") from None
        except Exception as error:  # a template is untrusted code
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
            return read_chat_template(path, variables)
    return NoChatTemplate(model_name)


def read_chat_template(path: Path, variables: Mapping[str, Any]) -> ChatTemplate:
    """Raises ModelError for a file that cannot be used."""
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes")
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat template {path}: {error}") from None
    return JinjaChatTemplate(source, variables)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message's reasoning by every name, as `transformers` 5 has it."""
    told = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if told is None:
        return dict(message)
    return {"thinking": told, **message, "reasoning_content": told}


def _plain(values: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if values is None else [dict(value) for value in values]
