"""The requests of /tokenize and /detokenize, in the format of vLLM."""

from typing import Annotated, Final

from pydantic import Field

from api_server.protocol.chat import ConversationFields
from api_server.protocol.common import Text
from api_server.protocol.fields import Neutral, Strict

MAX_DETOKENIZED: Final = 1 << 17
TOKENIZE_CHAT_NEUTRAL: Final[Neutral] = {
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


class TokenizeChat(ConversationFields):
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    add_special_tokens: bool = False
    """Let the tokenizer add what it adds to every text; most templates have done so already."""
    return_token_strs: bool = False
    """Name each token as the vocabulary spells it."""


class Detokenize(Strict):
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    tokens: Annotated[list[int], Field(fail_fast=True)]
    """Up to 131072 token ids, or as many as the context has if these are more, each below the size
    of the vocabulary."""
