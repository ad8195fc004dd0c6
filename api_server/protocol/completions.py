"""The request of POST /v1/completions."""

from typing import Annotated, Any, Final

from pydantic import Field

from api_server.protocol.common import MAX_PROMPTS, GenerationRequest, Text, prompts_schema

DEFAULT_MAX_TOKENS: Final = 16


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, prompts_schema(MAX_PROMPTS)] = None
    """A string, a list of strings, a list of token ids, or a list of such lists; required without
    `prompt_embeds`."""
    prompt_embeds: (
        str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)] | None
    ) = None
    """In place of `prompt`: what the model's first layer gets for each token, as a safetensors file
    in base64 with one tensor [tokens, hidden] of float32, float16 or bfloat16, or several such
    files; needs `--enable-prompt-embeds`."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Most output tokens; by default 16, or less when the context leaves less."""
    echo: bool = False
    """Begin each choice with its prompt; with logprobs, also those of the prompt's tokens."""
    logprobs: int | None = Field(default=None)
    """Log-probabilities of the sampled tokens, with this many alternatives (0 to 20)."""
    add_special_tokens: bool = True
    """Let the tokenizer add what it adds to every text, such as a first token."""
    suffix: Text = ""
    """Text after the output, which the model fills in between prompt and suffix; needs a model
    whose vocabulary has tokens for it. In both texts special tokens are read as plain text."""

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each output token; None for no log-probabilities."""
        return self.logprobs

    @property
    def requested_max_tokens(self) -> int | None:
        """`max_tokens` if the request has it, else None."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def only_echoes(self) -> bool:
        """The response contains the prompt and no output: `echo` with a `max_tokens` of 0."""
        return self.echo and self.max_tokens == 0
