"""Writes the grammars of requests without holding up the event loop.

Schemas of a client become grammars in Python (`protocol/json_schema.py`, `protocol/json_lark.py`,
`parsers/tools/`), which may take some 0.05 s. A grammar of a few milliseconds is written at
once. Any other is begun again on a thread, which rests after each millisecond, and on which clients
take turns.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from api_server.protocol.json_schema import SchemaWork
from api_server.turns import WorkThread
from proto.errors import InvalidRequestError, OverloadedError

QUICK_STEPS: Final = 6_000
"""Of `SchemaWork`, about 3 ms."""
MAX_WAITING: Final = 64
"""Requests of a tenant that wait for the thread."""

Written = TypeVar("Written")


class GrammarWriter:
    """The thread that writes large grammars."""

    def __init__(self) -> None:
        self._thread = WorkThread("grammars")

    async def write(self, make: Callable[[SchemaWork], Written]) -> Written:
        """Return what `make` returns; it is called again on the thread if it takes long.

        Raises what `make` raises, ClientDisconnect, and OverloadedError if too many requests of the
        tenant wait.
        """
        work = SchemaWork(QUICK_STEPS)
        try:
            return make(work)
        except InvalidRequestError:
            if not work.is_used_up:
                raise
        if self._thread.num_waiting() >= MAX_WAITING:
            raise OverloadedError("too many large schemas of this client wait to become grammars")
        return await self._thread.run(make, SchemaWork(has_pauses=True))
