"""Drafts of a chosen acceptance, for requests whose answer is known in advance."""

import random
from collections.abc import Callable, Sequence

from engine_core.request import Request
from tests.fakes.paged_runner import hashed_token

Answer = Callable[[Request, int], list[int]]
"""Returns the next tokens that a request will get: at most this many."""
MOST_DRAFTED = 6


def hashed_answer(request: Request, num_tokens: int) -> list[int]:
    """The next tokens by `hashed_token`."""
    token_ids = list(request.all_token_ids)
    for _ in range(num_tokens):
        token_ids.append(hashed_token(token_ids, request.choice))
    return token_ids[len(request.all_token_ids) :]


class SyntheticDrafts:
    """A DraftProvider: each token of a draft is right with probability `acceptance`.

    Asserts that the scheduler reports every token of every request. num_accepted: accepted tokens.
    has_draft_model: a model in the workers is asked too, at random.
    """

    max_proposal_len = 1 << 40

    def __init__(
        self,
        acceptance: float,
        answer: Answer = hashed_answer,
        *,
        seed: int = 0,
        most: int = MOST_DRAFTED,
        vocab_size: int = 1000,
        has_draft_model: bool = False,
    ) -> None:
        self.has_draft_model = has_draft_model
        self.proposals: dict[int, tuple[int, list[int]]] = {}
        self.num_proposed = 0
        self.acceptance = acceptance
        self.most = most
        self.num_drafted = self.num_accepted = 0
        self.num_other_tokens: list[int] = []
        self._answer = answer
        self._dice = random.Random(seed)
        self._vocab_size = vocab_size
        self.num_known: dict[int, int] = {}
        self.draft_kv: dict[int, int] = {}

    def add_request(self, request: Request) -> None:
        assert request.seq_id not in self.num_known, "a request was added twice"
        self.num_known[request.seq_id] = request.num_tokens

    def begin_step(self) -> None: ...

    def add_outputs(self, request: Request, num_new: int) -> None:
        self.num_known[request.seq_id] += num_new
        assert self.num_known[request.seq_id] == request.num_tokens, "tokens are missing"

    def fill_drafts(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> None:
        self.num_other_tokens.append(num_other_tokens)
        for request, limit in zip(requests, limits, strict=True):
            assert self.num_known[request.seq_id] == request.num_tokens
            assert limit > 0
            position, proposal = self.proposals.get(request.seq_id, (0, []))
            if proposal and position == request.num_tokens and self._dice.random() < 0.5:
                request.spec_token_ids = proposal.copy()
            elif self._dice.random() < 0.9:
                right = self._answer(request, self._dice.randint(1, self.most))
                request.spec_token_ids = [
                    token if self._dice.random() < self.acceptance else self._other(token)
                    for token in right
                ]

    def record_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted > 0
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def learn_step(self, num_rows: int, seconds: float) -> None:
        assert num_rows > 0
        assert seconds > 0.0

    def forget_outputs(self) -> None: ...

    def end_request(self, request: Request) -> None:
        del self.num_known[request.seq_id]
        self.proposals.pop(request.seq_id, None)

    def pop_source_counts(self) -> dict[str, tuple[int, int]]:
        return {}

    def note_draft_kv(self, request: Request, num_tokens: int) -> None:
        assert request.seq_id in self.num_known
        assert 0 <= num_tokens <= request.num_tokens
        self.draft_kv[request.seq_id] = num_tokens

    def may_propose(self, num_requests: int, num_other_tokens: int) -> bool:
        assert num_requests > 0
        return self.has_draft_model and self._dice.random() < 0.8

    def choose_proposals(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> tuple[list[int], float]:
        assert all(request.seq_id in self.num_known for request in requests)
        lengths = [min(limit, self._dice.randrange(self.most + 1)) for limit in limits]
        return lengths, 0.1

    def keep_proposal(
        self,
        request: Request,
        num_asked: int,
        token_ids: list[int],
        acceptance_probs: Sequence[float],
    ) -> None:
        assert self.num_known[request.seq_id] == request.num_tokens
        assert len(token_ids) == len(acceptance_probs) <= num_asked
        self.proposals[request.seq_id] = request.num_tokens, token_ids
        self.num_proposed += len(token_ids)

    def learn_passes(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        assert len(rows) == len(seconds)

    def _other(self, token_id: int) -> int:
        return (token_id + 1 + self._dice.randrange(self._vocab_size - 1)) % self._vocab_size
