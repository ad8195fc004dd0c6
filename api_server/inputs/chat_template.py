"""Messages to a prompt, through the model's own Jinja template.

The template comes with a model and is not trusted: it runs in a sandbox (see
template_environment.py). What it renders is what `transformers` renders of the same
messages. How long it may take is for whoever calls `render`; here no single operation can
take for ever.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import jinja2

from api_server.inputs.continuation import continued
from api_server.inputs.conversation import Conversation
from api_server.inputs.template_environment import template_environment
from api_server.inputs.template_facts import TemplateFacts, facts_of
from proto.errors import InvalidRequestError, ModelError, shown

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
