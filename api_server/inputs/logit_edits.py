"""The fields of a request that change the scores of tokens, as `LogitEdits`.

Owns how a bad word becomes tokens.
"""

from collections.abc import Sequence

from api_server.inputs.tokenizer import ModelTokenizer
from api_server.protocol.common import GenerationRequest
from proto.errors import InvalidRequestError
from proto.logit_edits import LogitEdits

NO_EDITS = LogitEdits()


async def logit_edits(request: GenerationRequest, tokenizer: ModelTokenizer) -> LogitEdits | None:
    """What the request changes, None for nothing. Raises InvalidRequestError for a bad word
    that is none; what depends on the vocabulary is not looked at."""
    edits = LogitEdits(
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        bias_token_ids=tuple(request.logit_bias),
        bias_values=tuple(request.logit_bias.values()),
        bad_words=await _bad_words(request.bad_words, tokenizer),
        allowed_token_ids=tuple(request.allowed_token_ids) or None,
    )
    return None if edits == NO_EDITS else edits


async def _bad_words(
    words: Sequence[str], tokenizer: ModelTokenizer
) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word at the beginning of a text, and after a space where these are others.

    The second spelling counts as vLLM counts it: where it begins with another token and has
    as many tokens, so that a space by itself is never forbidden.
    """
    if not words:
        return ()
    bare = [word.lstrip() for word in words]
    if not all(bare):
        raise InvalidRequestError("bad_words must hold more than spaces", "bad_words")
    texts = [*bare, *(f" {word}" for word in bare)]
    encoded = await tokenizer.encode(texts, add_special_tokens=False)
    spellings: list[tuple[int, ...]] = []
    for first, spaced in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
        spellings.append(tuple(first))
        if spaced[:1] != first[:1] and len(spaced) == len(first):
            spellings.append(tuple(spaced))
    return tuple(dict.fromkeys(spellings))
