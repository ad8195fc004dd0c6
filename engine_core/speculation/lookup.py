"""Drafts from tokens that are known already: what followed the same words before.

    prompt    def area(width, height): …
    outputs   The function with a docstring: def area(width,
                                             └── match ──┘ draft: height ): …

NgramProposer    the latest occurrence in the request itself
SuffixProposer   all occurrences in the request, and in earlier outputs of the same tenant

Both index a request with csrc/suffix_index.c, about 20 ns and 40 bytes a token. A long prompt is
indexed in parts, one a step, so that no step waits for it; until it is, the request has no drafts.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from engine_core.request import Request
from engine_core.speculation.proposer import Draft, expected_tokens
from engine_core.speculation.suffix_index import MakeSuffixIndex, SuffixIndex

logger = logging.getLogger("tokend.speculation")

ORDERS: Final = (2, 4, 8)
"""Shortest matches to look for. One token says little: its drafts are accepted less often than
they pay. A long match is found among its own kind, however often its last two tokens occur."""
MAX_CANDIDATES: Final = 32
MAX_REQUEST_TOKENS: Final = 1 << 22
"""Latest tokens of a request that are looked up. Their index is far smaller than their KV."""
MAX_INDEX_BYTES: Final = 256 << 20
"""Bytes of the indexes of unfinished requests. Requests beyond it have no drafts by lookup."""
STEP_TOKENS: Final = 1 << 14
"""Tokens that are indexed in one step, in about half a millisecond."""
MAX_TENANT_TOKENS: Final = 1 << 17
"""Tokens of earlier outputs that are kept of one tenant: 5 MB."""
MAX_OUTPUT_BYTES: Final = 64 << 20
"""Bytes of earlier outputs of all tenants."""

OutputKey = tuple[int, bytes]
"""Tenant and digest of the extra keys: outputs of one are drafts for requests of the same."""


def expected_acceptance(match_length: int) -> float:
    """Return the probability that the tokens after a match go on as before, until it is learnt.

    From recorded texts of `tests/benchmarks/drafting.py`.
    """
    return 1.0 - 0.9 / (1.0 + 0.5 * match_length)


def length_key(match_length: int) -> int:
    """Return the key of a match's length: 2, 3, 4, 6, 8, 12, 16 … have the numbers 0, 1, 2 …"""
    bits = match_length.bit_length() - 1
    return max(0, 2 * bits + (match_length >> (bits - 1) & 1 if bits else 0) - 2)


class IndexMemory:
    """Bytes of the indexes of unfinished requests, and their limit."""

    def __init__(self, limit: int = MAX_INDEX_BYTES) -> None:
        self.limit: Final = limit
        self.num_bytes = 0


class RequestIndex:
    """The index of one request. num_indexed: its leading tokens that are indexed."""

    __slots__ = ("index", "num_bytes", "num_indexed", "request")

    def __init__(self, request: Request, index: SuffixIndex) -> None:
        self.request: Final = request
        self.index: Final = index
        self.num_indexed = 0
        self.num_bytes = 0


class RequestIndexes:
    """Indexes of unfinished requests: filled a part in each step, within a limit of memory.

    make_index: returns an empty one. memory: shared with other proposers.
    """

    def __init__(self, make_index: Callable[[], SuffixIndex], memory: IndexMemory) -> None:
        self._make_index = make_index
        self._memory = memory
        self._indexes: dict[int, RequestIndex] = {}  # by seq_id
        self._pending: deque[RequestIndex] = deque()
        self._budget = STEP_TOKENS

    def __len__(self) -> int:
        return len(self._indexes)

    def begin_step(self) -> None:
        """Index another part of requests that are not indexed yet, the first one first."""
        self._budget = STEP_TOKENS
        while self._pending and self._budget > 0:
            indexed = self._pending[0]
            if self._indexes.get(indexed.request.seq_id) is not indexed:
                self._pending.popleft()  # it has ended
                continue
            try:
                self._extend(indexed)
                if not self._has_room(indexed):  # it has more tokens than were reserved
                    self.remove_request(indexed.request)
            except MemoryError:
                logger.warning("out of memory: no more drafts by lookup for a request")
                self.remove_request(indexed.request)
            if indexed.num_indexed == indexed.request.num_tokens or self._budget > 0:
                self._pending.popleft()

    def add_request(self, request: Request) -> bool:
        """Begin to index a request; False if there is no memory left for it."""
        indexed = RequestIndex(request, self._make_index())
        indexed.index.reserve(request.num_tokens)
        self._indexes[request.seq_id] = indexed
        if not self._has_room(indexed):
            self.remove_request(request)
            return False
        if not self._pending:
            self._extend(indexed)
        if indexed.num_indexed < request.num_tokens:
            self._pending.append(indexed)
        return True

    def add_outputs(self, request: Request, num_new: int) -> None:
        """Index the last tokens, if those before them are."""
        indexed = self._indexes.get(request.seq_id)
        num_tokens = request.num_tokens
        if indexed is not None and indexed.num_indexed == num_tokens - num_new:
            indexed.index.extend(request.all_token_ids, num_tokens - num_new, num_tokens)
            indexed.num_indexed = num_tokens
            if not self._has_room(indexed):
                self.remove_request(request)

    def find_complete(self, request: Request) -> SuffixIndex | None:
        """Return the index of a request; None while a part is missing, or without memory for it."""
        indexed = self._indexes.get(request.seq_id)
        if indexed is None or indexed.num_indexed < request.num_tokens:
            return None
        return indexed.index

    def remove_request(self, request: Request) -> None:
        indexed = self._indexes.pop(request.seq_id, None)
        if indexed is not None:
            self._memory.num_bytes -= indexed.num_bytes

    def _extend(self, indexed: RequestIndex) -> None:
        request, first = indexed.request, indexed.num_indexed
        end = min(first + self._budget, request.num_tokens)
        if end > first:
            indexed.index.extend(request.all_token_ids, first, end)
            indexed.num_indexed = end
            self._budget -= end - first

    def _has_room(self, indexed: RequestIndex) -> bool:
        """Count the memory of an index; return whether all are within the limit."""
        num_bytes = indexed.index.num_bytes
        self._memory.num_bytes += num_bytes - indexed.num_bytes
        indexed.num_bytes = num_bytes
        return self._memory.num_bytes <= self._memory.limit


class NgramProposer:
    """Continues the longest match of at least `min_match` tokens, the most recent one of these.

    max_match: tokens beyond which matches are equally long. max_tokens: of a draft.
    """

    def __init__(
        self,
        make_index: MakeSuffixIndex,
        min_match: int,
        max_match: int,
        max_tokens: int,
        memory: IndexMemory | None = None,
    ) -> None:
        self.name = "ngram"
        self._make_index = make_index
        self._min_match = min_match
        self._max_match = max_match
        self._max_tokens = max_tokens
        self._indexes = RequestIndexes(self._new_index, memory or IndexMemory())

    def begin_step(self) -> None:
        self._indexes.begin_step()

    def begin_request(self, request: Request) -> bool:
        return self._indexes.add_request(request)

    def add_outputs(self, request: Request, num_new: int) -> None:
        self._indexes.add_outputs(request, num_new)

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        index = self._indexes.find_complete(request)
        if index is None:
            return None
        found = index.lookup(index, min(max_tokens, self._max_tokens))
        if found is None:
            return None
        match_length, token_ids, _ = found
        acceptance = expected_acceptance(match_length)
        acceptance_probs = [acceptance ** (position + 1) for position in range(len(token_ids))]
        return Draft(token_ids, acceptance_probs, self.name, length_key(match_length))

    def end_request(self, request: Request) -> None:
        self._indexes.remove_request(request)

    def forget_outputs(self) -> None: ...

    def _new_index(self) -> SuffixIndex:
        return self._make_index(
            (self._min_match,), self._max_match, MAX_CANDIDATES, MAX_REQUEST_TOKENS
        )


class TenantOutputs:
    """Earlier outputs of one tenant, the latest max_requests of them."""

    def __init__(self, index: SuffixIndex, max_requests: int) -> None:
        self.index = index
        self._max_requests = max_requests
        self._starts: deque[int] = deque()

    def add_output(self, request: Request, num_context: int) -> None:
        """Add the outputs, after the last `num_context` prompt tokens that lead to them."""
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


class SuffixProposer:
    """Drafts as in SuffixDecoding (Oliaro et al. 2024), by counts of what followed matches.

    The request itself and earlier outputs of its tenant each give a draft; the one with the higher
    sum of acceptance probabilities is returned. Outputs of other tenants are never used: how fast
    an answer comes would tell what they contain.

    depth: tokens beyond which matches are equally long. max_tokens: of a draft. factor: tokens of
    a draft for each token of the match. min_probability: of a token and all before it, by counts.
    max_requests: outputs to keep of a tenant; 0 for none.
    max_tenant_tokens, max_output_bytes: of earlier outputs of one tenant and salt, and of all. If
    they are more, the tenant with the most bytes loses those that it has not used for longest.
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
        memory: IndexMemory | None = None,
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
        self._indexes = RequestIndexes(self._new_request_index, memory or IndexMemory())
        self._outputs: OrderedDict[OutputKey, TenantOutputs] = OrderedDict()  # oldest use first
        self._tenant_bytes: dict[int, int] = {}
        self.num_output_bytes = 0

    def begin_step(self) -> None:
        self._indexes.begin_step()

    def begin_request(self, request: Request) -> bool:
        key = (request.tenant, request.extra_keys.digest)
        if key in self._outputs:
            self._outputs.move_to_end(key)
        return self._indexes.add_request(request)

    def add_outputs(self, request: Request, num_new: int) -> None:
        self._indexes.add_outputs(request, num_new)

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        max_tokens = min(max_tokens, self._max_tokens)
        index = self._indexes.find_complete(request)
        if index is None:
            return None
        draft = self._draft(index.propose(index, max_tokens), 0)
        if not self._outputs:
            return draft
        outputs = self._outputs.get((request.tenant, request.extra_keys.digest))
        if outputs is None:
            return draft
        other = self._draft(outputs.index.propose(index, max_tokens), 1)
        if draft is None:
            return other
        if other is None or expected_tokens(other.acceptance_probs) <= expected_tokens(
            draft.acceptance_probs
        ):
            return draft
        return other

    def _draft(self, found: tuple[int, list[int], list[float]] | None, kind: int) -> Draft | None:
        """Make a draft of what an index found; kind: 0 for the request's own, 1 for outputs."""
        if found is None:
            return None
        match_length, token_ids, probabilities = found
        acceptance = expected_acceptance(match_length)
        power = 1.0
        acceptance_probs: list[float] = []
        for probability in probabilities:
            power *= acceptance
            acceptance_probs.append(probability * power)
        return Draft(token_ids, acceptance_probs, self.name, 2 * length_key(match_length) + kind)

    def end_request(self, request: Request) -> None:
        self._indexes.remove_request(request)
        if request.is_finished and request.num_output_tokens and self._max_requests:
            self._keep_output((request.tenant, request.extra_keys.digest), request)

    def forget_outputs(self) -> None:
        self._outputs.clear()
        self._tenant_bytes.clear()
        self.num_output_bytes = 0

    def _keep_output(self, key: OutputKey, request: Request) -> None:
        """Add the outputs to those of the tenant; evict some of the largest tenant's if needed."""
        outputs = self._pop_outputs(key)
        if outputs is None:
            outputs = TenantOutputs(self._new_index(self._max_tenant_tokens), self._max_requests)
        outputs.add_output(request, self._depth)
        self._outputs[key] = outputs
        self._count_bytes(key, outputs.index.num_bytes)
        while self.num_output_bytes > self._max_output_bytes and len(self._outputs) > 1:
            self._pop_outputs(self._next_evicted())

    def _next_evicted(self) -> OutputKey:
        """Return the key of the largest tenant that was not used for longest."""
        largest, most = 0, -1
        for tenant, num_bytes in self._tenant_bytes.items():
            if num_bytes > most:
                largest, most = tenant, num_bytes
        return next(key for key in self._outputs if key[0] == largest)

    def _pop_outputs(self, key: OutputKey) -> TenantOutputs | None:
        outputs = self._outputs.pop(key, None)
        if outputs is not None:
            self._count_bytes(key, -outputs.index.num_bytes)
        return outputs

    def _count_bytes(self, key: OutputKey, num_bytes: int) -> None:
        """Count bytes of a tenant's outputs; negative for those that are evicted."""
        tenant = key[0]
        self.num_output_bytes += num_bytes
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + num_bytes
        if self._tenant_bytes[tenant] == 0:
            del self._tenant_bytes[tenant]

    def _new_request_index(self) -> SuffixIndex:
        return self._new_index(MAX_REQUEST_TOKENS)

    def _new_index(self, max_tokens: int) -> SuffixIndex:
        return self._make_index(
            self._orders, self._depth, MAX_CANDIDATES, max_tokens, *self._draft_limits
        )
