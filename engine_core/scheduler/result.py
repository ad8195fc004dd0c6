"""The end of a step: its result is checked, and each request gets its tokens.

`check_result` refuses an answer that no worker could give to this step. `ResultPass` appends the
tokens row by row, ends requests that are complete, and builds the outputs for the front ends.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import add

import numpy as np

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.retention.agent_sessions import AgentSessions
from engine_core.scheduler.beam_groups import BeamGroup, BeamGroups
from engine_core.scheduler.kv_transfer import KVTransferManager
from engine_core.scheduler.lifecycle import RequestLifecycle, completion
from engine_core.scheduler.speculative_decoding import SpeculativeDecoding
from engine_core.scheduler.step_plan import num_sampled_positions
from engine_core.scheduler.tenant_usage import TenantUsage
from proto.engine_io import (
    EngineCoreOutput,
    FinishReason,
    FirstTokenInfo,
    LogprobsArrays,
    RoutedExperts,
)
from proto.errors import ErrorInfo, ProtocolError
from proto.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.scheduler_output import SchedulerOutput

OutputsByFrontEnd = dict[int, list[EngineCoreOutput]]
"""Outputs by index of the front end."""


def corrupted_output(request: Request) -> EngineCoreOutput:
    """Return the final output of a request whose logits were not finite."""
    return error_output(
        request,
        ErrorInfo(
            "internal", "the model's logits contain NaN or infinity; this request cannot go on"
        ),
    )


def error_output(request: Request, error: ErrorInfo) -> EngineCoreOutput:
    """Return the final output of a failed request; earlier tokens have been sent already."""
    return EngineCoreOutput(
        request.request_id,
        request.choice,
        request.num_output_tokens,
        [],
        FinishReason.ERROR,
        error=error,
    )


class ImpossibleResultError(ProtocolError):
    """A worker's result that does not answer the step.

    outputs: of the rows before the invalid one; their tokens count.
    """

    def __init__(self, message: str, outputs: OutputsByFrontEnd | None = None) -> None:
        super().__init__(message)
        self.outputs: OutputsByFrontEnd = outputs or {}


def check_result(output: SchedulerOutput, result: ModelRunnerOutput, vocab_size: int) -> None:
    """Raise ImpossibleResultError unless there is a row for each sequence, with real tokens."""
    expected = [new.seq_id for new in output.new_requests] + output.cached_requests.seq_ids
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
    _check_drafts(result, vocab_size)
    for row in result.candidates:
        _check_candidates(row, vocab_size)
    for pooled in result.pooler_outputs:
        if not pooled.data or len(pooled.data) % 4:
            raise ImpossibleResultError(f"the pooled result of sequence {pooled.seq_id} is invalid")


def _check_drafts(result: ModelRunnerOutput, vocab_size: int) -> None:
    """Raise ImpossibleResultError unless each draft has real tokens, and survivals in [0, 1]."""
    drafts, survivals = result.draft_token_ids, result.draft_survivals
    if not (
        len(result.draft_seq_ids) == len(drafts) == len(survivals)
        and list(map(len, drafts)) == list(map(len, survivals))
        and all(0 <= token_id < vocab_size for token_id in chain.from_iterable(drafts))
        and all(0.0 <= survival <= 1.0 for survival in chain.from_iterable(survivals))
        and len(result.draft_pass_rows) == len(result.draft_pass_seconds)
    ):
        raise ImpossibleResultError(f"step {result.step} has invalid drafts for the next one")


def ends_of_rows(output: SchedulerOutput) -> list[int]:
    """Return the number of computed tokens after a step, per row in the order of the result."""
    cached = output.cached_requests
    new = [
        request.num_computed_tokens + request.num_scheduled_tokens
        for request in output.new_requests
    ]
    return new + list(map(add, cached.num_computed_tokens, cached.num_scheduled_tokens))


def _check_candidates(row: RowLogprobs, vocab_size: int) -> None:
    arrays = row.arrays
    token_ids = np.frombuffer(arrays.token_ids[: len(arrays.token_ids) & ~3], dtype="<i4")
    logprobs = np.frombuffer(arrays.logprobs[: len(arrays.logprobs) & ~3], dtype="<f4")
    if not (
        4 * arrays.width == len(arrays.token_ids) == len(arrays.logprobs) > 0
        and token_ids.min() >= 0
        and token_ids.max() < vocab_size
        and not np.isnan(logprobs).any()
    ):
        raise ImpossibleResultError(f"the candidates of sequence {row.seq_id} are invalid")


def _shown(seq_ids: list[int]) -> str:
    return f"{seq_ids[:8]}{'…' if len(seq_ids) > 8 else ''}"


class ResultPass:
    """Appends the tokens of a result to the requests and builds the outputs.

    discard_until_step: by seq_id, the last step whose result is void for a request, because KV that
    the step read turned out to be wrong.
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        kv_cache: KVCacheManager,
        beams: BeamGroups,
        kv_transfer: KVTransferManager,
        agent_sessions: AgentSessions,
        usage: TenantUsage,
        speculation: SpeculativeDecoding,
        max_model_len: int,
    ) -> None:
        self._lifecycle = lifecycle
        self._requests: Mapping[int, Request] = lifecycle.requests
        self._kv_cache = kv_cache
        self._beams = beams
        self._kv_transfer = kv_transfer
        self._agent_sessions = agent_sessions
        self._usage = usage
        self._speculation = speculation
        self._max_model_len = max_model_len
        self._discard_until_step: Mapping[int, int] = kv_transfer.discard_until_step
        self._num_corrupted = 0
        self._num_discarded = 0

    def apply_result(
        self, output: SchedulerOutput, result: ModelRunnerOutput, outputs: OutputsByFrontEnd
    ) -> str:
        """Append the tokens of each row, in order, up to the first invalid row.

        Adds to `outputs`. Returns what is wrong with the invalid row; empty if there is none.
        """
        self._fail_corrupted(result.failed_seq_ids, output.step, outputs)
        logprobs = {row.seq_id: row.arrays for row in result.logprobs}
        prompt_logprobs = {row.seq_id: row.arrays for row in result.prompt_logprobs}
        candidates = {row.seq_id: row.arrays for row in result.candidates}
        experts = {row.seq_id: row.experts for row in result.routed_experts}
        pooled = {row.seq_id: row.data for row in result.pooler_outputs}
        drafts = output.drafts if output.spec_decode_seq_ids else {}
        learns_outputs = self._speculation.is_active
        requests, discard_until_step, invalid = self._requests, self._discard_until_step, ""
        for seq_id, token_ids, end in zip(
            result.seq_ids, result.sampled_token_ids, ends_of_rows(output), strict=True
        ):
            request = requests.get(seq_id)
            if request is None or (
                discard_until_step and discard_until_step.get(seq_id, 0) >= output.step
            ):
                self._num_discarded += len(token_ids)
                continue
            if request.pooling_params is not None:
                invalid = self._apply_pooled(request, end, token_ids, pooled.get(seq_id), outputs)
                if invalid:
                    break
                continue
            tokens, finish_reason, first = request.all_token_ids, None, None
            token_index = len(tokens) - request.num_prompt_tokens
            num_accepted = 0
            num_new, num_positions = len(token_ids), num_sampled_positions(len(tokens), end)
            if num_new > num_positions or (num_positions and not num_new):
                if self._beams.report_candidates(request, candidates.get(seq_id)):
                    continue
                invalid = f"sequence {seq_id} has {num_new} tokens at {end}"
                break
            if request.num_output_placeholders:
                request.num_output_placeholders -= num_positions
            if num_positions > 1:
                invalid = self._apply_draft(
                    request, token_ids, drafts.get(seq_id, []), num_positions
                )
                if invalid:
                    break
            # Nearly every row is one token that ends nothing.
            if (
                num_new == 1
                and token_index + 1 < request.max_tokens
                and token_ids[0] not in request.stop_ids
                and request.repetition is None
            ):
                tokens.append(token_ids[0])
                if num_positions > 1:
                    self._record_draft(request, num_positions - 1, 1, 0)
            elif num_new:
                if self._beams.owns_request(request.request_id):
                    invalid = f"sequence {seq_id} has a token instead of candidates"
                    break
                token_ids = self._append_tokens(request, token_ids, num_positions - 1)
                if seq_id not in requests:
                    finish_reason = request.status.finish_reason
                if num_positions > 1:
                    num_cut = num_new - len(token_ids)
                    num_accepted = min(num_new - 1, len(token_ids))  # the last was sampled
                    self._num_discarded += num_cut
                    if seq_id in logprobs:
                        logprobs[seq_id] = first_rows(logprobs[seq_id], len(token_ids))
                    if num_cut and seq_id in experts:
                        experts[seq_id] = without_last(experts[seq_id], num_cut)
            elif seq_id not in prompt_logprobs and seq_id not in experts:
                continue
            if learns_outputs and num_new and finish_reason is None:
                self._speculation.add_outputs(request, num_new)
            if num_new and not request.first_info_sent:
                first = _first_token_info(request)
            front_end = request.front_end_index
            if front_end not in outputs:
                outputs[front_end] = []
            outputs[front_end].append(
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
                    routed_experts=experts.get(seq_id) if experts else None,
                    num_accepted_drafts=num_accepted,
                )
            )
        if candidates:
            for group in self._beams.advance_groups():
                self._finish_beams(group, outputs)
        if self._lifecycle.recently_ended:
            self._lifecycle.forget_ended(output.step)
        return invalid

    def _apply_pooled(
        self,
        request: Request,
        end: int,
        token_ids: list[int],
        data: bytes | None,
        outputs: OutputsByFrontEnd,
    ) -> str:
        """End a pooled request whose prompt is complete, with its result, `data`.

        end: number of computed tokens. Returns what is wrong with the row; empty if nothing is.
        """
        is_complete = end >= request.num_tokens
        if token_ids or is_complete == (data is None):
            return f"sequence {request.seq_id} is pooled and has no valid result at {end}"
        if data is not None:
            request.num_output_placeholders = 0
            self._lifecycle.finish_request(request, RequestStatus.FINISHED_STOPPED)
            outputs.setdefault(request.front_end_index, []).append(
                EngineCoreOutput(
                    request.request_id,
                    request.choice,
                    0,
                    [],
                    request.status.finish_reason,
                    first=_first_token_info(request),
                    pooler_output=data,
                )
            )
        return ""

    def fail_request(
        self, error: EngineCoreOutput, request: Request, outputs: OutputsByFrontEnd
    ) -> None:
        """End a failed request; all rows of a beam search end with the one that has the error."""
        is_row = self._beams.owns_request(request.request_id)
        self._lifecycle.finish_request(request, RequestStatus.FINISHED_ERROR)
        if is_row:
            self._lifecycle.abort_request(request.request_id)
        outputs.setdefault(request.front_end_index, []).append(error)

    def pop_num_corrupted(self) -> int:
        number, self._num_corrupted = self._num_corrupted, 0
        return number

    def pop_num_discarded(self) -> int:
        """Return how many sampled tokens were discarded since the last call.

        Their request had ended, or had lost KV that they depend on.
        """
        number, self._num_discarded = self._num_discarded, 0
        return number

    def _fail_corrupted(
        self, seq_ids: Sequence[int], step: int, outputs: OutputsByFrontEnd
    ) -> None:
        """End requests whose logits are not finite, and make their KV unfindable.

        This includes requests that have ended, whose blocks may have been found since.
        """
        for seq_id in seq_ids:
            request = self._requests.get(seq_id)
            if self._discard_until_step.get(seq_id, 0) >= step:
                continue
            if request is not None:
                self._discard_kv(request)
                request.num_computed_tokens = 0
                self._num_corrupted += 1
                self.fail_request(corrupted_output(request), request, outputs)
            elif seq_id in self._lifecycle.recently_ended:
                self._discard_kv(self._lifecycle.recently_ended[seq_id][0])

    def _discard_kv(self, request: Request) -> None:
        self._kv_transfer.discard_content(request)
        self._agent_sessions.drop_corrupt_prefix(request)

    def _apply_draft(
        self, request: Request, token_ids: list[int], draft: list[int], num_positions: int
    ) -> str:
        """Count the KV of the rejected part of a draft as not computed.

        It stays in the request's blocks, is not findable, and the next step overwrites it. The
        placeholders of all positions are taken back already. Returns what is wrong with the row;
        empty if nothing is.
        """
        num_accepted = len(token_ids) - 1
        if len(draft) != num_positions - 1 or token_ids[:-1] != draft[:num_accepted]:
            return f"sequence {request.seq_id} has other tokens than those that were drafted"
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= len(draft) - num_accepted
        return ""

    def _record_draft(self, request: Request, num_drafted: int, num_new: int, num_cut: int) -> None:
        """Count the accepted tokens of a draft that the request got.

        num_new: tokens that the request got. num_cut: those behind its end, which do not count, as
        if they had not been tried.
        """
        num_accepted = num_new if num_cut else num_new - 1
        num_tried = num_accepted if num_cut else num_drafted
        request.num_accepted_drafts += num_accepted
        self._speculation.record_verified(request, num_drafted, num_tried, num_accepted)

    def _append_tokens(self, request: Request, token_ids: list[int], num_drafted: int) -> list[int]:
        """Append tokens up to the one that ends the request; return the appended ones.

        num_drafted: tokens of its draft. Accepted ones are charged to the tenant. Those behind the
        end are as if never computed.
        """
        for count, token_id in enumerate(token_ids, 1):
            request.all_token_ids.append(token_id)
            if count > 1:
                self._usage.charge_extra_tokens(request, 1)
            status = completion(request, self._max_model_len)
            if status is not request.status:
                num_cut = len(token_ids) - count
                if num_drafted:
                    self._record_draft(request, num_drafted, count, num_cut)
                request.num_computed_tokens -= min(num_cut, request.num_computed_tokens)
                self._lifecycle.finish_request(request, status)
                return token_ids[:count]
        if num_drafted:
            self._record_draft(request, num_drafted, len(token_ids), 0)
        return token_ids

    def _finish_beams(self, group: BeamGroup, outputs: OutputsByFrontEnd) -> None:
        """End the rows of a beam search, whose outputs are the finished hypotheses."""
        for row, token_ids in group.results():
            self._kv_cache.free(row)
            row.all_token_ids[row.num_prompt_tokens :] = token_ids
            row.max_tokens = row.sampling_params.max_tokens
            self._lifecycle.finish_request(row, completion(row, self._max_model_len))
            first = None if row.choice else _first_token_info(row)
            outputs.setdefault(row.front_end_index, []).append(
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


def first_rows(arrays: LogprobsArrays, num_rows: int) -> LogprobsArrays:
    """Return the log-probabilities of the first positions only."""
    size = 4 * arrays.width * num_rows
    return LogprobsArrays(
        arrays.first_position,
        arrays.width,
        arrays.token_ids[:size],
        arrays.logprobs[:size],
        arrays.ranks[: 4 * num_rows],
    )


def without_last(experts: RoutedExperts, num_tokens: int) -> RoutedExperts:
    """Return the experts without those of the last tokens."""
    num_bytes = num_tokens * experts.num_layers * experts.top_k * experts.num_bytes
    data = experts.data[: max(0, len(experts.data) - num_bytes)]
    return RoutedExperts(
        experts.first_position, experts.num_layers, experts.top_k, experts.num_bytes, data
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
