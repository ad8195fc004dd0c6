"""The request of POST /v1/completions."""

from typing import Any, Final

from pydantic import Field

from api_server.protocol.common import GenerationRequest

DEFAULT_MAX_TOKENS: Final = 16


class CompletionRequest(GenerationRequest):
    prompt: Any
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
