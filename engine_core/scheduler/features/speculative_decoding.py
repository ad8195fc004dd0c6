"""Speculative decoding in the scheduler: which requests are drafted for, how much of a draft a step
has room for, and what became of it.

A step computes a draft (`engine_core/speculation/proposer.py`) together with the last known token,
and the worker accepts it as far as the sampled tokens agree with it:

    computed      |------------ n ------------|
    step                                      |x|d|d|d|      x: the last known token, d: the draft
    sampled                                     a b c d
    accepted      a and b agree with the draft, c does not: the tokens a b c are known now, and the
                  KV of the first two drafts is valid; that of the third will be overwritten

What a rejected draft leaves behind is only KV that no request can find: blocks become findable up
to the known tokens, and windows free blocks up to the confirmed length. A recurrent state is never
that after a token of a draft: its slot has a log of them (worker/attention/state_cache.py), and the
next step computes the accepted ones again. So that the slots of a sequence are those of a step
without a draft, a draft then ends in the block after that of the last computed token.

With `--async-scheduling` a step is planned while the one before computes. A request whose step in
flight verifies a draft is left out, because how many tokens it gets is unknown; all others are
planned ahead as ever. A draft may follow a token in flight: its first token stands for that one,
which the worker knows by the time it computes the rest. So requests without drafts lose no overlap,
and the placeholders of a request are exact at every plan.

A model in the workers proposes drafts after a step (engine_core/speculation/worker_proposals.py).
It writes KV for tokens that are not scheduled yet, so the block tables need room for them:

    computed      |------------ n ------------|
    step                                      |x|d|d|d|
    lookahead                                         |p|p|p|p|   blocks cover [0, n + 4 + 4)

The scheduler allocates these blocks after all of its passes for the step, and only while enough
blocks stay free for what the running requests may need in the next step. The request's next tokens
use them.
"""

from collections.abc import Sequence
from typing import Protocol

from engine_core.kv_cache.manager import NO_NEW_BLOCKS, NO_PREFIX, KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.features.base import SchedulerFeature
from engine_core.scheduler.features.grammars import Grammars
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.request_lifecycle import RequestLifecycle
from engine_core.scheduler.step_plan import StepPlan


class DraftProvider(Protocol):
    """Proposes drafts for running requests, and learns which of their tokens were accepted.

    The daemon has `engine_core/speculation/drafting.py:Drafting`. It learns only of requests that
    may be drafted for (`is_drafted_for`), and the scheduler clears their
    drafts after each plan.
    """

    has_draft_model: bool
    """Whether a model in the workers proposes drafts; methods from `note_draft_kv` on serve it."""
    max_proposal_len: int
    """Tokens of a sequence beyond which that model proposes nothing."""

    def add_request(self, request: Request) -> None:
        """Begin to draft for a request that was admitted for the first time; `end_request` ends it.

        It may have outputs already, of an earlier epoch.
        """

    def add_outputs(self, request: Request, num_new: int) -> None:
        """Learn the last `num_new` of `request.all_token_ids`, which are verified.

        Also those of a preempted request.
        """

    def begin_step(self) -> None:
        """Do a part of work that would be too long for one step; called before each plan."""

    def fill_drafts(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> None:
        """Set `spec_token_ids` of those requests that shall be drafted for in the next step.

        Called once a step. A draft follows `all_token_ids`; the scheduler cuts it to the room that
        the step, the request and its grammar have. If a step of the request is in flight, the first
        token of the draft is that of the step, and is not computed again.

        requests: running ones that decode, in the order in which they are planned; each has one row
        besides its draft. limits: draft tokens that each of them has use for, without the token
        of a step in flight. num_other_tokens: further rows of the step, nearly all of prompts.
        """

    def record_verified(self, request: Request, num_tried: int, num_accepted: int) -> None:
        """Note how much of the last draft of a request was accepted; not called for a dropped one.

        Called before the `add_outputs` or `end_request` of the same result, and before the next
        `fill_drafts`. num_tried: verified tokens, without those after the end of the request, of
        which nothing is known.
        """

    def learn_step(self, num_rows: int, seconds: float) -> None:
        """Learn the duration of a step. num_rows: all of its tokens, drafts included."""

    def end_request(self, request: Request) -> None:
        """Forget a request that was added and has ended; its status says how."""

    def forget_outputs(self) -> None:
        """Forget the outputs of ended requests, as when the prefix cache is reset."""

    def pop_source_counts(self) -> dict[str, tuple[int, int]]:
        """Return (verified, accepted) tokens by drafter since the last call."""

    def note_draft_kv(self, request: Request, num_tokens: int) -> None:
        """Note how many leading tokens of a request have KV of the draft model.

        Called when a request that was added gets blocks, for the first time or after a preemption.
        """

    def may_propose(self, num_requests: int, num_other_tokens: int) -> bool:
        """Return whether `choose_proposals` may ask for any in a step; called once for each.

        num_requests: that decode. num_other_tokens: rows of the step that belong to prompts.
        """

    def choose_proposals(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> tuple[list[int], float]:
        """Return how many tokens the draft model proposes for each request after a step.

        And the acceptance probability, as the model has it, below which a proposal ends. requests:
        planned in the step, which decode. limits: tokens that each of them has use for, at least 1.
        num_other_tokens: as in `may_propose`.
        """

    def keep_proposal(
        self,
        request: Request,
        num_asked: int,
        token_ids: list[int],
        acceptance_probs: Sequence[float],
    ) -> None:
        """Keep a proposal to follow `request.all_token_ids`, of up to `num_asked` tokens.

        It is empty if the model had none. acceptance_probs: for each token the probability
        that it and all before it are accepted, as the model has it.
        """

    def learn_passes(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Learn the time of each pass of the draft model. rows: tokens of the pass."""


def is_drafted_for(request: Request) -> bool:
    """Return whether a request may ever be drafted for.

    Not the rows of a beam search, whose next token depends on the other rows, nor requests that
    are pooled, nor one with a single token, which no draft brings sooner.
    """
    params = request.sampling_params
    return request.pooling_params is None and not params.beam_width and request.max_tokens > 1


class DraftKVIndex:
    """Which blocks have KV of the draft model, as far as the engine knows.

    That model computes KV in blocks of the served model (worker/speculation/draft_model.py), and
    only for requests that it proposes for. So a block of a prefix hit has its KV if an earlier
    request had a proposal after the same tokens in the same block.

        block         3   9   4   7       of a request with a prefix hit of three blocks
        of the hit    h1  h2  h3
        recorded      h1  h2  h8          9 and 3 were drafted after, 4 holds other tokens now
        present       |-------|

    Loaded blocks have none, nor have other blocks of equal content. Where the record is wrong, a
    prefill of the draft model costs more or less time than was planned.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._group = kv_cache.full_attention_group
        self._block_size = kv_cache.block_size
        self._hashes = [b""] * kv_cache.pool.num_blocks  # by block id
        self._num_recorded: dict[int, int] = {}  # by seq_id: leading blocks

    def add_request(self, request: Request) -> int:
        """Return how many leading tokens of a request that was given blocks have draft KV."""
        number = 0
        if self._group is not None:
            hashes = request.block_hashes
            blocks = self._group.prefix_blocks(request.seq_id, len(hashes) * self._block_size)
            while number < len(blocks) and self._hashes[blocks[number]] == hashes[number]:
                number += 1
        self._num_recorded[request.seq_id] = number
        return number * self._block_size

    def record_proposal(self, request: Request) -> None:
        """Note that all known tokens of a request have draft KV."""
        first = self._num_recorded.get(request.seq_id, 0)
        end = request.num_tokens // self._block_size
        if self._group is None or end <= first:
            return
        hashes = request.block_hashes
        blocks = self._group.prefix_blocks(request.seq_id, end * self._block_size)
        end = min(len(blocks), len(hashes))
        for index in range(first, end):
            self._hashes[blocks[index]] = hashes[index]
        self._num_recorded[request.seq_id] = end

    def end_request(self, request: Request) -> None:
        self._num_recorded.pop(request.seq_id, None)

    def clear(self) -> None:
        """Forget all blocks: their KV was dropped."""
        self._hashes = [b""] * len(self._hashes)
        self._num_recorded.clear()


class SpeculativeDecoding(SchedulerFeature):
    """Gives each step its drafts.

    is_active: whether any request may have a draft; if not, `fill_drafts` is not called.
    max_num_seqs, num_draft_positions: together max_positions, which a step may sample and the
    workers' memory is planned for. drafting: None without a method. max_usage: share of the blocks
    in use up to which lookahead takes new ones. computes_ahead: steps are planned before the result
    of the one before. awaiting_mask: see `Grammars`.
    """

    def __init__(
        self,
        drafting: DraftProvider | None,
        lifecycle: RequestLifecycle,
        kv_cache: KVCacheManager,
        chunks: ChunkRule,
        max_num_seqs: int,
        num_draft_positions: int,
        grammars: Grammars | None,
        max_usage: float,
        *,
        computes_ahead: bool,
        awaiting_mask: set[int],
    ) -> None:
        self._drafting = drafting
        self.is_active = self._drafting is not None
        self._kv_cache = kv_cache
        self._min_free_blocks = int((1.0 - max_usage) * kv_cache.num_usable_blocks)
        self._computes_ahead = computes_ahead
        self._awaiting_mask = awaiting_mask
        self._running = lifecycle.running
        self._waiting = lifecycle.waiting
        self._longest_chunk = chunks.longest_chunk
        self._max_num_seqs = max_num_seqs
        self._num_draft_positions = num_draft_positions
        self.max_positions = max_num_seqs + num_draft_positions
        self._grammars = grammars
        self._added: set[int] = set()  # seq_ids that `drafting` knows
        self._draft_kv: DraftKVIndex | None = None
        if self._drafting is not None and self._drafting.has_draft_model:
            self._draft_kv = DraftKVIndex(kv_cache)
        self._candidates: list[Request] = []
        self._num_drafts = self._num_draft_tokens = self._num_accepted = self._num_invalid = 0
        self._accepted_per_pos: list[int] = []

    # A step

    def fill_drafts(self, plan: StepPlan) -> None:
        """Give decoding requests drafts for the step, within the room that is left for them."""
        if self._drafting is not None:
            self._drafting.begin_step()
        candidates: list[Request] = []
        limits: list[int] = []
        num_prompt_tokens = num_decoding = 0
        longest_chunk, awaiting_mask = self._longest_chunk, self._awaiting_mask
        for request in self._running:
            num_placeholders = request.num_output_placeholders
            if num_placeholders > 1 or (awaiting_mask and request.seq_id in awaiting_mask):
                continue  # it waits for the result of a draft, or for a mask
            num_known = len(request.all_token_ids) + num_placeholders
            num_missing = num_known - request.num_computed_tokens
            if num_missing > 1:
                num_prompt_tokens += min(num_missing, longest_chunk)
            elif num_missing == 1:
                num_decoding += 1
                limit = self._max_draft_tokens(request)
                if limit > 0 and is_drafted_for(request):
                    candidates.append(request)
                    limits.append(limit)
        self._candidates = candidates
        if not candidates:
            return
        room = self._room(plan, num_prompt_tokens)
        if self._drafting is not None and room > 0:
            num_others = min(num_prompt_tokens, plan.prompt_budget)
            num_others += num_decoding - len(candidates)
            self._drafting.fill_drafts(candidates, limits, num_others)
        for request, limit in zip(candidates, limits, strict=True):
            if request.spec_token_ids:
                num_drafts = self._cut_draft(request, min(limit, room))
                plan.max_draft_tokens += num_drafts
                room -= num_drafts

    def clear_drafts(self) -> None:
        """Forget drafts that were not planned: tokens in flight may contradict them."""
        for request in self._candidates:
            if request.spec_token_ids:
                request.spec_token_ids.clear()
        self._candidates = []

    def _room(self, plan: StepPlan, num_prompt_tokens: int) -> int:
        """Return how many draft tokens the step has room for.

            budget     |- one token of each that runs -|- prompts -|- drafts -|
            positions  |- one of each that runs or may be admitted -|- drafts -|

        Prompt tokens go first, with a chunk of the first ready request, so that drafts delay
        neither. A request that a feature unblocks in this step may find the positions taken and is
        admitted in the next one (`StepPlanner`).
        """
        num_running = len(self._running)
        num_ready = min(self._waiting.num_ready, self._max_num_seqs - num_running)
        if num_ready > 0:
            head = self._waiting.peek_request()
            num_missing = head.num_tokens - head.num_computed_tokens
            num_prompt_tokens += min(num_missing, self._longest_chunk)
        num_prompt_tokens = min(num_prompt_tokens, plan.prompt_budget)
        num_spare = self._max_num_seqs - num_running - num_ready
        return min(
            plan.budget - num_running - num_prompt_tokens,
            num_spare + self._num_draft_positions,
        )

    def _max_draft_tokens(self, request: Request) -> int:
        """Return how many draft tokens a request can still accept.

        A step gives one token more than it accepts. The last possible token is that of max_tokens,
        which is within the length of the model.
        """
        num_known = len(request.all_token_ids) + request.num_output_placeholders
        num_left = request.num_prompt_tokens + request.max_tokens - num_known
        if self._kv_cache.has_states:
            # The last computed token is num_known - 2.
            block_size = self._kv_cache.block_size
            num_left = min(
                num_left, ((num_known - 2) // block_size + 2) * block_size - num_known + 1
            )
        return min(num_left, self._longest_chunk) - 1

    def _cut_draft(self, request: Request, most: int) -> int:
        """Cut a draft to what can be computed and accepted; return its length then."""
        draft = request.spec_token_ids
        if request.num_output_placeholders:
            del draft[0]  # of the step in flight
        del draft[max(most, 0) :]
        if draft:
            del draft[self._num_allowed(request, draft) :]
        return len(draft)

    def _num_allowed(self, request: Request, draft: list[int]) -> int:
        """Return how many tokens of a draft its grammar allows; counts the others."""
        if self._grammars is None:
            return len(draft)
        num_allowed = self._grammars.num_allowed_tokens(request, draft)
        self._num_invalid += len(draft) - num_allowed
        return num_allowed

    # Proposals of a model in the workers

    def plan_lookahead(self, plan: StepPlan) -> None:
        """Choose for which planned requests the draft model proposes tokens after the step.

        Called when the plan is complete, so that it takes nothing from a request of this step.
        """
        drafting = self._drafting
        if drafting is None or not drafting.has_draft_model or not plan.continued:
            return
        num_decoding = len(plan.continued) + len(plan.admitted) - plan.num_prefilling
        if num_decoding <= 0 or not drafting.may_propose(num_decoding, plan.num_prompt_tokens):
            return
        indexes: list[int] = []
        requests: list[Request] = []
        limits: list[int] = []
        for index, request in enumerate(plan.continued):
            num_planned = request.num_computed_tokens + plan.continued_tokens[index]
            num_known = len(request.all_token_ids) + request.num_output_placeholders
            if num_planned < num_known or request.num_computed_tokens + 1 < num_known:
                continue  # a chunk of its prompt
            limit = self._max_proposed(request, num_planned, plan.continued_tokens[index])
            if limit > 0 and is_drafted_for(request):
                indexes.append(index)
                requests.append(request)
                limits.append(limit)
        if not requests:
            return
        lengths, plan.min_draft_acceptance_prob = drafting.choose_proposals(
            requests, limits, plan.num_prompt_tokens
        )
        min_free_blocks = self._min_free_blocks + self._num_blocks_next(plan)
        if self._waiting.num_ready > 0:
            min_free_blocks = self._kv_cache.num_usable_blocks
        for index, request, limit, length in zip(indexes, requests, limits, lengths, strict=True):
            if length > 0:
                if self._computes_ahead and request.seq_id not in plan.drafts:
                    length = min(length + 1, limit)  # the first one will be in flight
                self._plan_proposal(plan, index, request, length, min_free_blocks)

    def _num_blocks_next(self, plan: StepPlan) -> int:
        """Return how many blocks the running requests may need in the next step.

        One each, and more for chunks of prompts that go on.
        """
        num_blocks = len(self._running)
        if plan.num_prefilling > 0:
            for request in self._running:
                num_missing = len(request.all_token_ids) - request.num_computed_tokens
                if num_missing > 1:
                    chunk = min(num_missing, self._longest_chunk)
                    num_blocks += chunk // self._kv_cache.block_size
        return num_blocks * len(self._kv_cache.groups)

    def _max_proposed(self, request: Request, num_planned: int, num_new: int) -> int:
        """Return how many tokens the draft model may propose for a request after a step.

        num_planned: tokens that are computed then. num_new: tokens of the step.

            computed, step   |------------|x|d|d|
            known then                          |y|          y: the token after the draft
            proposal                              |p|p|z|    z: the last one of max_tokens
        """
        assert self._drafting is not None
        num_left = request.num_prompt_tokens + request.max_tokens - num_planned - 2
        num_left = min(num_left, self._drafting.max_proposal_len - num_planned)
        return min(num_left, self._longest_chunk - num_new)

    def _plan_proposal(
        self, plan: StepPlan, index: int, request: Request, length: int, min_free_blocks: int
    ) -> None:
        """Give a continued request room for a proposal, unless too few blocks would be left."""
        kv_cache, num_new = self._kv_cache, plan.continued_tokens[index]
        needed = kv_cache.num_blocks_needed(request, num_new + length)
        if needed and kv_cache.pool.num_free - needed < min_free_blocks:
            return
        blocks = kv_cache.allocate_slots(request, num_new, NO_PREFIX, length)
        if blocks is None:
            return
        if blocks is not NO_NEW_BLOCKS:
            planned = plan.continued_blocks[index]
            if planned is not NO_NEW_BLOCKS:
                blocks = [old + new for old, new in zip(planned, blocks, strict=True)]
            plan.continued_blocks[index] = blocks
        plan.lookahead[request.seq_id] = length

    def keep_proposal(
        self, request: Request, num_asked: int, draft: list[int], acceptance_probs: Sequence[float]
    ) -> None:
        """Keep what the draft model proposes to follow the known tokens of a running request."""
        if self._drafting is not None and request.seq_id in self._added:
            if self._draft_kv is not None:
                self._draft_kv.record_proposal(request)
            num_allowed = self._num_allowed(request, draft) if draft else 0
            self._drafting.keep_proposal(
                request, num_asked, draft[:num_allowed], acceptance_probs[:num_allowed]
            )

    def learn_passes(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Learn the time of passes of the draft model by their rows."""
        if self._drafting is not None:
            self._drafting.learn_passes(rows, seconds)

    # Results

    def record_verified(
        self, request: Request, num_drafted: int, num_tried: int, num_accepted: int
    ) -> None:
        """Note the result of a draft, before `add_outputs` and the end of the request.

        num_tried: tokens of which it is known whether they were right. num_accepted: that the
        request got.
        """
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        self._num_accepted += num_accepted
        per_pos = self._accepted_per_pos
        if len(per_pos) < num_drafted:
            per_pos += [0] * (num_drafted - len(per_pos))
        for position in range(num_accepted):
            per_pos[position] += 1
        if self._drafting is not None:
            self._drafting.record_verified(request, num_tried, num_accepted)

    def add_outputs(self, request: Request, num_new: int) -> None:
        """Note that an unfinished request has new tokens; called while `is_active`."""
        if self._drafting is not None and request.seq_id in self._added:
            self._drafting.add_outputs(request, num_new)

    def learn_step(self, num_rows: int, seconds: float) -> None:
        if self._drafting is not None and seconds > 0.0:
            self._drafting.learn_step(num_rows, seconds)

    def forget_outputs(self) -> None:
        if self._drafting is not None:
            self._drafting.forget_outputs()

    def begin_worker_epoch(self) -> None:
        """Note that the workers have no KV any more."""
        if self._draft_kv is not None:
            self._draft_kv.clear()

    def pop_stats(self) -> tuple[int, int, int, list[int], int]:
        """Return counts since the last call.

        Drafts, their tokens, accepted ones, accepted ones by position, and tokens that a grammar
        refused.
        """
        stats = (
            self._num_drafts,
            self._num_draft_tokens,
            self._num_accepted,
            self._accepted_per_pos,
            self._num_invalid,
        )
        self._num_drafts = self._num_draft_tokens = self._num_accepted = self._num_invalid = 0
        self._accepted_per_pos = []
        return stats

    def pop_source_counts(self) -> dict[str, tuple[int, int]]:
        """Return (verified, accepted) tokens by drafter since the last call."""
        return {} if self._drafting is None else self._drafting.pop_source_counts()

    # Ends of requests

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        if self._drafting is None or not is_drafted_for(request):
            return
        if request.seq_id not in self._added:  # it was not preempted
            self._added.add(request.seq_id)
            self._drafting.add_request(request)
        if self._draft_kv is not None:
            self._drafting.note_draft_kv(request, self._draft_kv.add_request(request))

    def on_released(self, request: Request) -> None:
        if self._drafting is not None and request.seq_id in self._added:
            self._added.remove(request.seq_id)
            self._drafting.end_request(request)
            if self._draft_kv is not None:
                self._draft_kv.end_request(request)
