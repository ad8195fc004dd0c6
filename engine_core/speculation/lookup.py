"""Drafts from tokens that are known already: what followed the same words before.

    prompt    def area(width, height): …
    outputs   The function with a docstring: def area(width,
                                             └── match ──┘ draft: height ): …

NgramProposer    the latest occurrence in the request itself
SuffixProposer   all occurrences in the request, and in earlier outputs of the same tenant

Both index a request with csrc/suffix_index.c, about 20 ns and 40 bytes a token.
"""

from collections import OrderedDict, deque
from typing import Final

from engine_core.request import Request
from engine_core.speculation.proposer import Draft, expected_tokens
from engine_core.speculation.suffix_index import MakeSuffixIndex, SuffixIndex

ORDERS: Final = (2, 4, 8)
"""Shortest matches to look for. One token says little: its drafts are accepted less often than
they pay. A long match is found among its own kind, however often its last two tokens occur."""
MAX_CANDIDATES: Final = 32
MAX_REQUEST_TOKENS: Final = 1 << 22
"""Latest tokens of a request that are looked up. Their index is far smaller than their KV."""
MAX_TENANT_TOKENS: Final = 1 << 17
"""Tokens of earlier outputs that are kept of one tenant: 5 MB."""
MAX_OUTPUT_BYTES: Final = 64 << 20
"""Bytes of earlier outputs of all tenants."""

OutputKey = tuple[int, str | None]
"""Tenant and cache salt: outputs of one are drafts for requests of the same."""


def expected_acceptance(match_length: int) -> float:
    """Return the probability that the tokens after a match go on as before, until it is learnt.

    From recorded texts of `tests/benchmarks/drafting.py`.
    """
    return 1.0 - 0.9 / (1.0 + 0.5 * match_length)


def length_key(match_length: int) -> int:
    """Return the key of a match's length: 2, 3, 4, 6, 8, 12, 16 … have the numbers 0, 1, 2 …"""
    bits = match_length.bit_length() - 1
    return max(0, 2 * bits + (match_length >> (bits - 1) & 1 if bits else 0) - 2)


class NgramProposer:
    """Continues the longest match of at least `min_match` tokens, the most recent one of these.

    max_match: tokens beyond which matches are equally long. max_tokens: of a draft.
    """

    def __init__(
        self, make_index: MakeSuffixIndex, min_match: int, max_match: int, max_tokens: int
    ) -> None:
        self.name = "ngram"
        self._make_index = make_index
        self._min_match = min_match
        self._max_match = max_match
        self._max_tokens = max_tokens
        self._indexes: dict[int, SuffixIndex] = {}  # by seq_id

    def begin_request(self, request: Request) -> bool:
        index = self._make_index((self._min_match,), self._max_match, MAX_CANDIDATES)
        index.extend(request.all_token_ids, 0, request.num_tokens)
        self._indexes[request.seq_id] = index
        return True

    def add_outputs(self, request: Request, num_new: int) -> None:
        num_tokens = request.num_tokens
        self._indexes[request.seq_id].extend(
            request.all_token_ids, num_tokens - num_new, num_tokens
        )

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        index = self._indexes[request.seq_id]
        found = index.lookup(index, min(max_tokens, self._max_tokens))
        if found is None:
            return None
        match_length, token_ids, _ = found
        acceptance = expected_acceptance(match_length)
        survival = [acceptance ** (position + 1) for position in range(len(token_ids))]
        return Draft(token_ids, survival, self.name, length_key(match_length))

    def end_request(self, request: Request) -> None:
        del self._indexes[request.seq_id]

    def forget_outputs(self) -> None: ...


class TenantOutputs:
    """Earlier outputs of one tenant, the latest max_requests of them."""

    def __init__(self, index: SuffixIndex, max_requests: int) -> None:
        self.index = index
        self._max_requests = max_requests
        self._starts: deque[int] = deque()

    def add_output(self, request: Request, num_context: int) -> None:
        """Add the outputs, behind the last `num_context` prompt tokens that lead to them."""
        index, starts = self.index, self._starts
        starts.append(index.end)
        index.separate()
        first = max(0, request.num_prompt_tokens - num_context)
        index.extend(request.all_token_ids, first, request.num_tokens)
        oldest = index.end - index.num_tokens
        while len(starts) > 1 and starts[1] <= oldest:  # overwritten
            starts.popleft()
        if len(starts) > self._max_requests:
            starts.popleft()
            index.forget_before(starts[0])

    def __len__(self) -> int:
        return len(self._starts)


class IndexedRequest:
    """A request that SuffixProposer drafts for. key: of the outputs that it may repeat."""

    __slots__ = ("index", "key")

    def __init__(self, index: SuffixIndex, key: OutputKey) -> None:
        self.index: Final = index
        self.key: Final = key


class SuffixProposer:
    """Drafts as in SuffixDecoding (Oliaro et al. 2024), by counts of what followed matches.

    The request itself and earlier outputs of its tenant each give a draft; the one with the higher
    sum of survivals is returned. Outputs of other tenants are never used: how fast an answer comes
    would tell what they contain.

    depth: tokens beyond which matches are equally long. max_tokens: of a draft. factor: tokens of
    a draft for each token of the match. min_probability: of a token and all before it, by counts.
    max_requests: outputs to keep of a tenant; 0 for none.
    max_tenant_tokens, max_output_bytes: of earlier outputs of one tenant, and of all.
    """

    def __init__(
        self,
        make_index: MakeSuffixIndex,
        *,
        depth: int,
        max_tokens: int,
        factor: float,
        min_probability: float,
        max_requests: int,
        max_tenant_tokens: int = MAX_TENANT_TOKENS,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> None:
        self.name = "suffix"
        self._make_index = make_index
        self._orders = tuple(order for order in ORDERS if order <= depth)
        self._depth = depth
        self._max_tokens = max_tokens
        self._draft_limits = factor, min_probability
        self._max_requests = max_requests
        self._max_tenant_tokens = max_tenant_tokens
        self._max_output_bytes = max_output_bytes
        self._requests: dict[int, IndexedRequest] = {}  # by seq_id
        self._outputs: OrderedDict[OutputKey, TenantOutputs] = OrderedDict()  # oldest use first
        self._num_output_bytes = 0

    @property
    def num_output_bytes(self) -> int:
        """Bytes of memory of earlier outputs."""
        return self._num_output_bytes

    def begin_request(self, request: Request) -> bool:
        index = self._new_index(MAX_REQUEST_TOKENS)
        index.extend(request.all_token_ids, 0, request.num_tokens)
        key = (request.tenant, request.cache_salt)
        self._requests[request.seq_id] = IndexedRequest(index, key)
        if key in self._outputs:
            self._outputs.move_to_end(key)
        return True

    def add_outputs(self, request: Request, num_new: int) -> None:
        num_tokens = request.num_tokens
        index = self._requests[request.seq_id].index
        index.extend(request.all_token_ids, num_tokens - num_new, num_tokens)

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        max_tokens = min(max_tokens, self._max_tokens)
        indexed = self._requests[request.seq_id]
        index = indexed.index
        draft = self._draft(index.propose(index, max_tokens), 0)
        if not self._outputs:
            return draft
        outputs = self._outputs.get(indexed.key)
        if outputs is None:
            return draft
        other = self._draft(outputs.index.propose(index, max_tokens), 1)
        if draft is None:
            return other
        if other is None or expected_tokens(other.survival) <= expected_tokens(draft.survival):
            return draft
        return other

    def _draft(self, found: tuple[int, list[int], list[float]] | None, kind: int) -> Draft | None:
        """Make a draft of what an index found; kind: 0 for the request's own, 1 for outputs."""
        if found is None:
            return None
        match_length, token_ids, probabilities = found
        acceptance = expected_acceptance(match_length)
        power = 1.0
        survival: list[float] = []
        for probability in probabilities:
            power *= acceptance
            survival.append(probability * power)
        return Draft(token_ids, survival, self.name, 2 * length_key(match_length) + kind)

    def end_request(self, request: Request) -> None:
        key = self._requests.pop(request.seq_id).key
        if request.is_finished and request.num_output_tokens and self._max_requests:
            self._keep_output(key, request)

    def forget_outputs(self) -> None:
        self._outputs.clear()
        self._num_output_bytes = 0

    def _keep_output(self, key: OutputKey, request: Request) -> None:
        """Add the outputs to those of the tenant; evict other tenants' beyond the limit."""
        outputs = self._outputs.pop(key, None)
        if outputs is None:
            outputs = TenantOutputs(self._new_index(self._max_tenant_tokens), self._max_requests)
        else:
            self._num_output_bytes -= outputs.index.num_bytes
        outputs.add_output(request, self._depth)
        self._outputs[key] = outputs
        self._num_output_bytes += outputs.index.num_bytes
        while self._num_output_bytes > self._max_output_bytes and len(self._outputs) > 1:
            _, evicted = self._outputs.popitem(last=False)
            self._num_output_bytes -= evicted.index.num_bytes

    def _new_index(self, max_tokens: int) -> SuffixIndex:
        return self._make_index(
            self._orders, self._depth, MAX_CANDIDATES, max_tokens, *self._draft_limits
        )
