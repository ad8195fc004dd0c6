"""From the plan of a step to the message for the workers.

Owns the record of what the workers know: which sequences were described to them, and which of
those have ended since the last message.
"""

from engine_core.kv_cache.manager import NO_NEW_BLOCKS, KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.hooks import TokenConstraints
from engine_core.scheduler.step_plan import StepPlan
from proto.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

# A worker appends the tokens that it sampled. Where the engine chose the next token itself, or gave
# a sequence the tokens and blocks of another (beam search), the next step has to tell the worker.


class ForcedTokens:
    """One token, or a whole new row, for sequences that a worker knows."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._replaced: set[int] = set()

    def append(self, request: Request, token_id: int) -> None:
        """The last token of a request was not sampled."""
        self._tokens[request.seq_id] = token_id

    def replace(self, request: Request) -> None:
        """Tokens and block table of a request are other ones now."""
        self._replaced.add(request.seq_id)

    def forget(self, seq_id: int) -> None:
        """A sequence is over."""
        self._tokens.pop(seq_id, None)
        self._replaced.discard(seq_id)

    def take(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """What this step has to tell: seq_ids, and the token of each.

        A row that was replaced is described like one that comes back; what comes
        back is told everything anyway. What the step does not compute waits.
        """
        if not self._tokens and not self._replaced:
            return [], []
        for request in [each for each in plan.continued if each.seq_id in self._replaced]:
            plan.resend_full(request)
        for request in plan.admitted:
            self.forget(request.seq_id)
        seq_ids = [each.seq_id for each in plan.continued if each.seq_id in self._tokens]
        return seq_ids, [self._tokens.pop(seq_id) for seq_id in seq_ids]


class OutputBuilder:
    """Describes a sequence in full once, and only what changed after that."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        forced_tokens: ForcedTokens,
        constraints: TokenConstraints | None,
        epoch: int,
    ) -> None:
        self._kv_cache = kv_cache
        self._constraints = constraints
        self._forced_tokens = forced_tokens
        self.epoch = epoch
        self._known: set[int] = set()
        self._finished: list[int] = []
        self.step = 0

    def begin_epoch(self, epoch: int) -> None:
        """From now on the steps are for workers that know nobody."""
        self.epoch = epoch
        self._known.clear()
        self._finished.clear()

    @property
    def has_finished_seq_ids(self) -> bool:
        """The workers hold rows that they could give up."""
        return bool(self._finished)

    def forget(self, seq_id: int) -> None:
        """A sequence is over; the workers hear of it with the next step."""
        if seq_id in self._known:
            self._known.remove(seq_id)
            self._finished.append(seq_id)

    def build(self, plan: StepPlan) -> SchedulerOutput:
        """The message for the next step; call it before the counters advance."""
        self.step += 1
        dictated = self._forced_tokens.take(plan)
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
        return SchedulerOutput(
            epoch=self.epoch,
            step=self.step,
            new_requests=new,
            cached_requests=self._changes(plan, resumed, resumed_tokens, dictated),
            total_num_scheduled_tokens=sum(plan.continued_tokens) + sum(plan.admitted_tokens),
            finished_seq_ids=finished,
            preempted_seq_ids=[request.seq_id for request in plan.preempted],
            block_copies=self._kv_cache.pop_block_copies(),
            constrained_seq_ids=(
                [] if self._constraints is None else self._constraints.constrained_seq_ids(plan)
            ),
        )

    def _describe(self, request: Request, num_tokens: int) -> NewRequestData:
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
        )

    def _changes(
        self,
        plan: StepPlan,
        resumed: list[Request],
        resumed_tokens: list[int],
        dictated: tuple[list[int], list[int]],
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
            forced_seq_ids=dictated[0],
            forced_token_ids=dictated[1],
        )
