"""The engine's own check of a request.

The front end has checked all of this and names the field of its API; here
nothing may get through that could harm the engine, a worker or another request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proto.engine_io import MAX_CHOICES, EngineCoreRequest, SessionInput
from proto.errors import InvalidRequestError
from proto.grammar import MAX_GRAMMAR_BYTES, GrammarSource
from proto.logit_edits import LogitEdits
from proto.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestLimits:
    """vocab_size: token ids are below it. max_model_len: most tokens of prompt and output.

    priorities: whether the scheduling policy heeds them. crashes_until_isolated: as in the
    settings of the scheduler.
    """

    vocab_size: int
    max_model_len: int
    priorities: bool = False
    crashes_until_isolated: int = 3


def validate_request(message: EngineCoreRequest, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for the first thing that is out of range."""
    params = message.sampling_params
    if not 1 <= message.n <= MAX_CHOICES:
        raise InvalidRequestError(f"n must be between 1 and {MAX_CHOICES}, got {message.n}", "n")
    if not message.prompt_token_ids:
        raise InvalidRequestError("the prompt has no tokens", "prompt")
    if message.priority and not limits.priorities:
        raise InvalidRequestError(
            "priority needs a server that was started with --scheduling-policy priority",
            "priority",
        )
    if not 0 <= message.seed < 1 << 64:
        raise InvalidRequestError("seed must fit 64 bits", "seed")
    if not 0 <= message.tenant < 1 << 64:
        raise InvalidRequestError("tenant must fit 64 bits", "tenant")
    if message.cache_salt is not None and not _is_utf8(message.cache_salt):
        raise InvalidRequestError("cache_salt is not valid text", "cache_salt")
    params.validate(limits.vocab_size)
    _check_token_ids(message.prompt_token_ids, limits, "prompt")
    _check_token_ids(params.eos_token_ids, limits, "eos_token_ids")
    check_length(len(message.prompt_token_ids), params.max_tokens, limits.max_model_len)
    _check_resumption(message, limits)
    _check_beams(message)
    _check_deadlines(message)
    if message.grammar is not None:
        _check_grammar(message, message.grammar)
    if message.thinking is not None:
        message.thinking.validate(limits.vocab_size)
        _check_thinking(message)
    if message.resumable:
        _check_session(message.n, params)


def validate_input(message: SessionInput, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for the first thing that is out of range.

    Whether it fits is for the session to say.
    """
    if not message.prompt_token_ids and not message.last:
        raise InvalidRequestError("the input has no tokens", "prompt")
    _check_token_ids(message.prompt_token_ids, limits, "prompt")
    if message.sampling_params is not None:
        message.sampling_params.validate(limits.vocab_size)
        _check_token_ids(message.sampling_params.eos_token_ids, limits, "eos_token_ids")
        _check_session(1, message.sampling_params)


def check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Raise InvalidRequestError, with the numbers, for more than a request may have."""
    total = num_prompt_tokens + max_tokens
    if total > max_model_len:
        raise InvalidRequestError(
            f"prompt ({num_prompt_tokens} tokens) and max_tokens ({max_tokens}) make "
            f"{total} tokens, more than the {max_model_len} that a request may have",
            "max_tokens",
        )


def _check_session(n: int, params: SamplingParams) -> None:
    if n != 1:
        raise InvalidRequestError(f"a session has one choice, got n = {n}", "n")
    if params.beam_width:
        raise InvalidRequestError("a session does not go with beam search", "n")
    if params.prompt_logprobs is not None:
        raise InvalidRequestError(
            "a session gives no prompt_logprobs: it keeps the KV of earlier turns",
            "prompt_logprobs",
        )


def _check_deadlines(message: EngineCoreRequest) -> None:
    for name in ("queue_deadline", "deadline"):
        value = getattr(message, name)
        if math.isnan(value):
            raise InvalidRequestError(f"{name} is no number", name)
        if message.resumable and value != math.inf:
            raise InvalidRequestError("a session has no time limit of its own", name)


def _check_resumption(message: EngineCoreRequest, limits: RequestLimits) -> None:
    if len(message.output_token_ids) not in (0, message.n):
        raise InvalidRequestError(
            f"output_token_ids has {len(message.output_token_ids)} choices, n is {message.n}",
            "output_token_ids",
        )
    for output in message.output_token_ids:
        _check_token_ids(output, limits, "output_token_ids")
        if len(output) > message.sampling_params.max_tokens:
            raise InvalidRequestError(
                f"{len(output)} tokens of output are more than max_tokens "
                f"({message.sampling_params.max_tokens})",
                "output_token_ids",
            )
    for choice in message.finished_choices:
        if not 0 <= choice < message.n:
            raise InvalidRequestError(
                f"finished choice {choice} is outside [0, {message.n})", "finished_choices"
            )


def _check_beams(message: EngineCoreRequest) -> None:
    """Beams are nowhere until the end, so there is nothing to take up or to tell of them."""
    params = message.sampling_params
    if params.beam_width == 0:
        return
    for wrong, name in (
        (params.beam_width != message.n, "n"),
        (any(message.output_token_ids), "output_token_ids"),
        (bool(message.finished_choices), "finished_choices"),
        (params.logprobs is not None, "logprobs"),
        (params.prompt_logprobs is not None, "prompt_logprobs"),
        (params.edits is not None, "edits"),
        (params.repetition is not None, "repetition_detection"),
    ):
        if wrong:
            raise InvalidRequestError(f"{name} does not go with beam search", name)


def _check_grammar(message: EngineCoreRequest, grammar: GrammarSource) -> None:
    """The end of the text is the grammar's to decide, and which tokens there are to choose from.

    The rest is checked where it is compiled.
    """
    params = message.sampling_params
    ends = (params.ignore_eos, "ignore_eos"), (params.min_tokens > 0, "min_tokens")
    _check_free_to_force(message, ends, "a grammar", grammar.field)
    if grammar.num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"the grammar has {grammar.num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are taken",
            grammar.field,
        )


def _check_thinking(message: EngineCoreRequest) -> None:
    """Nothing else may rule out the end of the thoughts."""
    _check_free_to_force(message, (), "a rule for thoughts", "thinking_token_budget")


def _check_free_to_force(
    message: EngineCoreRequest, further: Sequence[tuple[bool, str]], what: str, field: str
) -> None:
    """Tokens may be forced on it. further: (whether it is so, what does not go with that)."""
    params = message.sampling_params
    edits = params.edits or LogitEdits()
    for wrong, name in (
        (edits.allowed_token_ids is not None, "allowed_token_ids"),
        (bool(edits.bad_words), "bad_words"),
        (params.beam_width > 0, "use_beam_search"),
        *further,
        (message.resumable, "a session"),
    ):
        if wrong:
            raise InvalidRequestError(f"{name} does not go with {what}", field)


def _is_utf8(text: str) -> bool:
    """The salt is hashed while a step is scheduled, where it must not fail."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_token_ids(
    token_ids: list[int] | tuple[int, ...], limits: RequestLimits, param: str
) -> None:
    """min and max run in C: a prompt of 100,000 tokens costs a few milliseconds, once."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        wrong = next(each for each in token_ids if not 0 <= each < limits.vocab_size)
        raise InvalidRequestError(
            f"token id {wrong} is outside the vocabulary [0, {limits.vocab_size})", param
        )
