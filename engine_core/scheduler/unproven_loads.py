"""Requests whose KV is loaded within their first step: not known to be there before its result.

    admitted ─▶ begins ─▶ sent with a step ─▶ its result is here ─▶ proven: others may find it
                                └─▶ a load has failed ─▶ forgotten here, rewound elsewhere

Owns who they are, and which blocks they had when their step was sent: whoever gives way before the
result is here has none by then, and may have lost KV all the same.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class _Unproven:
    """Loaded for in this step, whose result is not here. blocks: its tables by then."""

    request: Request
    step: int
    blocks: frozenset[int]


class UnprovenLoads:
    """By handle; what the KV cache is told when they are proven."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._beginning: list[Request] = []
        self._unproven: dict[int, _Unproven] = {}

    def begin(self, request: Request) -> None:
        """It is loaded for in the step that is being decided."""
        self._beginning.append(request)

    def note_step(self, step: int) -> None:
        """This is the step."""
        for request in self._beginning:
            tables = self._kv_cache.block_ids(request.handle)
            blocks = frozenset(chain.from_iterable(tables))
            self._unproven[request.handle] = _Unproven(request, step, blocks)
        self._beginning.clear()

    def prove(self, step: int) -> None:
        """The result of a step is here, and nobody has said that its loads failed."""
        for handle, each in list(self._unproven.items()):
            if each.step <= step:
                del self._unproven[handle]
                self._kv_cache.prove(each.request, each.request.num_computed_tokens)

    def has_lost(self, request: Request, bad: Collection[int]) -> bool:
        """It began with a load that failed, and gave way before anybody knew."""
        unproven = self._unproven.get(request.handle)
        return (
            unproven is not None
            and request.status is not RequestStatus.RUNNING
            and not unproven.blocks.isdisjoint(bad)
        )

    def forget(self, handle: int) -> None:
        """Nothing of it is to be proven."""
        self._unproven.pop(handle, None)

    def clear(self) -> None:
        """No step is in flight any more."""
        self._beginning.clear()
        self._unproven.clear()

    def __contains__(self, handle: int) -> bool:
        return handle in self._unproven
