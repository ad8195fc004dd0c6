"""The end of a step: what its result brings to each request.

Owns the counts of requests whose scores were no numbers and of tokens that came too late, and
remembers who is over while a step that computes it is on its way. Appends tokens and says who is
to be told what; requests that end leave through `finish` and `abort` of the scheduler.
"""

from collections.abc import Callable, Mapping, Sequence

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.beams import BeamGroup, BeamGroups
from engine_core.scheduler.client_outputs import ClientOutputs
from engine_core.scheduler.completion import completion
from engine_core.scheduler.corruption import corrupted_output
from engine_core.scheduler.step_results import ends_of_rows
from proto.engine_io import EngineCoreOutput, FirstTokenInfo
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput


class ResultPass:
    """Turns the rows of a result into outputs.

    requests: all that are not over, by handle; read only.
    finish: ends one request by itself. abort: ends all choices of a request id.
    withdraw: lets nobody find what a request computed.
    void_until: by handle, the last step whose row of a request does not count; read only.
    """

    def __init__(
        self,
        requests: Mapping[int, Request],
        kv_cache: KVCacheManager,
        beams: BeamGroups,
        max_model_len: int,
        finish: Callable[[Request, RequestStatus], None],
        abort: Callable[[int], int],
        withdraw: Callable[[Request], None],
        void_until: Mapping[int, int],
    ) -> None:
        self._requests = requests
        self._kv_cache = kv_cache
        self._beams = beams
        self._max_model_len = max_model_len
        self._finish = finish
        self._abort = abort
        self._withdraw = withdraw
        self._void_until = void_until
        self._num_corrupted = 0
        self._num_discarded = 0
        self._departed: dict[int, tuple[Request, int]] = {}

    def run(
        self, output: SchedulerOutput, result: ModelRunnerOutput, outputs: ClientOutputs
    ) -> str:
        """Take the rows in, in order, up to the first that cannot be; `outputs` is added to.

        Returns what is wrong with that one; empty where nothing is.
        """
        self._fail(result.failed_handles, output.step, outputs)
        logprobs = {row.handle: row.arrays for row in result.logprobs}
        prompt_logprobs = {row.handle: row.arrays for row in result.prompt_logprobs}
        candidates = {row.handle: row.arrays for row in result.candidates}
        requests, void_until, wrong = self._requests, self._void_until, ""
        for handle, token_ids, end in zip(
            result.handles, result.sampled_token_ids, ends_of_rows(output), strict=True
        ):
            request = requests.get(handle)
            if request is None or (void_until and void_until.get(handle, 0) >= output.step):
                self._num_discarded += len(token_ids)
                continue
            tokens, finish_reason, first = request.all_token_ids, None, None
            token_index = len(tokens) - request.num_prompt_tokens
            if bool(token_ids) is (end < len(tokens)):
                if self._beams.report(request, candidates.get(handle)):
                    continue
                wrong = f"sequence {handle} has {len(token_ids)} tokens at {end}"
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
                    wrong = f"sequence {handle} has a token, and is to have candidates"
                    break
                token_ids = self._append(request, token_ids)
                if handle not in requests:
                    finish_reason = request.status.finish_reason
            elif handle not in prompt_logprobs:
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
                    logprobs.get(handle) if logprobs else None,
                    prompt_logprobs.get(handle) if prompt_logprobs else None,
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
        self._departed[request.handle] = (request, step)

    def end_with(self, error: EngineCoreOutput, request: Request, outputs: ClientOutputs) -> None:
        """End a request that failed; the rows of a beam search end with the one that tells why."""
        is_row = self._beams.owns(request.request_id)
        self._finish(request, RequestStatus.FINISHED_ERROR)
        if is_row:
            self._abort(request.request_id)
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

    def _fail(self, handles: Sequence[int], step: int, outputs: ClientOutputs) -> None:
        """End requests whose scores are no numbers; nobody is to build on their KV.

        Also not on that of those who are over: their blocks may be found since.
        """
        for handle in handles:
            request = self._requests.get(handle)
            if self._void_until.get(handle, 0) >= step:
                continue
            if request is not None:
                self._withdraw(request)
                request.num_computed_tokens = 0
                self._num_corrupted += 1
                self.end_with(corrupted_output(request), request, outputs)
            elif handle in self._departed:
                self._withdraw(self._departed[handle][0])

    def _forget_departed(self, step: int) -> None:
        """The result of this step is here; they departed in the order of the steps."""
        for handle, (_, last_step) in list(self._departed.items()):
            if last_step > step:
                return
            del self._departed[handle]

    def _append(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append tokens up to the one that ends the request; returns those appended."""
        for count, token_id in enumerate(token_ids, 1):
            request.all_token_ids.append(token_id)
            status = completion(request, self._max_model_len)
            if status is not request.status:
                self._finish(request, status)
                return token_ids[:count]
        return token_ids

    def _end_beams(self, group: BeamGroup, outputs: ClientOutputs) -> None:
        """The finished hypotheses are the outputs of the choices; no row holds its own any more."""
        for row, token_ids in group.results():
            self._kv_cache.free(row)
            row.all_token_ids[row.num_prompt_tokens :] = token_ids
            row.max_tokens = row.sampling_params.max_tokens
            self._finish(row, completion(row, self._max_model_len))
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
