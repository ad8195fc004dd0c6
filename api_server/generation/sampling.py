"""A client's sampling fields → `SamplingParams` and `LogitEdits`; seeds for requests without."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api_server.protocol.common import GenerationRequest
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import InvalidRequestError, context_length_error, require, shown
from proto.messages.logit_edits import LOGIT_EDIT_NUMBERS, LogitEdits
from proto.messages.sampling_params import (
    SAMPLING_NUMBERS,
    RepetitionDetection,
    SamplingParams,
    ThinkingRule,
)
from proto.settings.generation_config import GenerationDefaults

SEED_BITS: Final = 64
SEED_MASK: Final = (1 << SEED_BITS) - 1


def seeds(seed: int | None, index: int) -> Iterator[int]:
    """Yield 64-bit seeds for requests without one; reproducible if the daemon was given a seed.

    index: of this front end.
    """
    source = random.SystemRandom() if seed is None else random.Random(f"{seed}:{index}")
    while True:
        yield source.getrandbits(SEED_BITS)


def default_or_given(
    request: GenerationRequest, defaults: GenerationDefaults, names: Iterable[str]
) -> dict[str, Any]:
    """Return fields of a request, with the model's defaults of those that the request lacks.

    A beam search has no defaults of the model: it does not sample.
    """
    fields = {name: getattr(request, name) for name in names}
    if request.use_beam_search:
        return fields
    missing = fields.keys() - request.model_fields_set
    return fields | {name: defaults.values[name] for name in missing & defaults.values.keys()}


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Options that have different names in the endpoints' bodies.

    max_tokens: as the client gave it; None for `default_max_tokens` or, if that is None too, for
        the rest of the context.
    max_tokens_field: its name in the body, for errors.
    logprobs: number of alternatives; None for no log-probabilities.
    echoes_logprobs: `logprobs` are also those of the prompt.
    thinking: limits of the reasoning that the engine enforces; None for no limits.
    more_end_ids: tokens that end an answer beside those of the model.
    """

    max_tokens: int | None
    default_max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    echoes_logprobs: bool = False
    max_tokens_field: str = "max_tokens"
    thinking: ThinkingRule | None = None
    more_end_ids: tuple[int, ...] = ()


def sampling_params(
    request: GenerationRequest,
    options: EndpointOptions,
    defaults: GenerationDefaults,
    edits: LogitEdits | None,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    end_token_ids: tuple[int, ...],
) -> SamplingParams:
    """Return the validated sampling parameters of one prompt.

    edits: of the logits. end_token_ids: of the model. Raises InvalidRequestError with the name of
    the field.
    """
    max_output_tokens = max_model_len - num_prompt_tokens
    wanted, field = options.max_tokens, options.max_tokens_field
    if wanted is None:
        wanted = max_output_tokens
        if options.default_max_tokens is not None:
            wanted = min(max(options.default_max_tokens, request.min_tokens), max_output_tokens)
    elif wanted < 1:
        raise InvalidRequestError(f"{field} must be at least 1, got {shown(wanted)}", field)
    elif wanted > max_output_tokens:
        raise context_length_error(
            max_model_len,
            f"{num_prompt_tokens} prompt tokens and {field} {shown(wanted)} make "
            f"{shown(num_prompt_tokens + wanted)}.",
            field,
        )
    draws = default_or_given(request, defaults, ("top_k", *SAMPLING_NUMBERS))
    draws["top_k"] = min(max(draws["top_k"], 0), vocab_size)
    if request.use_beam_search:
        draws["temperature"] = 0.0
    params = SamplingParams(
        **draws,
        max_tokens=wanted,
        min_tokens=request.min_tokens,
        stop_token_ids=tuple(request.stop_token_ids),
        eos_token_ids=(*end_token_ids, *options.more_end_ids),
        ignore_eos=request.ignore_eos,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        beam_width=request.n if request.use_beam_search else 0,
        length_penalty=request.length_penalty,
        early_stopping=request.early_stopping,
        edits=edits,
        logprob_token_ids=tuple(request.logprob_token_ids),
        repetition=_repetition(request),
        return_routed_experts=request.return_routed_experts,
    )
    params.validate(vocab_size)
    if params.greedy and request.n > 1 and not request.use_beam_search:
        is_default = "temperature" not in request.model_fields_set
        where = " by the model's defaults" if is_default else ""
        raise InvalidRequestError(
            f"n must be 1 when temperature is 0{where}: {request.n} choices would be the same", "n"
        )
    return params


def _repetition(request: GenerationRequest) -> RepetitionDetection | None:
    detection = request.repetition_detection
    if detection is None:
        return None
    return RepetitionDetection(
        max_pattern_size=detection.max_pattern_size,
        min_pattern_size=detection.min_pattern_size or 1,
        min_count=detection.min_count,
    )


NO_EDITS = LogitEdits()


async def logit_edits(
    request: GenerationRequest, tokenizer: ModelTokenizer, defaults: GenerationDefaults
) -> LogitEdits | None:
    """Return the request's edits of the logits; None for no edits.

    Raises InvalidRequestError for an empty bad word. Token ids are validated later.
    """
    edits = LogitEdits(
        **default_or_given(request, defaults, LOGIT_EDIT_NUMBERS),
        bias_token_ids=tuple(request.logit_bias),
        bias_values=tuple(request.logit_bias.values()),
        bad_words=await _bad_words(request.bad_words, tokenizer),
        allowed_token_ids=tuple(request.allowed_token_ids) or None,
    )
    return None if edits == NO_EDITS else edits


async def _bad_words(
    words: Sequence[str], tokenizer: ModelTokenizer
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the start of a text and after a space.

    As in vLLM, the second spelling is used only if it starts with another token and has as many
    tokens as the first, so that a space alone is never forbidden.
    """
    if not words:
        return ()
    bare = [word.lstrip() for word in words]
    require(all(bare), "bad_words", "must hold more than spaces")
    texts = [*bare, *(f" {word}" for word in bare)]
    encoded = [ids async for ids in tokenizer.encode(texts, add_special_tokens=False)]
    spellings: list[tuple[int, ...]] = []
    for first, spaced in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
        spellings.append(tuple(first))
        if spaced[:1] != first[:1] and len(spaced) == len(first):
            spellings.append(tuple(spaced))
    return tuple(dict.fromkeys(spellings))
