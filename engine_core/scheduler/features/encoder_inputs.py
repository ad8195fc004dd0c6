"""Images as the scheduler sees them: which the next step encodes, and whose output workers keep.

A step encodes before it computes tokens. So the tokens of an image can be computed in the step that
completes its output, or in any later one while the output is kept:

    step N      encode rows [0, 40) of an image     tokens up to the image
    step N+1    encode rows [40, 64)                tokens of the image and after it

Encoding an image may take longer than a step should, so it is done in slices. Only one image at a
time is encoded in part, because its activations take memory; it goes on in every step until it is
complete. Then images of running requests are begun, in the order of the running list, and at last
those of waiting requests, in the order of admission. A waiting request that MAX_PASSES images of
running requests have passed comes before them, since text before an image lets ever more run.

A request whose first chunk would be empty is parked, and others pass. So is one that would run and
then wait for an image, if half of the running requests may come to that: a request that computes
nothing takes the place of another one. Such a request *claims* the outputs that it waits for, and
so does a running request. It keeps those of the images that follow, up to the first one that lacks
its output. An output that nothing claims stays until its rows are needed for another one. Rows are
taken from requests that are parked, too, and for a running request from all that wait. So no
request waits for rows that only a later one frees.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import SchedulerFeature
from engine_core.scheduler.features.encoder_cache import (
    PARTS,
    EncoderBudget,
    EncoderCacheManager,
    EncoderOutput,
)
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.queues.policies import FairSchedulingPolicy
from engine_core.scheduler.request_lifecycle import RequestLifecycle
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.multimodal import EncoderLimits, EncoderSlice
from proto.messages.scheduler_output import SchedulerOutput
from proto.messages.stats import EncoderStats

MAX_PASSES: Final = 4
"""Images of running requests that are begun while a parked request waits to begin one."""


@dataclass(slots=True)
class _Wait:
    """A parked request, and the tokens [first, end) of the chunk for which it lacks an image.

    is_whole: all of them have to be computed in one step. num_passes: images that were begun for
    running requests since it waits, or since it began one itself.
    """

    request: Request
    first: int
    end: int
    is_whole: bool
    num_passes: int = 0


@dataclass(frozen=True, slots=True)
class _PlannedSlice:
    """Encoder work of the step that is planned, and a request that needs it."""

    piece: EncoderSlice
    request: Request


@dataclass(frozen=True, slots=True)
class EncodedShare:
    """Encoder work that was done for a tenant: rows of output, and the seconds they took."""

    tenant: int
    num_rows: float
    seconds: float


@dataclass(frozen=True, slots=True)
class FailedImage:
    """An image that could not be encoded, of a request that relied on it; index: in the prompt.

    has_other_pixels: its own file, of another front end, was not tried.
    """

    request: Request
    index: int
    has_other_pixels: bool


class EncoderInputs(SchedulerFeature):
    """Plans encoder work, and keeps requests from computing tokens of images without output.

    stalled: seq_ids of requests that compute fewer tokens in this step, or none, because an output
    is missing; the set object stays the same.
    leaves_room: each running prompt leaves a token for every request after it. While one waits for
    the encoder others are admitted, and all together may need more than a step has when it goes on.

    resident_adapters: those that workers hold now; only read.

        begin_step ─▶ cut_chunk, of each request with images ─▶ end_planning ─▶ … ─▶ end_step
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_ENCODER

    def __init__(
        self,
        limits: EncoderLimits,
        lifecycle: RequestLifecycle,
        policy: FairSchedulingPolicy,
        chunks: ChunkRule,
        max_num_seqs: int,
        resident_adapters: Container[int],
    ) -> None:
        self.limits = limits
        self._resident_adapters = resident_adapters
        self.cache = EncoderCacheManager(limits.cache_size)
        self.stalled: set[int] = set()
        self.leaves_room = False
        self._running = lifecycle.running
        self._unblock = lifecycle.unblock
        self._policy = policy
        self._chunks = chunks
        self._max_lacking = chunks.max_running(max_num_seqs, self.num_whole_tokens) // 2
        self._rule = EncoderBudget(limits.max_input_tokens)
        self._budget = 0.0  # rows that are left of the step
        self._slices: list[_PlannedSlice] = []  # of the step that is planned
        self._parked: dict[int, _Wait] = {}  # by seq_id
        self._runs: dict[int, list[tuple[int, int]]] = {}  # of images, by request id
        self._causes: dict[int, list[Request]] = {}  # of the slices of steps in flight, by step
        self._charged_rows: dict[int, dict[bytes, float]] = {}  # by seq_id and image
        self._shares: list[EncodedShare] = []
        self._num_queries = self._num_hits = 0
        self._num_rows = self._seconds = 0.0

    # A step

    @property
    def has_work(self) -> bool:
        """Whether a step would encode something, although no request runs or is ready."""
        return bool(self._parked) or self.cache.partial is not None

    def begin_step(self, spare_seconds: float, num_prefilling: int) -> float:
        """Begin to plan a step: go on with the image that is encoded in part.

        spare_seconds: for which decoding requests can wait; infinite without any. num_prefilling:
        running requests with more than one token to compute. Returns the seconds that the encoder
        work of the step may take, with an image that is begun for a request that waits for one.
        """
        holds_any = self.holds_any
        if self.stalled:
            self.leaves_room = True
        elif not num_prefilling:
            self.leaves_room = False
        self.stalled.clear()
        self._budget = self._rule.rows(spare_seconds)
        cache = self.cache
        for seq_id in list(cache.claiming):
            self._release_passed(seq_id)
        if cache.partial is not None:
            self._advance(cache.partial)
        if self._parked and cache.partial is None:
            self._serve_passed()
        num_rows = sum(planned.piece.end - planned.piece.start for planned in self._slices)
        if holds_any and cache.partial is None:
            num_rows += min(self._budget, self.limits.vision.max_embeds)
        return self._rule.seconds(num_rows)

    @property
    def holds_any(self) -> bool:
        """Whether requests compute less in the planned step for want of an output."""
        return bool(self.stalled or self._parked)

    @property
    def num_whole_tokens(self) -> int:
        """Tokens of the longest image that cannot be cut; 1 if all can."""
        vision = self.limits.vision
        return vision.max_embeds if vision.is_bidirectional else 1

    @property
    def least_prompt_tokens(self) -> int:
        """Prompt tokens for which a step must have room: of an image that cannot be cut.

        Of those whose output is complete by this step.
        """
        if not self.limits.vision.is_bidirectional:
            return 0
        return max(
            (
                stop - start
                for output in self.cache
                if output.is_complete
                for request in output.users.values()
                for start, stop in self._image_runs(request)
            ),
            default=0,
        )

    def cut_chunk(self, request: Request, first: int, num_new: int, most: int) -> int:
        """Return how many of `num_new` tokens from position `first` on this step may compute.

        All of them, those before an image whose output is not complete by this step, or 0. An image
        whose tokens attend to each other in both directions is not cut either: the chunk ends
        before it or, if it begins in it, behind it, with up to `most` tokens.
        """
        is_running = request.status is RequestStatus.RUNNING
        end = self._end_by_outputs(
            request,
            first,
            first + num_new,
            may_begin=is_running or not self._parked,
            is_urgent=is_running,
        )
        if end > first and self.limits.vision.is_bidirectional:
            end = self._end_outside_images(request, first, end, first + most)
        return end - first

    def first_chunk(self, request: Request, first: int, num_new: int, most: int) -> int:
        """Return `cut_chunk` of a waiting request; it is 0 for one that has to be parked.

        Without chunked prefill the prompt waits until all of its images are encoded, if the workers
        have room for all of them. If running requests that lack an output have half of the places
        already, it waits in any case, for as many of its images as the workers have room for.
        """
        end = first + num_new
        self._parked.pop(request.seq_id, None)
        num_planned = self.cut_chunk(request, first, num_new, most)
        if request.seq_id in self.stalled:
            is_whole = num_planned < num_new and self._must_be_whole(request, first)
            if is_whole or not num_planned:
                self._parked[request.seq_id] = _Wait(request, first, end, is_whole)
                return 0
        kept = self._end_of_kept(request, first)
        if self._lacks_output(request, first, kept) and self._has_most_lacking():
            self.stalled.add(request.seq_id)
            self._parked[request.seq_id] = _Wait(request, first, kept, is_whole=True)
            return 0
        return num_planned

    def is_parked(self, request: Request) -> bool:
        return request.seq_id in self._parked

    def begin_admission(self, plan: StepPlan) -> None:
        if self._parked:
            self._serve_parked(is_urgent=False)

    def end_admission(self) -> None:
        """Let a parked request have rows that ready ones claim, if otherwise nothing is done."""
        if self._parked and not self._slices and not self._running:
            self._serve_parked(is_urgent=True)

    def end_planning(self, plan: StepPlan, step: int) -> None:
        """Put the encoder work into a plan. step: its number."""
        planned, self._slices = self._slices, []
        plan.encoder_slices = [each.piece for each in planned]
        plan.free_mm_hashes = self.cache.pop_freed()
        if planned:
            self._causes[step] = [each.request for each in planned]
        for piece in plan.encoder_slices:
            output = self._output_of(piece)
            assert output is not None, "nothing is encoded for no request"
            if not output.first_step:
                output.first_step = step

    def end_step(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[FailedImage]:
        """Process the encoder work of a step; return the images without output of requests.

        Some of these requests may have ended.
        """
        slices = step.scheduled_encoder_inputs
        if not slices:
            return []
        num_rows = sum(piece.end - piece.start for piece in slices)
        self._num_rows += num_rows
        self._seconds += result.encoder_seconds
        self._share_out(step, result.encoder_seconds / num_rows)
        is_measured = True  # workers have computed all slices
        failing: list[FailedImage] = []
        for piece in slices:
            output = self._output_of(piece)
            if output is None or not 0 < output.first_step <= step.step:
                is_measured = False
                continue  # it was dropped, and may have been begun again
            mm_hash = output.feature.mm_hash
            if mm_hash in result.failed_mm_hashes:
                for request in output.readers.values():
                    hashes = [feature.mm_hash for feature in request.mm_features]
                    index = hashes.index(mm_hash)
                    is_same = request.mm_features[index].pixels == output.feature.pixels
                    failing.append(FailedImage(request, index, has_other_pixels=not is_same))
                self.cache.drop(output)
                is_measured = False
            elif piece.is_last:
                output.is_confirmed = True
                output.readers.clear()
        if is_measured:
            self._rule.learn(num_rows, result.encoder_seconds)
        return failing

    # Life of a request

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        """Note that a request may have found KV of an image that is not known to be good yet."""
        for feature in request.mm_features:
            output = self.cache.get(feature.mm_hash)
            if output is not None and not output.is_confirmed:
                output.readers[request.seq_id] = request

    def on_preempted(self, request: Request) -> None:
        """Give back what a request has claimed, except an image that is encoded since before."""
        for output in self.cache.claims_of(request.seq_id):
            if output.is_complete or not output.first_step:
                self._release(request.seq_id, output)

    def on_released(self, request: Request) -> None:
        if request.mm_features:
            self.release_all(request)
            self._runs.pop(request.request_id, None)
            self._charged_rows.pop(request.seq_id, None)

    def release_all(self, request: Request) -> None:
        """End all claims of a request, and encode nothing for it."""
        self._parked.pop(request.seq_id, None)
        for output in self.cache.claims_of(request.seq_id):
            self._release(request.seq_id, output)

    def begin_worker_epoch(self) -> None:
        """Prepare for workers that hold nothing: requests ask for their images again."""
        self.cache.forget_workers()
        self._slices.clear()
        self._causes.clear()
        parked, self._parked = self._parked, {}
        for wait in parked.values():
            if wait.request.status is self.status:
                self._unblock(wait.request)

    def in_flight(self) -> Iterator[tuple[Request, int]]:
        """Return requests with an image in encoder work whose result has not arrived.

        With the number of their tokens up to the end of this image.
        """
        for output in self.cache:
            if not output.is_confirmed:
                for request in output.users.values():
                    yield (
                        request,
                        max(
                            feature.end
                            for feature in request.mm_features
                            if feature.mm_hash == output.feature.mm_hash
                        ),
                    )

    def pop_shares(self) -> list[EncodedShare]:
        """Return what was encoded for tenants since the last call.

        Without what was encoded for the same request once more: that is work that was undone.
        """
        shares, self._shares = self._shares, []
        return shares

    def pop_stats(self) -> EncoderStats:
        """Return the use of the cache now, and counts since the last call."""
        cache = self.cache
        stats = EncoderStats(
            1.0 - cache.num_free_rows / cache.capacity,
            self._num_queries,
            self._num_hits,
            self._num_rows,
            self._seconds,
        )
        self._num_queries = self._num_hits = 0
        self._num_rows = self._seconds = 0.0
        return stats

    # Internals

    def _end_by_outputs(
        self, request: Request, first: int, end: int, *, may_begin: bool, is_urgent: bool
    ) -> int:
        """Return where the chunk [first, end) has to end for want of an output.

        Claims the outputs of its images. may_begin: begin to encode what is missing. is_urgent: as
        in `EncoderCacheManager.begin_output`.
        """
        self.stalled.discard(request.seq_id)
        for index, feature in enumerate(request.mm_features):
            if feature.end <= first:
                continue
            if feature.offset >= end:
                break
            output = self.cache.get(feature.mm_hash)
            if output is not None:
                self._claim(request, output)
            elif may_begin:
                output = self._begin(request, index, is_urgent=is_urgent)
            if output is None or not output.is_complete:
                end = max(first, feature.offset)
                self.stalled.add(request.seq_id)
                break
        kept = self._claims_in_order(request, first)
        for output in self.cache.claims_of(request.seq_id):
            if output.is_complete and output not in kept:
                self._release(request.seq_id, output)
        return end

    def _share_out(self, step: SchedulerOutput, row_seconds: float) -> None:
        """Note for which tenants a step has encoded how much."""
        causes = self._causes.pop(step.step)
        for piece, request in zip(step.scheduled_encoder_inputs, causes, strict=True):
            assert piece.feature is not None
            mm_hash, start = piece.feature.mm_hash, piece.start
            if not request.is_finished:
                charged = self._charged_rows.setdefault(request.seq_id, {})
                start = max(start, charged.get(mm_hash, 0.0))
                charged[mm_hash] = max(start, piece.end)
            if start < piece.end:
                num_rows = piece.end - start
                self._shares.append(EncodedShare(request.tenant, num_rows, num_rows * row_seconds))

    def _claim(self, request: Request, output: EncoderOutput) -> None:
        if request.seq_id not in output.users:
            self.cache.claim(request, output)
            self._num_queries += 1
            self._num_hits += 1

    def _begin(self, request: Request, index: int, *, is_urgent: bool) -> EncoderOutput | None:
        """Begin to encode an image for a request; None for no budget or room in this step."""
        feature = request.mm_features[index]
        least = 1.0 / PARTS if self.limits.splits else float(feature.num_embeds)
        if self.cache.partial is not None or self._budget < least or self._lacks_adapter(request):
            return None
        output = self.cache.begin_output(feature, request, index, is_urgent=is_urgent)
        if output is not None:
            self._num_queries += 1
            self._advance(output)
            if request.seq_id in self._parked:
                self._parked[request.seq_id].num_passes = 0
            elif request.status is RequestStatus.RUNNING:
                for wait in self._parked.values():
                    wait.num_passes += 1
        return output

    def _lacks_adapter(self, request: Request) -> bool:
        """Return whether an image cannot be begun, because the workers do not hold its adapter."""
        lora = request.lora_request
        if lora is None or not lora.changes_images:
            return False
        return lora.lora_int_id not in self._resident_adapters

    def _advance(self, output: EncoderOutput) -> None:
        """Plan as much of an image as the step has budget for."""
        start, feature = output.num_done, output.feature
        end = min(float(feature.num_embeds), start + int(self._budget * PARTS) / PARTS)
        self._budget -= end - start
        request = output.users.get(output.seq_id) or next(iter(output.users.values()))
        lora, lora_int_id, lora_scale = request.lora_request, 0, 1.0
        if lora is not None and lora.changes_images:
            lora_int_id, lora_scale = lora.lora_int_id, lora.scale
        piece = EncoderSlice(
            output.seq_id, output.index, start, end, feature, lora_int_id, lora_scale
        )
        self._slices.append(_PlannedSlice(piece, request))
        self.cache.advance(output, end)

    def _release(self, seq_id: int, output: EncoderOutput) -> None:
        """End a claim; after the last one, what only this plan encodes returns to the budget."""
        if len(output.users) == 1 and not (output.is_complete and output.first_step):
            for place, planned in enumerate(self._slices):
                piece = planned.piece
                if piece.feature is output.feature:
                    del self._slices[place]
                    self._budget += piece.end - piece.start
                    output.num_done = piece.start
                    break
        self.cache.release(seq_id, output)

    def _release_passed(self, seq_id: int) -> None:
        """End the claims of a running request on images that it has computed, and out of order."""
        outputs = self.cache.claims_of(seq_id)
        request = outputs[0].users[seq_id]
        if request.status is not RequestStatus.RUNNING:
            return
        kept = self._claims_in_order(request, request.num_computed_tokens)
        for output in outputs:
            if output not in kept:
                self._release(seq_id, output)

    def _claims_in_order(self, request: Request, first: int) -> list[EncoderOutput]:
        """Return the claimed outputs of the images from position `first` on, without a gap.

        Up to one that is not complete. So a running request that holds rows can compute, and does
        not wait for rows of another one that waits for its rows.
        """
        found: list[EncoderOutput] = []
        for feature in request.mm_features:
            if feature.end <= first:
                continue
            output = self.cache.get(feature.mm_hash)
            if output is None or request.seq_id not in output.users:
                break
            found.append(output)
            if not output.is_complete:
                break
        return found

    def _serve_parked(self, *, is_urgent: bool) -> None:
        """Begin to encode images of parked requests, in the order of admission, within the budget.

        Unblocks those that have what they need, also if another request had it encoded, and those
        whose adapter was evicted, so that they ask for it again. is_urgent: as in
        `EncoderCacheManager.begin_output`.
        """
        for seq_id, wait in list(self._parked.items()):
            if wait.request.status is not self.status:
                del self._parked[seq_id]  # something else holds it, or it is asked again
        may_begin = True
        for wait in self._parked_in_order():
            request, first = wait.request, wait.first
            end = self._end_by_outputs(
                request, first, wait.end, may_begin=may_begin, is_urgent=is_urgent
            )
            is_held = end < wait.end if wait.is_whole else end == first
            if is_held and not self._lacks_adapter(request):
                may_begin = False
            else:
                del self._parked[request.seq_id]
                self._unblock(request)

    def _serve_passed(self) -> None:
        """Begin to encode images of parked requests that many images have passed."""
        for wait in self._parked_in_order():
            request = wait.request
            if wait.num_passes >= MAX_PASSES and request.status is self.status:
                self._end_by_outputs(request, wait.first, wait.end, may_begin=True, is_urgent=False)

    def _parked_in_order(self) -> list[_Wait]:
        """Return parked requests in the order of admission; of equal ones the first parked first.

        Fairness among tenants changes this order with every admission.
        """
        policy = self._policy
        return sorted(self._parked.values(), key=lambda wait: policy.admission_key(wait.request))

    def _output_of(self, piece: EncoderSlice) -> EncoderOutput | None:
        return None if piece.feature is None else self.cache.get(piece.feature.mm_hash)

    def _must_be_whole(self, request: Request, first: int) -> bool:
        """Return whether the tokens of a prompt from `first` on go into one step."""
        num_missing = request.num_tokens - first
        if self._chunks.chunked or num_missing > self._chunks.token_budget:
            return False
        return self._end_of_kept(request, first) == request.mm_end

    def _end_of_kept(self, request: Request, first: int) -> int:
        """Return the end of the images from `first` on for which workers have room at once."""
        rows: dict[bytes, int] = {}
        end = first
        for feature in request.mm_features:
            if feature.end > first:
                rows[feature.mm_hash] = feature.num_embeds
                if sum(rows.values()) > self.cache.capacity:
                    break
                end = feature.end
        return end

    def _lacks_output(self, request: Request, first: int, end: int) -> bool:
        """Return whether an image of the tokens [first, end) has no complete output."""
        for feature in request.mm_features:
            if feature.end > first and feature.offset < end:
                output = self.cache.get(feature.mm_hash)
                if output is None or not output.is_complete:
                    return True
        return False

    def _has_most_lacking(self) -> bool:
        """Return whether no further running request may lack an output."""
        num_lacking = sum(
            request.num_computed_tokens < request.mm_end
            and self._lacks_output(request, request.num_computed_tokens, request.mm_end)
            for request in self._running
        )
        return num_lacking >= self._max_lacking

    def _end_outside_images(self, request: Request, first: int, end: int, last: int) -> int:
        """Return the end of a chunk moved out of an image; `last`: where it may end at most."""
        for start, stop in self._image_runs(request):
            if start < end < stop:
                if first < start:
                    return start
                return stop if stop <= last else first
        return end

    def _image_runs(self, request: Request) -> list[tuple[int, int]]:
        """Return the ranges of image tokens in a prompt, in order."""
        runs = self._runs.get(request.request_id)
        if runs is None:
            image_token_id = self.limits.vision.image_token_id
            runs = self._runs[request.request_id] = []
            for feature in request.mm_features:
                tokens = request.prompt_token_ids[feature.offset : feature.end]
                for position, token_id in enumerate(tokens, feature.offset):
                    if token_id != image_token_id:
                        continue
                    if runs and runs[-1][1] == position and position > feature.offset:
                        runs[-1] = (runs[-1][0], position + 1)
                    else:
                        runs.append((position, position + 1))
        return runs
