"""Validates requests in the engine.

The front end has checked the same before, with the field names of its API. The engine checks
again, so that no message can harm it, a worker, or another request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proto.codec import from_json
from proto.errors import InvalidRequestError, ProtocolError
from proto.messages.engine_io import MAX_CHOICES, EngineCoreRequest, SessionInput
from proto.messages.grammar import MAX_GRAMMAR_BYTES, GrammarSource
from proto.messages.logit_edits import LogitEdits
from proto.messages.lora import DIGEST_BYTES
from proto.messages.multimodal import MM_HASH_BYTES, MultiModalFeature
from proto.messages.prepared_model import VisionFacts
from proto.messages.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one engine for a request.

    vocab_size: token ids are below it. max_model_len: maximum tokens of prompt and output.
    priorities: whether the scheduling policy uses them. crashes_until_isolated: the setting.
    pools: whether the model pools prompts instead of generating. embedding_bytes: of a row of
    prompt_embeds; 0 refuses them. vision: None for a model that reads no images.
    """

    vocab_size: int
    max_model_len: int
    priorities: bool = False
    crashes_until_isolated: int = 3
    pools: bool = False
    embedding_bytes: int = 0
    vision: VisionFacts | None = None


def validate_request(message: EngineCoreRequest, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for the first field that is out of range."""
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
    try:  # the salt is hashed later, where this must not fail
        (message.cache_salt or "").encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("cache_salt is not valid text", "cache_salt") from None
    params.validate(limits.vocab_size)
    _check_token_ids(message.prompt_token_ids, limits, "prompt")
    _check_token_ids(params.eos_token_ids, limits, "eos_token_ids")
    _check_prompt_embeds(message, limits)
    _check_images(message, limits.vision)
    _check_pooling(message, limits)
    _check_adapter(message)
    num_outputs = 0 if limits.pools else params.max_tokens
    check_length(len(message.prompt_token_ids), num_outputs, limits.max_model_len)
    _check_resumption(message, limits)
    _check_beams(message)
    _check_deadlines(message)
    if message.grammar is not None:
        _check_grammar(message, message.grammar)
    if message.thinking is not None:
        message.thinking.validate(limits.vocab_size)
        # They could mask the end marker of reasoning.
        _check_forced_tokens(message, (), "a reasoning budget", "thinking_token_budget")
    if message.resumable:
        _check_session(message.n, params)
    if message.kv_transfer_request:
        _check_transfer(message.kv_transfer_request)


def validate_input(message: SessionInput, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for the first field that is out of range.

    The session checks the length.
    """
    if not message.prompt_token_ids and not message.last:
        raise InvalidRequestError("the input has no tokens", "prompt")
    _check_token_ids(message.prompt_token_ids, limits, "prompt")
    if message.sampling_params is not None:
        message.sampling_params.validate(limits.vocab_size)
        _check_token_ids(message.sampling_params.eos_token_ids, limits, "eos_token_ids")
        _check_session(1, message.sampling_params)


def _check_transfer(request: bytes) -> None:
    try:
        from_json(request, dict[str, Any])
    except ProtocolError:
        raise InvalidRequestError(
            "kv_transfer_params is not an object", "kv_transfer_params"
        ) from None


def check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Raise InvalidRequestError if prompt and output are longer than `max_model_len`."""
    total = num_prompt_tokens + max_tokens
    if total > max_model_len:
        raise InvalidRequestError(
            f"prompt ({num_prompt_tokens} tokens) and max_tokens ({max_tokens}) make "
            f"{total} tokens, more than the {max_model_len} that a request may have",
            "max_tokens",
        )


def _check_prompt_embeds(message: EngineCoreRequest, limits: RequestLimits) -> None:
    """Refuse embeddings of another size, and what needs the tokens of a prompt."""
    given = len(message.prompt_embeds)
    if not given:
        return
    if not limits.embedding_bytes:
        raise InvalidRequestError(
            "prompt_embeds needs a server with --enable-prompt-embeds", "prompt_embeds"
        )
    expected = len(message.prompt_token_ids) * limits.embedding_bytes
    if given != expected:
        raise InvalidRequestError(
            f"prompt_embeds has {given} bytes, {len(message.prompt_token_ids)} tokens take "
            f"{expected}",
            "prompt_embeds",
        )
    for is_used, name in (
        (any(message.prompt_token_ids), "prompt"),
        (message.sampling_params.prompt_logprobs is not None, "prompt_logprobs"),
        (message.resumable, "a session"),
        (message.pooling_params is not None, "pooling"),
        (bool(message.mm_features), "an image"),
    ):
        if is_used:
            raise InvalidRequestError(f"{name} does not go with prompt_embeds", "prompt_embeds")


def _check_images(message: EngineCoreRequest, vision: VisionFacts | None) -> None:
    """Refuse images that are not where the prompt has their tokens, one after the other."""
    features = message.mm_features
    if not features:
        return
    if vision is None:
        raise InvalidRequestError("the model reads text only, no images", "messages")
    _refuse_used([(message.pooling_params is not None, "an image")], "pooling", "messages")
    end = 0
    for number, feature in enumerate(features, 1):
        problem = _problem_of_image(feature, end, message.prompt_token_ids, vision)
        if problem:
            raise InvalidRequestError(f"image {number} of the prompt {problem}", "messages")
        end = feature.end


def _problem_of_image(
    feature: MultiModalFeature, least_offset: int, prompt: list[int], vision: VisionFacts
) -> str:
    """Return what is wrong with an image; "" for nothing."""
    if not least_offset <= feature.offset < feature.end <= len(prompt):
        return f"has the tokens [{feature.offset}, {feature.end}), out of place"
    if not 1 <= feature.num_embeds <= vision.max_embeds:
        return f"has {feature.num_embeds} rows, the model takes 1 to {vision.max_embeds}"
    num_tokens = prompt[feature.offset : feature.end].count(vision.image_token_id)
    if num_tokens != feature.num_embeds:
        return f"has {feature.num_embeds} rows for {num_tokens} tokens"
    if vision.mrope_merge and not _has_grid(feature, vision.mrope_merge):
        return f"has {feature.num_embeds} rows, and a grid of {list(feature.grid)}"
    if len(feature.mm_hash) != MM_HASH_BYTES:
        return f"has a hash of {len(feature.mm_hash)} bytes"
    name, shape = feature.pixels.name, feature.pixels.shape
    if not name or "/" in name or name.startswith(".") or not shape or min(shape) < 1:
        return "has no pixels"
    return ""


def _has_grid(feature: MultiModalFeature, merge: int) -> bool:
    """Return whether the rows are the squares of the grid of one frame, without markers."""
    grid = feature.grid
    if feature.length != feature.num_embeds:
        return False
    if len(grid) != 3 or grid[0] != 1 or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
        return False
    return grid[1] * grid[2] == feature.num_embeds * merge**2


def _check_pooling(message: EngineCoreRequest, limits: RequestLimits) -> None:
    """Refuse a request of the wrong kind, and parameters of sampling with pooling."""
    pooling = message.pooling_params
    if (pooling is not None) != limits.pools:
        raise InvalidRequestError(
            "the model pools and does not generate"
            if limits.pools
            else "the model generates and does not pool",
            "model",
        )
    if pooling is None:
        return
    pooling.validate()
    rules = (
        (message.n != 1, "n"),
        (message.resumable, "a session"),
        (any(message.output_token_ids), "output_token_ids"),
        (message.grammar is not None, "grammar"),
        (message.agent is not None, "agent"),
        (message.sampling_params.max_tokens != 1, "max_tokens"),
        (message.sampling_params.prompt_logprobs is not None, "prompt_logprobs"),
        (message.sampling_params.return_routed_experts, "return_routed_experts"),
    )
    _refuse_used(rules, "pooling")


def _check_adapter(message: EngineCoreRequest) -> None:
    lora = message.lora_request
    if lora is None:
        return
    if len(lora.digest) != DIGEST_BYTES or not lora.lora_name or not lora.path:
        raise InvalidRequestError("the adapter has no name, path or digest", "model")
    if not math.isfinite(lora.scale):
        raise InvalidRequestError("the scale of an adapter must be finite", "lora")


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
    if params.return_routed_experts:
        raise InvalidRequestError(
            "a session does not return routed experts", "return_routed_experts"
        )


def _check_deadlines(message: EngineCoreRequest) -> None:
    for name in ("queue_deadline", "deadline"):
        value = getattr(message, name)
        if math.isnan(value):
            raise InvalidRequestError(f"{name} is not a number", name)
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
    """Refuse parameters of a beam search that need output tokens before its end."""
    params = message.sampling_params
    if params.beam_width == 0:
        return
    rules = (
        (params.beam_width != message.n, "n"),
        (any(message.output_token_ids), "output_token_ids"),
        (bool(message.finished_choices), "finished_choices"),
        (params.logprobs is not None, "logprobs"),
        (params.prompt_logprobs is not None, "prompt_logprobs"),
        (params.edits is not None, "edits"),
        (params.repetition is not None, "repetition_detection"),
        (params.return_routed_experts, "return_routed_experts"),
    )
    _refuse_used(rules, "beam search")


def _check_grammar(message: EngineCoreRequest, grammar: GrammarSource) -> None:
    """Refuse parameters that contradict a grammar, and grammars that are too long.

    The compiler checks the grammar itself.
    """
    params = message.sampling_params
    end_rules = (params.ignore_eos, "ignore_eos"), (params.min_tokens > 0, "min_tokens")
    _check_forced_tokens(message, end_rules, "a grammar", grammar.field)
    if grammar.num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"the grammar has {grammar.num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed"
        ).in_field(grammar.field)


def _check_forced_tokens(
    message: EngineCoreRequest, more_rules: Sequence[tuple[bool, str]], what: str, field: str
) -> None:
    """Refuse parameters that contradict a feature which forces tokens.

    more_rules: further parameters, as (whether the request uses it, name). what, field: the
    feature and its request field, for the error.
    """
    params = message.sampling_params
    edits = params.edits or LogitEdits()
    rules = (
        (edits.allowed_token_ids is not None, "allowed_token_ids"),
        (bool(edits.bad_words), "bad_words"),
        (params.beam_width > 0, "use_beam_search"),
        *more_rules,
        (message.resumable, "a session"),
    )
    _refuse_used(rules, what, field)


def _refuse_used(rules: Sequence[tuple[bool, str]], what: str, field: str | None = None) -> None:
    """Raise InvalidRequestError for the first parameter that is used and does not go with `what`.

    rules: whether the request uses a parameter, and its name. field: for the error; None: the name.
    """
    for is_used, name in rules:
        if is_used:
            raise InvalidRequestError(f"{name} does not go with {what}", field or name)


def _check_token_ids(
    token_ids: list[int] | tuple[int, ...], limits: RequestLimits, param: str
) -> None:
    """Raise InvalidRequestError for a token id outside the vocabulary.

    Uses min and max because they run in C: 100,000 tokens take a few milliseconds.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < limits.vocab_size)
        raise InvalidRequestError(
            f"token id {wrong} is outside the vocabulary [0, {limits.vocab_size})", param
        )
