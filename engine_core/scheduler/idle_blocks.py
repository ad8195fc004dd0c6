"""Blocks of requests that do not run: sessions between two turns.

Owns the order in which they lose them; a request that has lost its blocks is computed
again when its turn comes, over what the prefix cache still holds.

    at rest     no input has come: whoever lacks room takes the blocks, those of the one
                that has rested longest first
    in line     the next turn has its input: it is about to run, so the blocks are taken
                only where nobody runs but who lacks them, lest nobody ever does; the last
                in line first
"""

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request


class IdleBlocks:
    """Requests, by handle, that hold blocks and are not in the running list."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._at_rest: dict[int, Request] = {}
        self._in_line: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._at_rest) + len(self._in_line)

    @property
    def any_at_rest(self) -> bool:
        """Whether `take_from_rest` would find any."""
        return bool(self._at_rest)

    def rest(self, request: Request) -> None:
        """A request has come to rest, with blocks if anything of it is computed."""
        if request.num_computed_tokens:
            self._at_rest[request.handle] = request

    def line_up(self, request: Request) -> None:
        """A request at rest has been given its input."""
        if self._at_rest.pop(request.handle, None) is not None:
            self._in_line[request.handle] = request

    def forget(self, request: Request) -> None:
        """A request runs, or is over."""
        self._at_rest.pop(request.handle, None)
        self._in_line.pop(request.handle, None)

    def take_from_rest(self) -> bool:
        """Free the blocks of one request at rest; False if none has any."""
        if not self._at_rest:
            return False
        self._take(next(iter(self._at_rest.values())))
        return True

    def take_from_line(self, spared: Request) -> bool:
        """Free the blocks of one request in line, but not of `spared`; False if none has any."""
        for request in reversed(self._in_line.values()):
            if request is not spared:
                self._take(request)
                return True
        return False

    def take_all(self) -> None:
        """Free the blocks of all of them."""
        for request in [*self._at_rest.values(), *self._in_line.values()]:
            self._take(request)

    def _take(self, request: Request) -> None:
        self.forget(request)
        self._kv_cache.free(request)
        request.num_computed_tokens = 0
