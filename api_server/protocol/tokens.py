"""The requests of /tokenize and /detokenize; their shapes are those of vLLM."""

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, FailFast, Field

from api_server.protocol.chat import Message, message_fields, not_too_many
from api_server.protocol.common import Strict, Text
from api_server.protocol.tools import ToolFields

TOKENIZE_CHAT_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}


class TokenizeText(Strict):
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    prompt: str
    """The text; it may be empty, and longer than the context."""
    add_special_tokens: bool = True
    """Let the tokenizer add what it adds to every text, such as a first token."""
    return_token_strs: bool = False
    """Name each token as the vocabulary spells it."""


class TokenizeChat(ToolFields, Strict):
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    messages: Annotated[
        list[Annotated[Message, BeforeValidator(message_fields)]],
        FailFast(),
        Field(min_length=1),
        BeforeValidator(not_too_many),
    ]
    """The conversation, at most 4096 messages."""
    add_generation_prompt: bool = True
    """End with what an answer begins with; false with continue_final_message."""
    continue_final_message: bool = False
    """End in the middle of the last message, which is not closed."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template; those that it does not know are ignored."""
    documents: list[dict[str, Any]] = []
    """Texts to answer from, for templates that know documents."""
    add_special_tokens: bool = False
    """Let the tokenizer add what it adds to every text; the template has most often done it."""
    return_token_strs: bool = False
    """Name each token as the vocabulary spells it."""


class Detokenize(Strict):
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    tokens: Annotated[list[int], FailFast()]
    """Token ids, each below the size of the vocabulary."""
