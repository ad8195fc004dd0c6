"""Whether a worker's answer is an answer to the step it was given."""

from itertools import chain
from operator import add

import numpy as np

from engine_core.scheduler.client_outputs import ClientOutputs
from proto.errors import ProtocolError
from proto.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.scheduler_output import SchedulerOutput


class ImpossibleResultError(ProtocolError):
    """No worker that computed the step answers so.

    outputs: of the rows before the one that cannot be; their tokens count.
    """

    def __init__(self, message: str, outputs: ClientOutputs | None = None) -> None:
        super().__init__(message)
        self.outputs: ClientOutputs = outputs or {}


def check_result(output: SchedulerOutput, result: ModelRunnerOutput, vocab_size: int) -> None:
    """Raise ImpossibleResultError unless there is a row for each sequence, with real tokens."""
    expected = [each.handle for each in output.new_requests] + output.cached_requests.handles
    if result.step != output.step:
        raise ImpossibleResultError(
            f"step {result.step} was answered instead of step {output.step}"
        )
    if result.handles != expected or len(result.sampled_token_ids) != len(expected):
        raise ImpossibleResultError(
            f"step {output.step} has sequences {_shown(expected)}, the answer has "
            f"{_shown(result.handles)} and {len(result.sampled_token_ids)} rows of tokens"
        )
    if result.failed_handles and not set(result.failed_handles) <= set(expected):
        raise ImpossibleResultError(
            f"step {output.step} failed sequences that it does not have: "
            f"{_shown(result.failed_handles)}"
        )
    sampled = list(chain.from_iterable(result.sampled_token_ids))
    if sampled and not (min(sampled) >= 0 and max(sampled) < vocab_size):
        raise ImpossibleResultError(
            f"step {output.step} sampled a token outside the vocabulary [0, {vocab_size})"
        )
    for row in result.candidates:
        _check_candidates(row, vocab_size)


def ends_of_rows(output: SchedulerOutput) -> list[int]:
    """Per sequence of a step, in the order of the result, how many tokens are computed after it.

    A sequence whose tokens are all computed has sampled the next one.
    """
    cached = output.cached_requests
    new = [each.num_computed_tokens + each.num_scheduled_tokens for each in output.new_requests]
    return new + list(map(add, cached.num_computed_tokens, cached.num_scheduled_tokens))


def _check_candidates(row: RowLogprobs, vocab_size: int) -> None:
    """One row of real tokens with scores that can be compared."""
    arrays = row.arrays
    token_ids = np.frombuffer(arrays.token_ids[: len(arrays.token_ids) & ~3], dtype="<i4")
    scores = np.frombuffer(arrays.logprobs[: len(arrays.logprobs) & ~3], dtype="<f4")
    if not (
        4 * arrays.width == len(arrays.token_ids) == len(arrays.logprobs) > 0
        and token_ids.min() >= 0
        and token_ids.max() < vocab_size
        and not np.isnan(scores).any()
    ):
        raise ImpossibleResultError(f"the candidates of sequence {row.handle} are none")


def _shown(handles: list[int]) -> str:
    return f"{handles[:8]}{'…' if len(handles) > 8 else ''}"
