"""Gates: why a waiting request cannot start yet, apart from room.

A gate holds a request back for the sake of something outside the scheduler's
books: a grammar that is being compiled, KV that is on its way, a prefix that
another request is computing. A request that is held is set aside: it keeps its
place, those behind it pass, and nobody looks at it again until its gate wakes it.
"""

from collections.abc import Callable
from typing import ClassVar, Protocol

from engine_core.kv_cache.manager import ComputedBlocks, KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.step_plan import StepPlan

Wake = Callable[[Request], None]
"""Puts a request that is held back into the line; does nothing for any other."""


class Candidate:
    """The request at the head of the line, and what it can start from.

    Its cached prefix is looked up on demand, once. A gate may offer something longer.
    num_external_tokens: after that prefix, tokens with KV elsewhere; loads_async: it is to be
    loaded before the request gets any further.
    """

    __slots__ = ("_computed", "_kv_cache", "loads_async", "num_external_tokens", "request")

    def __init__(self, request: Request, kv_cache: KVCacheManager) -> None:
        self.request = request
        self._kv_cache = kv_cache
        self._computed: ComputedBlocks | None = None
        self.num_external_tokens = 0
        self.loads_async = False

    @property
    def computed(self) -> ComputedBlocks:
        """Valid until blocks are allocated."""
        if self._computed is None:
            self._computed = self._kv_cache.get_computed_blocks(self.request)
        return self._computed

    def offer(self, blocks: ComputedBlocks) -> None:
        """Start from these instead, unless more is cached; valid as long as `computed` is."""
        if blocks.num_tokens >= self.computed.num_tokens:
            self._computed = blocks

    def without_external(self) -> "Candidate":
        """The same, which computes what the cache does not have."""
        self.num_external_tokens = 0
        self.loads_async = False
        return self

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that it need not compute: those in its own blocks, or in the cached ones."""
        return self.request.num_computed_tokens + self.computed.num_tokens


class Gate(Protocol):
    """One reason for holding requests back.

    status: of a request that is held.
    """

    status: ClassVar[RequestStatus]

    def attach(self, wake: Wake) -> None:
        """Called once, before everything else, with the way to wake a request."""
        ...

    def begin(self, plan: StepPlan) -> None:
        """An admission pass begins; running requests have been planned."""
        ...

    def holds(self, candidate: Candidate) -> bool:
        """Whether the head of the line is to be set aside.

        After a True the gate owes the request a wake, unless it is forgotten first.
        """
        ...

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        """A request was given blocks; it computes so many tokens in this step."""
        ...

    def forget(self, request: Request) -> None:
        """A request is over, whatever state it was in."""
        ...
