"""When a request is over, judged by its last token.

A pure function of the request; stop strings are the front end's business.
"""

from engine_core.request import Request, RequestStatus
from proto.sampling_params import MAX_REPEATED_TOKENS


def completion(request: Request, max_model_len: int) -> RequestStatus:
    """The status after the last output token: its present one, or a finished one.

    A stop token, or that the outputs repeat themselves, counts only once min_tokens are
    there; length always counts.
    """
    num_tokens = len(request.all_token_ids)
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens == 0:
        return request.status
    if (
        request.all_token_ids[-1] in request.stop_ids
        and num_output_tokens >= request.sampling_params.min_tokens
    ):
        return RequestStatus.FINISHED_STOPPED
    if num_output_tokens >= request.max_tokens or num_tokens >= max_model_len:
        return RequestStatus.FINISHED_LENGTH
    if (
        request.repetition is not None
        and num_output_tokens >= request.sampling_params.min_tokens
        and request.repetition.is_found(_last_outputs(request, MAX_REPEATED_TOKENS))
    ):
        return RequestStatus.FINISHED_REPETITION
    return request.status


def _last_outputs(request: Request, most: int) -> list[int]:
    """At most so many output tokens, of which there are some."""
    return request.all_token_ids[max(request.num_prompt_tokens, request.num_tokens - most) :]


def stop_token(request: Request) -> int | None:
    """The stop token that ended a stopped request; None when it was an end-of-sequence token."""
    params = request.sampling_params
    last = request.all_token_ids[-1]
    if last in params.eos_token_ids and not params.ignore_eos:
        return None
    return last
