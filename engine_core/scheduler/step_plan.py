"""The plan of one step, and how many positions of a row the step samples."""

from collections.abc import Collection
from typing import NamedTuple

from engine_core.request import Request
from proto.messages.multimodal import EncoderSlice
from proto.messages.scheduler_output import BlockIds


def num_sampled_positions(num_known_tokens: int, num_computed_tokens: int) -> int:
    """Return how many positions of a row a step samples.

    num_known_tokens: verified tokens and placeholders; without drafts, which are only proposed.
    num_computed_tokens: of the row, after the step.

        known tokens       |-- prompt --|- outputs -|
        computed after     |-------|                      0: a chunk of the prompt
                           |------------------------|     1: the last known token gives the next one
                           |------------------------|d|d| 3: so does each of two drafts

    The engine counts them here only: for the placeholders of a step in flight, the rows that need a
    grammar mask and the check of a worker's result. The worker counts them in
    `InputBatch.build_inputs`. A row that samples k positions may bring 1 to k tokens.
    """
    num_positions = num_computed_tokens + 1 - num_known_tokens
    return num_positions if num_positions > 0 else 0


class Lookup(NamedTuple):
    """A prefix that was found for a waiting request that the step does not admit.

    local_tokens: in the prefix cache. external_tokens: after those, by the KV connector, which
    loads them before the request is admitted (loads_async) or within its first step.
    """

    request: Request
    local_tokens: int
    external_tokens: int
    loads_async: bool


class StepPlan:
    """What one call of schedule() has decided so far; the passes fill it.

    budget: tokens that are left in this step.
    prompt_budget: how many of them requests may have whose prompt is being computed.
    continued, continued_tokens, continued_blocks: parallel; running requests with the number of
        tokens to compute and the new block ids per group.
    admitted, admitted_tokens: parallel; requests from the queue. Their num_computed_tokens already
        counts cached tokens.
    drafts: by seq_id, the drafts of continued requests that the step verifies; their tokens are
        counted in continued_tokens.
    max_draft_tokens: draft tokens that running requests may compute in this step, planned or not.
    lookahead: by seq_id, how many tokens the workers' draft model proposes for continued requests
        after this step; their tables have room for them. min_draft_acceptance_prob: where it ends.
    preempted: running requests that lost their blocks in this step.
    lacks_blocks: a running request that may preempt no other one is not planned for lack of blocks.
    lacks_tokens: the next request needs more tokens than are left, for a prompt or an image that
        cannot be cut.
    lookups: of requests that the step does not admit.
    encoder_slices, free_mm_hashes: what the workers encode of images, and what they forget.
    num_prefilling, num_prompt_tokens: planned requests that do not decode, and their tokens.
    limit: what made the step shorter than its token budget (`StepPlanner.step_limit`).
    """

    def __init__(self, budget: int, now: float) -> None:
        self.budget = budget
        self.prompt_budget = budget
        self.now = now
        self.continued: list[Request] = []
        self.continued_tokens: list[int] = []
        self.continued_blocks: list[BlockIds] = []
        self.admitted: list[Request] = []
        self.admitted_tokens: list[int] = []
        self.drafts: dict[int, list[int]] = {}
        self.max_draft_tokens = 0
        self.lookahead: dict[int, int] = {}
        self.min_draft_acceptance_prob = 0.0
        self.preempted: list[Request] = []
        self.lacks_blocks = False
        self.lacks_tokens = False
        self.lookups: list[Lookup] = []
        self.encoder_slices: list[EncoderSlice] = []
        self.free_mm_hashes: list[bytes] = []
        self.num_prefilling = 0
        self.num_prompt_tokens = 0
        self.limit = ""

    def count_prefilling(self, num_requests: int, num_tokens: int) -> None:
        """Count planned requests that do not decode, and their tokens; negative to subtract."""
        self.num_prefilling += num_requests
        self.num_prompt_tokens += num_tokens

    def pack_draft(self, request: Request, num_new: int) -> None:
        """Take the draft of a continued request, as far as the step computes it.

        num_new: tokens of the request in the step; called before its counters advance.

            known tokens, placeholders   |------------------|
            computed                     |---------------|
            num_new                                      |-------|
            packed                                          |d|d|d|
        """
        draft, request.spec_token_ids = request.spec_token_ids, []
        num_known = len(request.all_token_ids) + request.num_output_placeholders
        num_drafts = request.num_computed_tokens + num_new - num_known
        if num_drafts > 0:
            self.drafts[request.seq_id] = draft[:num_drafts]

    @property
    def num_draft_tokens(self) -> int:
        return sum(map(len, self.drafts.values())) if self.drafts else 0

    def num_new_tokens(self, seq_ids: Collection[int]) -> dict[int, int]:
        """Return the planned tokens by seq_id of the given sequences, as far as they are continued.

        Searches from the end, where the requests are that were admitted last.
        """
        found: dict[int, int] = {}
        for request, num_tokens in zip(
            reversed(self.continued), reversed(self.continued_tokens), strict=True
        ):
            if len(found) == len(seq_ids):
                break
            if request.seq_id in seq_ids:
                found[request.seq_id] = num_tokens
        return found

    def resend_full(self, request: Request) -> None:
        """Describe a continued request to the workers in full, like one from the queue."""
        index = self.continued.index(request)
        del self.continued[index], self.continued_blocks[index]
        self.lookahead.pop(request.seq_id, None)
        self.admitted.append(request)
        self.admitted_tokens.append(self.continued_tokens.pop(index))

    def remove_request(self, request: Request) -> bool:
        """Take a running request out and its tokens back; False if it was not planned."""
        if request not in self.continued:
            return False
        index = self.continued.index(request)
        del self.continued[index], self.continued_blocks[index]
        num_tokens = self.continued_tokens.pop(index)
        self.drafts.pop(request.seq_id, None)
        self.budget += num_tokens
        if request.is_prefilling:
            self.prompt_budget += num_tokens
            self.count_prefilling(-1, -num_tokens)
        return True
