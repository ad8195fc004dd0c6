"""The end of a step: its result is checked, and each request gets its tokens.

`check_result` refuses an answer that no worker could give to this step. `ResultPass` appends the
tokens row by row, ends requests that are complete, and builds the outputs for the front ends.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import add
from typing import Final

import numpy as np

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.adapters import AdapterGate
from engine_core.scheduler.features.beam_groups import BeamGroup, BeamGroups
from engine_core.scheduler.features.encoder_inputs import EncoderInputs, FailedImage
from engine_core.scheduler.features.resumable_sessions import ResumableSessions
from engine_core.scheduler.features.retention.agent_sessions import AgentSessions
from engine_core.scheduler.features.speculative_decoding import SpeculativeDecoding
from engine_core.scheduler.features.tenant_usage import TenantUsage
from engine_core.scheduler.kv_transfer import KVTransferManager
from engine_core.scheduler.request_lifecycle import OutputsByFrontEnd, RequestLifecycle, completion
from engine_core.scheduler.step_plan import num_sampled_positions
from proto.errors import ErrorInfo, ProtocolError, shown
from proto.messages.engine_io import EngineCoreOutput, FinishReason, LogprobsArrays, RoutedExperts
from proto.messages.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.messages.scheduler_output import SchedulerOutput

CORRUPTED: Final = ErrorInfo(
    "internal", "the model's logits contain NaN or infinity; this request cannot go on"
)
"""Error of a request without an adapter whose logits were not finite."""


class ImpossibleResultError(ProtocolError):
    """A worker's result that does not answer the step.

    outputs: of the rows before the invalid one; their tokens count.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.outputs: OutputsByFrontEnd = {}


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
    """Raise ImpossibleResultError unless each draft has real tokens, and acceptance probabilities
    in [0, 1]."""
    drafts, acceptance_probs = result.draft_token_ids, result.draft_acceptance_probs
    if not (
        len(result.draft_seq_ids) == len(drafts) == len(acceptance_probs)
        and list(map(len, drafts)) == list(map(len, acceptance_probs))
        and all(0 <= token_id < vocab_size for token_id in chain.from_iterable(drafts))
        and all(
            0.0 <= acceptance_prob <= 1.0
            for acceptance_prob in chain.from_iterable(acceptance_probs)
        )
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


class RowExtras:
    """What rows of a step have in addition to sampled tokens, by seq_id; nearly always nothing.

    drafts: that the step verified. for_clients: whether any row has log-probabilities or experts.
    pooled: float32 little-endian, results of pooled requests.
    """

    def __init__(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        self.logprobs = {row.seq_id: row.arrays for row in result.logprobs}
        self.prompt_logprobs = {row.seq_id: row.arrays for row in result.prompt_logprobs}
        self.candidates = {row.seq_id: row.arrays for row in result.candidates}
        self.experts = {row.seq_id: row.experts for row in result.routed_experts}
        self.for_clients = bool(self.logprobs or self.prompt_logprobs or self.experts)
        self.pooled = {row.seq_id: row.data for row in result.pooler_outputs}
        self.drafts = output.drafts if output.spec_decode_seq_ids else {}

    def cut_row(self, seq_id: int, num_tokens: int, num_cut: int) -> None:
        """Drop what belongs to the last `num_cut` tokens of a row; `num_tokens` stay."""
        if seq_id in self.logprobs:
            self.logprobs[seq_id] = first_rows(self.logprobs[seq_id], num_tokens)
        if seq_id in self.experts:
            self.experts[seq_id] = without_last(self.experts[seq_id], num_cut)


class ResultPass:
    """Appends the tokens of a result to the requests and builds the outputs.

    rewound_until_step: see `KVTransferManager`.
    vocab_size: sampled token ids are below it.
    adapters: None if none are served. encoder_inputs: None for a model that reads no images.
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        kv_cache: KVCacheManager,
        beams: BeamGroups,
        kv_transfer: KVTransferManager,
        resumable_sessions: ResumableSessions,
        agent_sessions: AgentSessions,
        usage: TenantUsage,
        speculation: SpeculativeDecoding,
        adapters: AdapterGate | None,
        encoder_inputs: EncoderInputs | None,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._lifecycle = lifecycle
        self._requests: Mapping[int, Request] = lifecycle.requests
        self._kv_cache = kv_cache
        self._beams = beams
        self._kv_transfer = kv_transfer
        self._resumable_sessions = resumable_sessions
        self._agent_sessions = agent_sessions
        self._usage = usage
        self._speculation = speculation
        self._adapters = adapters
        self._encoder_inputs = encoder_inputs
        self._learns_outputs = speculation.is_active
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._rewound_until_step: Mapping[int, int] = kv_transfer.rewound_until_step
        self._without_image: set[int] = set()  # seq_ids of ended requests with a failed image
        self._num_corrupted = 0
        self._num_discarded = 0

    def apply_result(
        self, output: SchedulerOutput, result: ModelRunnerOutput, last_step: int
    ) -> OutputsByFrontEnd:
        """Check a result, append its tokens, end complete requests; see `Scheduler`.

        last_step: the last scheduled one.
        """
        check_result(output, result, self._vocab_size)
        self._kv_transfer.confirm_loads(output.step)
        outputs: OutputsByFrontEnd = {}
        num_unfinished = len(self._requests)
        if self._encoder_inputs is not None:
            self._fail_images(self._encoder_inputs.end_step(output, result), last_step, outputs)
        invalid = self._apply_rows(output, result, outputs)
        if len(self._requests) < num_unfinished:
            self._end_turns(outputs)
        if invalid is not None:
            raise invalid
        if result.draft_pass_rows or result.draft_seq_ids:
            self._speculation.learn_passes(result.draft_pass_rows, result.draft_pass_seconds)
            self._keep_proposals(output, result)
        return outputs

    def fail_requests(self, errors: Mapping[int, ErrorInfo]) -> OutputsByFrontEnd:
        """End requests, by seq_id, with an error; ignores requests that have ended already."""
        outputs: OutputsByFrontEnd = {}
        for seq_id, error in errors.items():
            request = self._requests.get(seq_id)
            if request is not None:
                self.fail_request(request, error, outputs)
        self._end_turns(outputs)
        return outputs

    def keep_proposal(
        self, seq_id: int, num_asked: int, draft: list[int], acceptance_probs: Sequence[float]
    ) -> None:
        """Keep what the workers' draft model proposes for a request, if it still runs."""
        request = self._requests.get(seq_id)
        if request is not None and request.status is RequestStatus.RUNNING:
            self._speculation.keep_proposal(request, num_asked, draft, acceptance_probs)

    def _end_turns(self, outputs: OutputsByFrontEnd) -> None:
        """Follow the ends of requests in the running list and in resumable sessions."""
        self._lifecycle.clear_running()
        self._resumable_sessions.begin_turns(outputs)

    def _keep_proposals(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Keep the drafts that came with a result.

        An empty one says that no token was likely enough; a sequence whose KV the draft model has
        not completed yet is missing.
        """
        asked = dict(zip(output.lookahead_seq_ids, output.num_lookahead_tokens, strict=True))
        for seq_id, draft, acceptance_probs in zip(
            result.draft_seq_ids, result.draft_token_ids, result.draft_acceptance_probs, strict=True
        ):
            if self._rewound_until_step.get(seq_id, 0) < output.step:
                self.keep_proposal(seq_id, asked.get(seq_id, len(draft)), draft, acceptance_probs)

    def _apply_rows(
        self, output: SchedulerOutput, result: ModelRunnerOutput, outputs: OutputsByFrontEnd
    ) -> ImpossibleResultError | None:
        """Append the tokens of each row, in order, up to the first invalid row.

        Adds to `outputs`. Returns the error of the invalid row, with these outputs; None if all
        rows are valid.
        """
        self._fail_corrupted(result.failed_seq_ids, output.step, outputs)
        extras = RowExtras(output, result)
        requests, rewound_until_step = self._requests, self._rewound_until_step
        invalid: ImpossibleResultError | None = None
        try:
            for seq_id, token_ids, end in zip(
                result.seq_ids, result.sampled_token_ids, ends_of_rows(output), strict=True
            ):
                request = requests.get(seq_id)
                if request is None or (
                    rewound_until_step and rewound_until_step.get(seq_id, 0) >= output.step
                ):
                    self._num_discarded += len(token_ids)
                elif request.pooling_params is not None:
                    self._apply_pooled(request, token_ids, end, extras, outputs)
                else:
                    self._apply_tokens(request, token_ids, end, extras, outputs)
        except ImpossibleResultError as error:
            error.outputs = outputs
            invalid = error
        if extras.candidates:
            for group in self._beams.advance_groups():
                self._finish_beams(group, outputs)
        if self._lifecycle.recently_ended:
            self._lifecycle.forget_ended(output.step)
        if self._without_image:
            self._without_image &= self._lifecycle.recently_ended.keys()
        return invalid

    def _apply_tokens(
        self,
        request: Request,
        token_ids: list[int],
        end: int,
        extras: RowExtras,
        outputs: OutputsByFrontEnd,
    ) -> None:
        """Append the tokens of a row to its request, and send them with the row's extras.

        A beam reports candidates instead, and sends nothing; neither does a chunk of a prompt
        without extras. end: number of computed tokens. Raises ImpossibleResultError.
        """
        tokens, num_new = request.all_token_ids, len(token_ids)
        token_index = len(tokens) - request.num_prompt_tokens
        num_positions = num_sampled_positions(len(tokens), end)
        if num_new > num_positions or (num_positions and not num_new):
            if self._beams.report_candidates(request, extras.candidates.get(request.seq_id)):
                return
            raise ImpossibleResultError(f"sequence {request.seq_id} has {num_new} tokens at {end}")
        if request.num_output_placeholders:
            request.num_output_placeholders -= num_positions
        if num_new and request.skip_reading_prefix_cache:
            self._lifecycle.allow_cached_prompt(request)
        num_accepted, has_ended = 0, False
        # Nearly every row is one token that ends nothing.
        if (
            num_new == num_positions == 1
            and token_index + 1 < request.max_tokens
            and token_ids[0] not in request.stop_ids
            and request.repetition is None
        ):
            tokens.append(token_ids[0])
        elif num_new:
            token_ids = self._accept_tokens(request, token_ids, num_positions - 1, extras)
            num_accepted = min(num_new - 1, len(token_ids))  # the last sampled one is no draft
            has_ended = request.is_finished
        elif request.seq_id not in extras.prompt_logprobs and request.seq_id not in extras.experts:
            return
        if self._learns_outputs and num_new and not has_ended:
            self._speculation.add_outputs(request, num_new)
        if has_ended or num_accepted or extras.for_clients or request.has_events:
            output = _full_output(request, token_index, token_ids, num_accepted, extras)
        else:
            output = EngineCoreOutput(request.request_id, request.choice, token_index, token_ids)
        front_end = request.front_end_index
        if front_end not in outputs:
            outputs[front_end] = []
        outputs[front_end].append(output)

    def _apply_pooled(
        self,
        request: Request,
        token_ids: list[int],
        end: int,
        extras: RowExtras,
        outputs: OutputsByFrontEnd,
    ) -> None:
        """End a pooled request whose prompt is complete, with its result.

        end: number of computed tokens. Raises ImpossibleResultError.
        """
        data = extras.pooled.get(request.seq_id)
        is_complete = end >= request.num_tokens
        if token_ids or is_complete == (data is None):
            raise ImpossibleResultError(
                f"sequence {request.seq_id} is pooled and has no valid result at {end}"
            )
        if data is None:
            return
        request.num_output_placeholders = 0
        self._lifecycle.finish_request(request, RequestStatus.FINISHED_STOPPED)
        outputs.setdefault(request.front_end_index, []).append(
            EngineCoreOutput(
                request.request_id,
                request.choice,
                0,
                [],
                request.status.finish_reason,
                events=request.pop_events(),
                pooler_output=data,
            )
        )

    def fail_request(self, request: Request, error: ErrorInfo, outputs: OutputsByFrontEnd) -> None:
        """End a failed request; all rows of a beam search end with the one that has the error.

        Adds its final output to `outputs`; earlier tokens have been sent already.
        """
        output = EngineCoreOutput(
            request.request_id,
            request.choice,
            request.num_output_tokens,
            [],
            FinishReason.ERROR,
            events=request.pop_events(),
            error=error,
        )
        self._lifecycle.finish_request(request, RequestStatus.FINISHED_ERROR)
        if request.sampling_params.beam_width:
            self._lifecycle.abort_request(request.request_id)
        outputs.setdefault(request.front_end_index, []).append(output)

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

        This includes requests that have ended, whose blocks may have been found since. Requests
        that ended for want of an image keep what was computed before it.
        """
        for seq_id in seq_ids:
            request = self._requests.get(seq_id)
            if self._rewound_until_step.get(seq_id, 0) >= step or seq_id in self._without_image:
                continue
            if request is not None:
                self._discard_kv(request)
                request.num_computed_tokens = 0
                self._num_corrupted += 1
                if self._adapters is not None:
                    self._adapters.count_corrupted(request)
                self.fail_request(request, _corrupted_error(request), outputs)
            elif seq_id in self._lifecycle.recently_ended:
                self._discard_kv(self._lifecycle.recently_ended[seq_id][0])

    def _fail_images(
        self, failing: Sequence[FailedImage], last_step: int, outputs: OutputsByFrontEnd
    ) -> None:
        """End requests with an image that could not be encoded; its KV becomes unfindable.

        A request with other pixels of the image goes on, with tokens computed again if need be.
        """
        for failed in failing:
            request = failed.request
            first = request.mm_features[failed.index].offset
            is_unfinished = request.seq_id in self._requests
            if request.scheduled_at is not None:
                if not is_unfinished or not failed.has_other_pixels:
                    self._without_image.add(request.seq_id)
                # KV that it found when it began is that of others, who discard it if it is wrong.
                found = 0 if request.num_preemptions else request.num_cached_tokens
                self._kv_transfer.discard_content(request, max(first, found))
                self._agent_sessions.drop_corrupt_prefix(request)
            if not is_unfinished:
                continue
            if not failed.has_other_pixels:
                request.num_computed_tokens = min(request.num_computed_tokens, first)
                message = f"image {failed.index + 1} of the prompt could not be encoded"
                self.fail_request(request, ErrorInfo("internal", message), outputs)
                continue
            # A preempted request may have a row in flight that has computed the image.
            is_preempted = request.num_preemptions > 0
            is_running = request.status is RequestStatus.RUNNING
            if request.num_computed_tokens > first or (is_preempted and is_running):
                self._kv_transfer.rewind_request(request, 0, last_step)
            elif is_preempted:
                self._kv_transfer.ignore_results(request, last_step)

    def _discard_kv(self, request: Request) -> None:
        self._kv_transfer.discard_content(request)
        self._agent_sessions.drop_corrupt_prefix(request)

    def _accept_tokens(
        self, request: Request, token_ids: list[int], num_drafted: int, extras: RowExtras
    ) -> list[int]:
        """Append the tokens of a row up to the one that ends the request; return those.

        num_drafted: tokens of its draft. The extras of tokens after the end are dropped. Raises
        ImpossibleResultError.
        """
        if request.sampling_params.beam_width:
            raise ImpossibleResultError(
                f"sequence {request.seq_id} has a token instead of candidates"
            )
        if num_drafted:
            draft = extras.drafts.get(request.seq_id, [])
            self._rewind_rejected(request, token_ids, draft, num_drafted)
        appended = self._append_tokens(request, token_ids, num_drafted)
        num_cut = len(token_ids) - len(appended)
        if num_cut:
            self._num_discarded += num_cut
            extras.cut_row(request.seq_id, len(appended), num_cut)
        return appended

    def _rewind_rejected(
        self, request: Request, token_ids: list[int], draft: list[int], num_drafted: int
    ) -> None:
        """Count the KV of the rejected part of a draft as not computed.

        It stays in the request's blocks, is not findable, and the next step overwrites it. The
        placeholders of all positions are taken back already. Raises ImpossibleResultError if the
        tokens do not begin with tokens of the draft.
        """
        num_accepted = len(token_ids) - 1
        if len(draft) != num_drafted or token_ids[:-1] != draft[:num_accepted]:
            raise ImpossibleResultError(
                f"sequence {request.seq_id} has other tokens than those that were drafted"
            )
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= num_drafted - num_accepted

    def _record_draft(self, request: Request, num_drafted: int, num_new: int, num_cut: int) -> None:
        """Count the accepted tokens of a draft that the request got.

        num_new: tokens that the request got. num_cut: those after its end, which do not count, as
        if they had not been tried.
        """
        num_accepted = num_new if num_cut else num_new - 1
        num_tried = num_accepted if num_cut else num_drafted
        request.num_accepted_drafts += num_accepted
        self._speculation.record_verified(request, num_drafted, num_tried, num_accepted)

    def _append_tokens(self, request: Request, token_ids: list[int], num_drafted: int) -> list[int]:
        """Append tokens up to the one that ends the request; return the appended ones.

        num_drafted: tokens of its draft. Accepted ones are charged to the tenant. Those after the
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
            outputs.setdefault(row.front_end_index, []).append(
                EngineCoreOutput(
                    row.request_id,
                    row.choice,
                    0,
                    token_ids,
                    finish_reason=row.status.finish_reason,
                    stop_reason=row.stop_reason,
                    events=row.pop_events(),
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


def _corrupted_error(request: Request) -> ErrorInfo:
    lora = request.lora_request
    if lora is None:
        return CORRUPTED
    message = (
        f"the model's logits contain NaN or infinity with the adapter {shown(lora.lora_name)}; "
        "this request cannot go on"
    )
    return ErrorInfo("internal", message, "model")


def _full_output(
    request: Request,
    token_index: int,
    token_ids: list[int],
    num_accepted: int,
    extras: RowExtras,
) -> EngineCoreOutput:
    """Return the output of a row with its extras, events, and the end of its request."""
    seq_id = request.seq_id
    return EngineCoreOutput(
        request.request_id,
        request.choice,
        token_index,
        token_ids,
        finish_reason=request.status.finish_reason if request.is_finished else None,
        stop_reason=request.stop_reason,
        events=request.pop_events(),
        logprobs=extras.logprobs.get(seq_id),
        prompt_logprobs=extras.prompt_logprobs.get(seq_id),
        kv_transfer_params=request.kv_transfer_params,
        routed_experts=extras.experts.get(seq_id),
        num_accepted_drafts=num_accepted,
    )
