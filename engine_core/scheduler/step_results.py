"""Whether a worker's answer is an answer to the step it was given."""

from itertools import chain
from operator import add

from proto.errors import ProtocolError
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput


def check_result(output: SchedulerOutput, result: ModelRunnerOutput, vocab_size: int) -> None:
    """Raise ProtocolError unless `result` has a row for each sequence, and real tokens in them."""
    expected = [each.handle for each in output.new_requests] + output.cached_requests.handles
    if result.step != output.step:
        raise ProtocolError(f"step {result.step} was answered instead of step {output.step}")
    if result.handles != expected or len(result.sampled_token_ids) != len(expected):
        raise ProtocolError(
            f"step {output.step} has sequences {_shown(expected)}, the answer has "
            f"{_shown(result.handles)} and {len(result.sampled_token_ids)} rows of tokens"
        )
    if result.failed_handles and not set(result.failed_handles) <= set(expected):
        raise ProtocolError(
            f"step {output.step} failed sequences that it does not have: "
            f"{_shown(result.failed_handles)}"
        )
    sampled = list(chain.from_iterable(result.sampled_token_ids))
    if sampled and not (min(sampled) >= 0 and max(sampled) < vocab_size):
        raise ProtocolError(
            f"step {output.step} sampled a token outside the vocabulary [0, {vocab_size})"
        )


def ends_of_rows(output: SchedulerOutput) -> list[int]:
    """Per sequence of a step, in the order of the result, how many tokens are computed after it.

    A sequence whose tokens are all computed has sampled the next one.
    """
    cached = output.cached_requests
    new = [each.num_computed_tokens + each.num_scheduled_tokens for each in output.new_requests]
    return new + list(map(add, cached.num_computed_tokens, cached.num_scheduled_tokens))


def _shown(handles: list[int]) -> str:
    return f"{handles[:8]}{'…' if len(handles) > 8 else ''}"
