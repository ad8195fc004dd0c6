"""The request of POST /v1/completions."""

from typing import Annotated, Any, Final

from pydantic import Field, WithJsonSchema

from api_server.protocol.common import GenerationRequest
from api_server.text.prompts import MAX_PROMPTS

DEFAULT_MAX_TOKENS: Final = 16


_TEXT_SCHEMA: Final = {"type": "string", "minLength": 1}
_IDS_SCHEMA: Final = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0},
}
_PROMPT_SCHEMA: Final = {
    "anyOf": [
        _TEXT_SCHEMA,
        _IDS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT_SCHEMA},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS_SCHEMA},
    ]
}


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Most output tokens; by default 16, or less when the context leaves less."""
    echo: bool = False
    """Begin each choice with its prompt; with logprobs, the prompt's tokens have them too."""
    logprobs: int | None = Field(default=None)
    """Log-probabilities of the chosen tokens, with so many alternatives (0 to 20)."""
    add_special_tokens: bool = True
    """Let the tokenizer add what it adds to every text, such as a first token."""

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each token, None for no log-probabilities."""
        return self.logprobs

    @property
    def wanted_max_tokens(self) -> int | None:
        """None: not given."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def only_echoes(self) -> bool:
        """max_tokens 0 with echo: the prompt, perhaps with its log-probabilities, and no more."""
        return self.echo and self.max_tokens == 0
