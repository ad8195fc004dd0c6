"""The message for the workers, built from the plan of a step.

OutputBuilder    describes a sequence in full once, and only what has changed after that
ForcedTokens     tokens that the engine chose instead of the workers (beam search)
"""

from engine_core.kv_cache.manager import NO_NEW_BLOCKS, KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.features.grammars import Grammars
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput


class ForcedTokens:
    """Tokens chosen by the engine, and rows that were replaced by others, since the last step.

    A worker appends the tokens that it sampled itself. In a beam search the engine chooses the next
    token, or gives a row the tokens and blocks of another; the next step tells the worker.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._replaced: set[int] = set()

    def force_token(self, request: Request, token_id: int) -> None:
        """Note that the last token of a request was chosen by the engine."""
        self._tokens[request.seq_id] = token_id

    def replace_row(self, request: Request) -> None:
        """Note that tokens and block table of a request are different now."""
        self._replaced.add(request.seq_id)

    def forget_sequence(self, seq_id: int) -> None:
        self._tokens.pop(seq_id, None)
        self._replaced.discard(seq_id)

    def pop_for_step(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Return the seq_ids of the plan with a forced token, and the tokens.

        Replaced rows are moved to the admitted requests of the plan, which are described in full
        and need no forced token. Sequences outside of the plan wait for a later step.
        """
        if not self._tokens and not self._replaced:
            return [], []
        for request in [planned for planned in plan.continued if planned.seq_id in self._replaced]:
            plan.resend_full(request)
        for request in plan.admitted:
            self.forget_sequence(request.seq_id)
        seq_ids = [request.seq_id for request in plan.continued if request.seq_id in self._tokens]
        return seq_ids, [self._tokens.pop(seq_id) for seq_id in seq_ids]


class OutputBuilder:
    """Builds the messages, and keeps which sequences the workers know and which have ended."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        forced_tokens: ForcedTokens,
        grammars: Grammars | None,
        epoch: int,
    ) -> None:
        self._kv_cache = kv_cache
        self._grammars = grammars
        self._forced_tokens = forced_tokens
        self.epoch = epoch
        self._known: set[int] = set()
        self._finished: list[int] = []
        self.step = 0

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch of workers that know no sequence yet."""
        self.epoch = epoch
        self._known.clear()
        self._finished.clear()

    @property
    def has_finished_seq_ids(self) -> bool:
        """Whether sequences have ended that no step has named to the workers yet."""
        return bool(self._finished)

    def finish_sequence(self, seq_id: int) -> None:
        """Name an ended sequence to the workers in the next step."""
        if seq_id in self._known:
            self._known.remove(seq_id)
            self._finished.append(seq_id)

    def build_output(self, plan: StepPlan) -> SchedulerOutput:
        """Return the message for the next step; called before the counters of requests advance."""
        self.step += 1
        forced = self._forced_tokens.pop_for_step(plan)
        new: list[NewRequestData] = []
        resumed: list[Request] = []
        resumed_tokens: list[int] = []
        for request, num_tokens in zip(plan.admitted, plan.admitted_tokens, strict=True):
            if request.seq_id in self._known:
                resumed.append(request)
                resumed_tokens.append(num_tokens)
            else:
                self._known.add(request.seq_id)
                new.append(self._describe(request, num_tokens))
        finished, self._finished = self._finished, []
        block_copies, state_copies = self._kv_cache.pop_copies()
        return SchedulerOutput(
            epoch=self.epoch,
            step=self.step,
            new_requests=new,
            cached_requests=self._changes(plan, resumed, resumed_tokens, forced),
            total_num_scheduled_tokens=sum(plan.continued_tokens) + sum(plan.admitted_tokens),
            finished_seq_ids=finished,
            preempted_seq_ids=[request.seq_id for request in plan.preempted],
            block_copies=block_copies,
            state_copies=state_copies,
            constrained_seq_ids=(
                [] if self._grammars is None else self._grammars.constrained_seq_ids(plan)
            ),
            spec_decode_seq_ids=list(plan.drafts),
            scheduled_spec_decode_tokens=list(plan.drafts.values()),
            lookahead_seq_ids=list(plan.lookahead),
            num_lookahead_tokens=list(plan.lookahead.values()),
            min_draft_acceptance_prob=plan.min_draft_acceptance_prob,
            scheduled_encoder_inputs=plan.encoder_slices,
            free_encoder_mm_hashes=plan.free_mm_hashes,
        )

    def _describe(self, request: Request, num_tokens: int) -> NewRequestData:
        lora = request.lora_request
        return NewRequestData(
            seq_id=request.seq_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            sampling_params=request.sampling_params,
            seed=request.seed,
            choice=request.choice,
            block_ids=self._kv_cache.block_ids(request.seq_id),
            num_computed_tokens=request.num_computed_tokens,
            num_scheduled_tokens=num_tokens,
            pooling_params=request.pooling_params,
            extra_key=int.from_bytes(request.extra_keys.digest[:8], "little"),
            prompt_embeds=request.extra_keys.prompt_embeds,
            lora_int_id=0 if lora is None else lora.lora_int_id,
            lora_scale=1.0 if lora is None else lora.scale,
            mm_features=list(request.mm_features),
        )

    def _changes(
        self,
        plan: StepPlan,
        resumed: list[Request],
        resumed_tokens: list[int],
        forced: tuple[list[int], list[int]],
    ) -> CachedRequestData:
        known = plan.continued + resumed
        return CachedRequestData(
            seq_ids=[request.seq_id for request in known],
            num_computed_tokens=[request.num_computed_tokens for request in known],
            num_scheduled_tokens=plan.continued_tokens + resumed_tokens,
            new_block_ids=[
                None if blocks is NO_NEW_BLOCKS else blocks for blocks in plan.continued_blocks
            ]
            + [self._kv_cache.block_ids(request.seq_id) for request in resumed],
            resumed_seq_ids=[request.seq_id for request in resumed],
            resumed_output_token_ids=[request.output_token_ids for request in resumed],
            forced_seq_ids=forced[0],
            forced_token_ids=forced[1],
        )
