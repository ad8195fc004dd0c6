"""Turns of clients at work in proportion to the size of what they send.

    tenant A   request 1, 1, 2 ─┐
    tenant B   request 3, 3 ────┴─▶ A1  B3  A2  B3  A1       one at a time

A large body or text is decoded, validated and tokenised on a thread, a slice of it in each turn, so
that the event loop and other clients continue. Tenants take turns, and so do the requests of a
tenant. When its turn comes, a request whose client has disconnected ends with `ClientDisconnect`.
"""

import asyncio
import ctypes
import gc
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Final, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Scope

from api_server.http.connection import Upload, begin_upload, client_disconnected
from proto.errors import RequestError

P = ParamSpec("P")
R = TypeVar("R")
INLINE_BYTES: Final = 1 << 16
"""Largest body that is decoded on the event loop."""
UNHELD_BYTES: Final = 1 << 20
"""Largest body that is decoded without regard to the bodies that are held."""
HELD_BYTES: Final = 32 << 20
"""Total bytes of large bodies in memory: each counts from its decoding until the engine has its
requests.

As objects they can take four times as much: a text takes four bytes per character if one is an
emoji."""


class Client:
    """The client whose request the current task serves.

    A body or message counts as an upload of the client from its first bytes until it is released.
    An upload is ended if too many bytes arrive or wait: the request's wait ends with the error.

    tenant: as in `http/tenants.py`. scope: of the request; by default, the bodies of this client
    are counted alone. body_size: bytes of the request's body or message, or of the conversation
    that it continues.
    """

    def __init__(self, tenant: Callable[[], int] = lambda: 0, scope: Scope | None = None) -> None:
        self._tenant = tenant
        self._scope: Scope = scope or {}
        self._upload: Upload | None = None
        self._failure: RequestError | None = None
        self._wait: asyncio.Timeout | None = None
        self._held = 0
        self.body_size = 0

    @property
    def tenant(self) -> int:
        return self._tenant()

    def check_goes_on(self) -> None:
        """Raise the error with which the body was ended, or ClientDisconnect if the client left."""
        if self._failure is not None:
            raise self._failure
        if client_disconnected(self._scope):
            raise ClientDisconnect

    def count_body(self, size: int) -> None:
        """Set the size of the body, as far as it has arrived; raises OverloadedError."""
        self.body_size = size
        if self._upload is None:
            self._upload = begin_upload(self._scope, self.tenant, self._end_body)
        self._upload.resize(size)
        if self._failure is not None:
            raise self._failure

    async def hold_body(self, size: int) -> None:
        """Return when a body of this size may be decoded.

        Raises ClientDisconnect, and OverloadedError if too many bodies wait.
        """
        self.count_body(size)
        if size > UNHELD_BYTES:
            await _body_bytes.take(size)
            self._held += size
            assert self._upload is not None
            self._upload.resize(0)  # HELD_BYTES limits those that are decoded

    @asynccontextmanager
    async def waiting(self, seconds: float | None = None) -> AsyncIterator[asyncio.Timeout]:
        """End the block with an error if the body is ended meanwhile.

        Yields a timeout; raises TimeoutError when it expires.
        """
        try:
            async with asyncio.timeout(seconds) as self._wait:
                yield self._wait
        except TimeoutError:
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            self._wait = None

    def _end_body(self, error: RequestError) -> None:
        self._failure = error
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())

    def end_request(self) -> None:
        """Release the body and, if it was large, the memory that it took."""
        self.release_body()
        if self.body_size > UNHELD_BYTES and not _is_return_pending.is_set():
            _is_return_pending.set()
            _body_thread.submit(_return_memory)

    def release_body(self) -> None:
        """Stop counting the body, because the engine has its requests."""
        held, self._held = self._held, 0
        if held:
            _body_bytes.give_back(held)
        if self._upload is not None:
            self._upload.resize(0)
        self._upload = self._failure = None


CLIENT: ContextVar[Client] = ContextVar("client", default=Client())  # noqa: B039 (immutable)


class Turns:
    """A limited amount, of threads or of bytes, that requests take and give back in turn.

    A request that does not fit waits, and so do all that would be served after it. A tenant waits
    for one request of each other tenant that was waiting before it, at most.
    """

    def __init__(self, amount: int) -> None:
        self._free = amount
        # by tenant; the one whose turn is next comes first
        self._waiting: OrderedDict[int, deque[tuple[asyncio.Future[None], int, Client]]]
        self._waiting = OrderedDict()

    async def take(self, amount: int = 1) -> None:
        """Wait until the amount is free, and take it.

        Raises ClientDisconnect if the client has left by then, and OverloadedError if its body is
        ended.
        """
        client, turn = CLIENT.get(), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client.tenant, deque()).append((turn, amount, client))
        self._serve()
        if turn.done():
            turn.result()
            return
        try:
            async with client.waiting():
                await turn
        except (asyncio.CancelledError, RequestError):
            taken = turn.done() and not turn.cancelled() and turn.exception() is None
            self.give_back(amount if taken else 0)
            raise

    def num_waiting(self, tenant: int) -> int:
        """Return how many requests of a tenant wait."""
        return len(self._waiting.get(tenant, ()))

    def give_back(self, amount: int = 1) -> None:
        self._free += amount
        self._serve()

    def _serve(self) -> None:
        """Serve waiting requests while there is enough, one of each tenant in turn."""
        while self._waiting:
            tenant, requests = next(iter(self._waiting.items()))
            turn, amount, client = requests[0]
            if amount > self._free and not turn.done():
                return
            requests.popleft()
            if not requests:
                del self._waiting[tenant]
            if turn.done():  # cancelled
                continue
            if requests:
                self._waiting.move_to_end(tenant)
            try:
                client.check_goes_on()
            except (ClientDisconnect, RequestError) as error:
                turn.set_exception(error)
            else:
                self._free -= amount
                turn.set_result(None)


class WorkThread:
    """A thread on which requests do work in turn.

    What those that wait keep in memory is limited where their bodies are counted.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._turns = Turns(1)

    def num_waiting(self) -> int:
        """Return how many requests of the client's tenant wait for the thread."""
        return self._turns.num_waiting(CLIENT.get().tenant)

    async def run(self, work: Callable[P, R], *args: P.args, **fields: P.kwargs) -> R:
        """Return the result of `work`, a slice of a request's.

        Raises ClientDisconnect, and OverloadedError if the request's body is ended.
        """
        await self._turns.take()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, partial(work, *args, **fields))
        finally:
            self._turns.give_back()

    def submit(self, work: Callable[[], None]) -> None:
        """Do work that belongs to no request, after what the thread does now."""
        self._thread.submit(work)


_body_bytes: Final = Turns(HELD_BYTES)
_body_thread: Final = WorkThread("bodies")


async def run_for_body(work: Callable[P, R], *args: P.args, **fields: P.kwargs) -> R:
    """Return the result of work on a request's body, which runs on a thread for a large one.

    Raises ClientDisconnect and OverloadedError.
    """
    if CLIENT.get().body_size <= INLINE_BYTES:
        return work(*args, **fields)
    return await run_in_turn(work, *args, **fields)


async def run_in_turn(work: Callable[P, R], *args: P.args, **fields: P.kwargs) -> R:
    """Return the result of work that runs on the thread of large bodies."""
    return await _body_thread.run(work, *args, **fields)


_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Of glibc's malloc.h."""


def return_freed_blocks() -> None:
    """Have glibc return memory of large bodies and texts to the system as soon as it is freed.

    By default the first free of a block of up to 32 MiB raises the size from which blocks are
    returned, and the process keeps what its largest requests took.
    """
    with suppress(AttributeError):  # another C library
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        allocator.mallopt(_M_TRIM_THRESHOLD, 8 << 20)


_is_return_pending: Final = threading.Event()


def _return_memory() -> None:
    """Free reference cycles of large objects, such as those of errors, and return their memory."""
    _is_return_pending.clear()
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
