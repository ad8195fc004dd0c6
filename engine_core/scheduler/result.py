"""The end of a step: its result is checked, and each request gets its tokens.

`check_result` refuses an answer that no worker could give to this step. `ResultPass` appends the
tokens row by row, ends requests that are complete, and builds the outputs for the front ends.
It counts requests that ended with non-finite logits, and tokens that arrived after their request
had ended.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import add
from typing import TYPE_CHECKING

import numpy as np

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.beam_groups import BeamGroup, BeamGroups
from engine_core.scheduler.step_plan import StepPlan
from proto.engine_io import EngineCoreOutput, FinishReason, FirstTokenInfo
from proto.errors import ErrorInfo, ProtocolError
from proto.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.sampling_params import MAX_REPEATED_TOKENS
from proto.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from engine_core.scheduler.scheduler import Scheduler

ClientOutputs = dict[int, list[EngineCoreOutput]]
"""Outputs by client index."""


def corrupted_output(request: Request) -> EngineCoreOutput:
    """The final output of a request whose scores were no numbers."""
    return error_output(
        request,
        ErrorInfo(
            "internal", "the model gave scores that are not numbers; this request cannot go on"
        ),
    )


def error_output(request: Request, error: ErrorInfo) -> EngineCoreOutput:
    """The final output of a request; the tokens it had before are sent already."""
    return EngineCoreOutput(
        request.request_id,
        request.choice,
        request.num_output_tokens,
        [],
        FinishReason.ERROR,
        error=error,
    )


# Whether a request has ended, by its last token. Front ends look for stop strings.


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


# The check of a worker's result against the step that it was given.


class ImpossibleResultError(ProtocolError):
    """No worker that computed the step answers so.

    outputs: of the rows before the one that cannot be; their tokens count.
    """

    def __init__(self, message: str, outputs: ClientOutputs | None = None) -> None:
        super().__init__(message)
        self.outputs: ClientOutputs = outputs or {}


def check_result(output: SchedulerOutput, result: ModelRunnerOutput, vocab_size: int) -> None:
    """Raise ImpossibleResultError unless there is a row for each sequence, with real tokens."""
    expected = [each.seq_id for each in output.new_requests] + output.cached_requests.seq_ids
    if result.step != output.step:
        raise ImpossibleResultError(
            f"step {result.step} was answered instead of step {output.step}"
        )
    if result.seq_ids != expected or len(result.sampled_token_ids) != len(expected):
        raise ImpossibleResultError(
            f"step {output.step} has sequences {_shown(expected)}, the answer has "
            f"{_shown(result.seq_ids)} and {len(result.sampled_token_ids)} rows of tokens"
        )
    if result.failed_seq_ids and not set(result.failed_seq_ids) <= set(expected):
        raise ImpossibleResultError(
            f"step {output.step} failed sequences that it does not have: "
            f"{_shown(result.failed_seq_ids)}"
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
        raise ImpossibleResultError(f"the candidates of sequence {row.seq_id} are none")


def _shown(seq_ids: list[int]) -> str:
    return f"{seq_ids[:8]}{'…' if len(seq_ids) > 8 else ''}"


def reserve_placeholders(plan: StepPlan) -> None:
    """Count a placeholder for each token that a step in flight samples.

    Asynchronous scheduling plans a step before the result of the one before it is here. The
    sampled ids are not known yet, but the worker has them by the time it computes the next step:

        all_token_ids     |--- prompt ---|-- outputs --|
        placeholders                                   | ? |
        next step computes                             |-1-|   and samples another

    Hashing a block, stop tokens and computing a request again need the ids and wait for the
    result; planning the next step needs only the count.
    """
    for request in chain(plan.continued, plan.admitted):
        num_tokens = len(request.all_token_ids) + request.num_output_placeholders
        if request.num_computed_tokens >= num_tokens:
            request.num_output_placeholders += 1


class ResultPass:
    """Turns the rows of a result into outputs.

    requests: all that are not over, by seq_id; read only.
    discard_until_step: by seq_id, the last step whose row of a request does not count; read only.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        requests: Mapping[int, Request],
        kv_cache: KVCacheManager,
        beams: BeamGroups,
        max_model_len: int,
        discard_until_step: Mapping[int, int],
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._kv_cache = kv_cache
        self._beams = beams
        self._max_model_len = max_model_len
        self._discard_until_step = discard_until_step
        self._num_corrupted = 0
        self._num_discarded = 0
        self._departed: dict[int, tuple[Request, int]] = {}

    def run(
        self, output: SchedulerOutput, result: ModelRunnerOutput, outputs: ClientOutputs
    ) -> str:
        """Take the rows in, in order, up to the first that cannot be; `outputs` is added to.

        Returns what is wrong with that one; empty where nothing is.
        """
        self._fail(result.failed_seq_ids, output.step, outputs)
        logprobs = {row.seq_id: row.arrays for row in result.logprobs}
        prompt_logprobs = {row.seq_id: row.arrays for row in result.prompt_logprobs}
        candidates = {row.seq_id: row.arrays for row in result.candidates}
        requests, discard_until_step, wrong = self._requests, self._discard_until_step, ""
        for seq_id, token_ids, end in zip(
            result.seq_ids, result.sampled_token_ids, ends_of_rows(output), strict=True
        ):
            request = requests.get(seq_id)
            if request is None or (
                discard_until_step and discard_until_step.get(seq_id, 0) >= output.step
            ):
                self._num_discarded += len(token_ids)
                continue
            tokens, finish_reason, first = request.all_token_ids, None, None
            token_index = len(tokens) - request.num_prompt_tokens
            if bool(token_ids) is (end < len(tokens)):
                if self._beams.report(request, candidates.get(seq_id)):
                    continue
                wrong = f"sequence {seq_id} has {len(token_ids)} tokens at {end}"
                break
            # Nearly every row is one token that ends nothing.
            if (
                len(token_ids) == 1
                and token_index + 1 < request.max_tokens
                and token_ids[0] not in request.stop_ids
                and request.repetition is None
            ):
                tokens.append(token_ids[0])
            elif token_ids:
                if self._beams.owns(request.request_id):
                    wrong = f"sequence {seq_id} has a token, and is to have candidates"
                    break
                token_ids = self._append(request, token_ids)
                if seq_id not in requests:
                    finish_reason = request.status.finish_reason
            elif seq_id not in prompt_logprobs:
                continue
            if token_ids and not request.first_info_sent:
                first = _first_token_info(request)
            client = request.client_index
            if client not in outputs:
                outputs[client] = []
            outputs[client].append(
                EngineCoreOutput(
                    request.request_id,
                    request.choice,
                    token_index,
                    token_ids,
                    finish_reason,
                    request.stop_reason,
                    first,
                    logprobs.get(seq_id) if logprobs else None,
                    prompt_logprobs.get(seq_id) if prompt_logprobs else None,
                    kv_transfer_params=request.kv_transfer_params,
                )
            )
        if candidates:
            for group in self._beams.advance():
                self._end_beams(group, outputs)
        if self._departed:
            self._forget_departed(output.step)
        return wrong

    def depart(self, request: Request, step: int) -> None:
        """A request is over; steps up to this one may compute it, and find that it is broken."""
        self._departed[request.seq_id] = (request, step)

    def fill_placeholders(self, result: ModelRunnerOutput) -> None:
        """Drop the placeholders of tokens that are known now; results come in order of steps."""
        discard_until_step = self._discard_until_step
        for seq_id, token_ids in zip(result.seq_ids, result.sampled_token_ids, strict=True):
            request = self._requests.get(seq_id)
            if (
                token_ids
                and request is not None
                and discard_until_step.get(seq_id, 0) < result.step
            ):
                request.num_output_placeholders -= 1

    def end_with(self, error: EngineCoreOutput, request: Request, outputs: ClientOutputs) -> None:
        """End a request that failed; the rows of a beam search end with the one that tells why."""
        is_row = self._beams.owns(request.request_id)
        self._scheduler.finish(request, RequestStatus.FINISHED_ERROR)
        if is_row:
            self._scheduler.abort(request.request_id)
        outputs.setdefault(request.client_index, []).append(error)

    def take_num_corrupted(self) -> int:
        """Requests that ended since the last call because their scores were no numbers."""
        taken, self._num_corrupted = self._num_corrupted, 0
        return taken

    def take_num_discarded(self) -> int:
        """Tokens that were drawn since the last call for a request that was over, or had lost
        what they rest on."""
        taken, self._num_discarded = self._num_discarded, 0
        return taken

    def _fail(self, seq_ids: Sequence[int], step: int, outputs: ClientOutputs) -> None:
        """End requests whose logits are not finite, and make their KV unfindable.

        This includes requests that have ended, whose blocks may have been found since.
        """
        for seq_id in seq_ids:
            request = self._requests.get(seq_id)
            if self._discard_until_step.get(seq_id, 0) >= step:
                continue
            if request is not None:
                self._scheduler.withdraw(request)
                request.num_computed_tokens = 0
                self._num_corrupted += 1
                self.end_with(corrupted_output(request), request, outputs)
            elif seq_id in self._departed:
                self._scheduler.withdraw(self._departed[seq_id][0])

    def _forget_departed(self, step: int) -> None:
        """The result of this step is here; they departed in the order of the steps."""
        for seq_id, (_, last_step) in list(self._departed.items()):
            if last_step > step:
                return
            del self._departed[seq_id]

    def _append(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append tokens up to the one that ends the request; returns those appended."""
        for count, token_id in enumerate(token_ids, 1):
            request.all_token_ids.append(token_id)
            status = completion(request, self._max_model_len)
            if status is not request.status:
                self._scheduler.finish(request, status)
                return token_ids[:count]
        return token_ids

    def _end_beams(self, group: BeamGroup, outputs: ClientOutputs) -> None:
        """The finished hypotheses are the outputs of the choices; no row holds its own any more."""
        for row, token_ids in group.results():
            self._kv_cache.free(row)
            row.all_token_ids[row.num_prompt_tokens :] = token_ids
            row.max_tokens = row.sampling_params.max_tokens
            self._scheduler.finish(row, completion(row, self._max_model_len))
            first = None if row.choice else _first_token_info(row)
            outputs.setdefault(row.client_index, []).append(
                EngineCoreOutput(
                    row.request_id,
                    row.choice,
                    0,
                    token_ids,
                    row.status.finish_reason,
                    row.stop_reason,
                    first,
                    kv_transfer_params=row.kv_transfer_params,
                )
            )


def _first_token_info(request: Request) -> FirstTokenInfo:
    request.first_info_sent = True
    assert request.queued_at is not None
    assert request.scheduled_at is not None
    return FirstTokenInfo(
        request.num_cached_tokens,
        request.queued_at,
        request.scheduled_at,
        request.num_external_tokens,
    )
