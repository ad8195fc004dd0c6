"""Writes the grammars of requests without holding up the event loop.

Schemas of a client become grammars in Python (`protocol/json_schema.py`, `protocol/json_lark.py`,
`parsers/tools/`), which may take some 0.05 s. A grammar of a few milliseconds is written at
once. Any other is begun again on a thread, which rests after each millisecond, and on which tenants
take turns.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from api_server.protocol.json_schema import SchemaWork
from proto.errors import InvalidRequestError, OverloadedError

QUICK_STEPS: Final = 6_000
"""Of `SchemaWork`, about 3 ms."""
MAX_WAITING: Final = 64
"""Requests of a tenant that wait for the thread."""

Written = TypeVar("Written")


class GrammarWriter:
    """The thread that writes large grammars, and the tenants that wait for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._is_busy = False
        self._waiting: OrderedDict[int, list[asyncio.Future[None]]] = OrderedDict()  # by tenant

    async def write(self, tenant: int, make: Callable[[SchemaWork], Written]) -> Written:
        """Return what `make` returns; it is called again on the thread if it takes long.

        Raises what `make` raises, and OverloadedError if too many requests of the tenant wait.
        """
        work = SchemaWork(QUICK_STEPS)
        try:
            return make(work)
        except InvalidRequestError:
            if not work.is_used_up:
                raise
        await self._begin_turn(tenant)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, make, SchemaWork(has_pauses=True)
            )
        finally:
            self._end_turn()

    async def _begin_turn(self, tenant: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        waiting = self._waiting.setdefault(tenant, [])
        if len(waiting) == MAX_WAITING:
            raise OverloadedError("too many large schemas of this client wait to become grammars")
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(tenant, turn)
            else:  # the turn had just come
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        """Give the thread to the tenant that has waited longest for a turn."""
        self._is_busy = bool(self._waiting)
        if self._waiting:
            tenant, (turn, *_) = next(iter(self._waiting.items()))
            self._waiting.move_to_end(tenant)
            self._remove(tenant, turn)
            turn.set_result(None)

    def _remove(self, tenant: int, turn: asyncio.Future[None]) -> None:
        self._waiting[tenant].remove(turn)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
