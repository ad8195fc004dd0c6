"""Chat templates: from messages to a prompt, through the model's own Jinja template.

A template comes with a model and is not trusted. It runs in Jinja's sandbox, in a process with
limits of time and memory (`template_process.py`); a front end only parses it. The prompt is the one
that `transformers` renders from the same messages.
"""

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proto.errors import InvalidRequestError, ModelError, shown
from proto.messages.prepared_model import CHAT_TEMPLATES, MAX_TEMPLATE_BYTES, read_model_file

OUTER_EFFORTS: Final = {"minimal", "xhigh", "max"}
"""Efforts beyond low, medium and high, which few templates know."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template.

    tools: JSON schemas of functions. documents: texts to answer from.
    add_generation_prompt: end the prompt with the start of an answer.
    continue_final_message: end the prompt inside the last message, which the answer continues.
    variables: further variables by name; they override those of the model.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


# What a chat template reads, found in its syntax tree.


PAIR_ROLES: Final = ("query", "document")
"""Roles of the messages from which a reranker's template makes a prompt."""
_CALL_ID_FIELDS: Final = ("id", "tool_call_id")


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template reads.

    names: of its undeclared variables. takes_parts: it iterates over the content parts of a
    message; without that, content must be text. needs_parts: and it never asks whether content is
    a text, of which it would read the characters as parts. takes_images: and some of them are
    images. call_id_length: length that the id of a
    tool call must have, in characters; 0 for any. efforts: of OUTER_EFFORTS, those that it
    mentions. renders_calls: it reads the calls of a message. joins_arguments: it appends the
    arguments of a call to text, so they must be text. pairs_texts: it mentions the roles of both
    messages that a reranker reads, the query and a document.
    """

    names: frozenset[str] = frozenset()
    takes_parts: bool = False
    needs_parts: bool = False
    takes_images: bool = False
    call_id_length: int = 0
    efforts: frozenset[str] = frozenset()
    renders_calls: bool = False
    joins_arguments: bool = False
    pairs_texts: bool = False


def template_facts(template: nodes.Template) -> TemplateFacts:
    strings = {constant.value for constant in template.find_all(nodes.Const)}
    takes_parts = any(_content_loops(template))
    return TemplateFacts(
        names=frozenset(meta.find_undeclared_variables(template)),
        takes_parts=takes_parts,
        needs_parts=takes_parts and not _asks_for_text(template),
        takes_images=takes_parts and "image" in strings,
        call_id_length=_call_id_length(template),
        efforts=frozenset(OUTER_EFFORTS & strings),
        renders_calls=any(
            _is_member(node, ("tool_calls",))
            for node in template.find_all((nodes.Getattr, nodes.Getitem))
        ),
        joins_arguments=any(
            _is_member(side, ("arguments",))
            for joined in template.find_all(nodes.Add)
            for side in (joined.left, joined.right)
        ),
        pairs_texts=set(PAIR_ROLES) <= strings,
    )


def _content_loops(template: nodes.Template) -> Iterator[nodes.For]:
    """Yield the loops of a template over `message.content`, directly or through a variable.

    Examples: `{% for part in message['content'] %}`; `{% set content = message.content %}` and
    then `{% for part in content %}`; the same in a macro with a parameter `content`; the same
    through a filter, as `message['content'] | selectattr('type', 'equalto', 'text')`.
    """
    variables = _content_variables(template)
    for loop in template.find_all(nodes.For):
        if _is_content(_unfiltered(loop.iter), variables):
            yield loop


def _content_variables(template: nodes.Template) -> set[str]:
    variables = {"content"}
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, variables):
            variables.add(assignment.target.name)
    return variables


def _unfiltered(node: nodes.Node | None) -> nodes.Node | None:
    """Return what filters that choose parts of a list are applied to."""
    while isinstance(node, nodes.Filter) and node.name in ("selectattr", "rejectattr", "list"):
        node = node.node
    return node


def _asks_for_text(template: nodes.Template) -> bool:
    """Return whether a template asks for the type of a content, or of one of its parts.

    A test of something else, as of a call's arguments, says nothing about content.
    """
    variables = _content_variables(template)
    for loop in _content_loops(template):
        variables |= {name.name for name in loop.target.find_all(nodes.Name)}
        if isinstance(loop.target, nodes.Name):
            variables.add(loop.target.name)
    return any(
        test.name in ("string", "sequence", "iterable", "mapping")
        and _is_content(_whole(test.node), variables)
        for test in template.find_all(nodes.Test)
    )


def _whole(node: nodes.Node) -> nodes.Node | None:
    """Return the list of which an expression is one part: `content` of `content[0]`."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.node if isinstance(node.arg.value, int) else node
    return _unfiltered(node)


def _call_id_length(template: nodes.Template) -> int:
    """Return the number with which a template compares the length of a tool call's id, or 0."""
    for comparison in template.find_all(nodes.Compare):
        measured, compared = comparison.expr, comparison.ops[0].expr
        if (
            isinstance(measured, nodes.Filter)
            and measured.name == "length"
            and _is_member(measured.node, _CALL_ID_FIELDS)
            and isinstance(compared, nodes.Const)
            and isinstance(compared.value, int)
            and comparison.ops[0].op in ("ne", "eq")
        ):
            return compared.value
    return 0


def _is_member(node: nodes.Node | None, names: Sequence[str]) -> bool:
    """Return whether an expression is a member of one of these names, of anything."""
    if isinstance(node, nodes.Getattr):
        return node.attr in names
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value in names
    return False


def _is_content(node: nodes.Node | None, variables: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in variables
    return _is_member(node, ("content",))


# The sandbox that chat templates run in.


MAX_REPEATED: Final = 1 << 20
"""Most items of a repeated string or list."""
MAX_INTEGER_BITS: Final = 4096
"""Most bits of a product or power."""


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks text for training and changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that also limits the results of `*` and `**`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _result_bits(operator, left, right) > MAX_INTEGER_BITS:
            raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _result_bits(operator: str, left: Any, right: Any) -> int:
    """Return the bits of a numeric result; for a repetition, its items scaled to the same limit."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * max(0, right)
        return left.bit_length() + right.bit_length()
    items, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(times, int) and isinstance(items, str | list | tuple):
        return len(items) * times * MAX_INTEGER_BITS // MAX_REPEATED
    return 0


class ParsingEnvironment(BoundedEnvironment):
    """An environment that evaluates nothing of a template, not even constants.

    Jinja evaluates operators, filters and tests of constants wherever it reads a syntax tree.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__()
        self.filters = dict.fromkeys([*self.filters, "tojson"], _not_evaluated)
        self.tests = dict.fromkeys(self.tests, _not_evaluated)


def _not_evaluated(*arguments: Any, **named: Any) -> NoReturn:
    raise nodes.Impossible


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return a new environment, so that templates share nothing."""
    environment = BoundedEnvironment()
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
    """Filter `tojson` without the HTML escapes of Jinja's own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# A prompt that ends inside its last message, so that the answer continues the message. A marker in
# the rendered text shows where to cut:
#
#     messages   … {"role": "assistant", "content": "Once upon CONTINUED "}
#     rendered   <|im_start|>assistant\nOnce upon CONTINUED <|im_end|>\n
#     prompt     <|im_start|>assistant\nOnce upon


CONTINUE_FIELD: Final = "continue_final_message"
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read a message's reasoning; the first is the usual one."""


class TemplateError(InvalidRequestError):
    """The chat template refuses the messages, or cannot render them."""


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON; as they are if they are no JSON but text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class ChatTemplate:
    """A model's chat template, which is compiled when it first renders.

    source: of the template in Jinja. variables: the special tokens that a template may name.
    facts: what the template reads.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        with _template_errors():
            self.facts = template_facts(ParsingEnvironment().parse(source))
        self.variables = dict(variables)
        self.source = source
        self._template: jinja2.Template | None = None

    def compile(self) -> jinja2.Template:
        """Return the compiled template; raise ModelError if it cannot be compiled."""
        if self._template is None:
            with _template_errors():
                self._template = template_environment().from_string(self.source)
        return self._template

    def render(self, conversation: Conversation) -> str:
        """Return the prompt; raise TemplateError if the template refuses the messages."""
        self.compile()
        messages = [_with_reasoning(message) for message in conversation.messages]
        if conversation.continue_final_message:
            return self._render_until_last_text(conversation, messages)
        return self._render_messages(conversation, messages)

    def _render_until_last_text(
        self, conversation: Conversation, messages: list[dict[str, Any]]
    ) -> str:
        """Return the prompt up to the end of the last message's text.

        If the template trims messages, trailing whitespace of that text is dropped too. Raises
        InvalidRequestError if there is no such text, or if the template leaves out some of it.
        """
        marker = f"CONTINUED-{secrets.token_hex(16)} "
        last = dict(messages[-1]) if messages else {}
        content = last.get("content")
        if isinstance(content, str):
            last_text = content
            last["content"] = content + marker
        elif isinstance(content, list) and any("text" in part for part in content):
            index = max(index for index, part in enumerate(content) if "text" in part)
            parts = [dict(part) for part in content]
            last_text = parts[index]["text"]
            parts[index]["text"] = last_text + marker
            last["content"] = parts
        else:
            raise InvalidRequestError("the last message has no text to go on with", CONTINUE_FIELD)
        text = self._render_messages(conversation, [*messages[:-1], last])
        end = text.rfind(marker.strip())
        if end < 0 or last_text.strip() not in text:
            raise InvalidRequestError(
                "the chat template leaves out some of the last message", CONTINUE_FIELD
            )
        return text[:end] if text.startswith(marker, end) else text[:end].rstrip()

    def _render_messages(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        values = {
            **self.variables,
            **conversation.variables,
            "messages": messages,
            "tools": _as_dicts(conversation.tools),
            "documents": _as_dicts(conversation.documents),
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            return self.compile().render(values)
        except MemoryError:
            raise
        except Exception as error:  # a template is untrusted code
            reason = shown(error)
            if path := self._unrenderable_arguments(values):
                raise InvalidRequestError(
                    f"{path} is not a JSON object, and the model's chat template cannot render it: "
                    f"{reason}",
                    "messages",
                ) from None
            what = "chat template"
            if not isinstance(error, jinja2.TemplateError):
                what = "the chat template cannot take these messages"
            raise TemplateError(f"{what}: {reason}", "messages") from None

    def _unrenderable_arguments(self, values: Mapping[str, Any]) -> str | None:
        """Return the path of the first arguments that are no JSON object.

        None if there are none, or if the template fails with empty objects in their place, too.
        """
        places = []
        messages = []
        for index, message in enumerate(values["messages"]):
            calls = []
            for number, call in enumerate(message.get("tool_calls") or ()):
                function = call["function"]
                if not isinstance(function["arguments"], dict):
                    places.append(f"messages[{index}].tool_calls[{number}].function.arguments")
                    call = {**call, "function": {**function, "arguments": {}}}
                calls.append(call)
            messages.append({**message, "tool_calls": calls} if calls else message)
        if places:
            with contextlib.suppress(Exception):
                self.compile().render({**values, "messages": messages})
                return places[0]
        return None


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """Turn errors of parsing or compiling a template into a ModelError."""
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None
    except MemoryError:
        raise
    except Exception as error:  # from computed constants, or from deep nesting
        raise ModelError(f"chat template: {type(error).__name__}: {shown(error)}") from None


def find_chat_templates(
    folders: Sequence[str], variables: Mapping[str, Any]
) -> dict[str, ChatTemplate]:
    """Return the templates of the first folder that has any, by their names in CHAT_TEMPLATES."""
    for folder in folders:
        paths = {name: Path(folder, file) for name, file in CHAT_TEMPLATES.items()}
        found = {
            name: read_chat_template(path, variables)
            for name, path in paths.items()
            if path.exists()
        }
        if found:
            return found
    return {}


def read_chat_template(path: Path, variables: Mapping[str, Any]) -> ChatTemplate:
    """Return the template of a file; raise ModelError if it cannot be used."""
    try:
        source = read_model_file(path, MAX_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat template {path}: {error}") from None
    return ChatTemplate(source, variables)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under every usual name, as in `transformers` 5."""
    given = [message[name] for name in _REASONING_FIELDS if message.get(name) is not None]
    if not given:
        return dict(message)
    return {"thinking": given[0], **message, "reasoning_content": given[0]}


def _as_dicts(values: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if values is None else [dict(value) for value in values]
