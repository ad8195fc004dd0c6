"""Turns of clients at work in proportion to the size of what they send.

    tenant A   request 1, 1, 2 ─┐
    tenant B   request 3, 3 ────┴─▶ A1  B3  A2  B3  A1       one at a time

A large body or text is decoded, validated and tokenised on a thread, a slice of it in each turn, so
that the event loop and other clients continue. Tenants take turns, and so do the requests of a
tenant, small bodies before large ones. When its turn comes, a request whose client has disconnected
ends with `ClientDisconnect`.
"""

import asyncio
import ctypes
import gc
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Scope

from api_server.http.connection import MAX_BODY_BYTES, Upload, begin_upload, client_disconnected
from proto.errors import RequestError

P = ParamSpec("P")
R = TypeVar("R")
INLINE_BYTES: Final = 1 << 16
"""Largest body that is decoded on the event loop."""
UNHELD_BYTES: Final = 1 << 20
"""Largest body that is decoded without regard to other bodies."""
HELD_BYTES: Final = MAX_BODY_BYTES
"""Total bytes of large bodies in memory: each counts from its decoding until the engine has its
requests or its answer begins.

As objects they can take four times as much, see WIDE_FACTOR."""
WIDE_FACTOR: Final = 4
"""Bytes of a character in a text with an emoji, or with another one outside of the first plane."""
_WIDE: Final = (*(bytes([first]) for first in range(0xF0, 0xF5)), rb"\ud", rb"\uD")
"""What such a character begins with, in UTF-8 and as an escape in JSON."""


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
        self._num_decoding = 0
        self.body_size = 0

    @property
    def tenant(self) -> int:
        return self._tenant()

    def check_goes_on(self) -> None:
        """Raise the error with which the body was ended, or ClientDisconnect if the client left."""
        self._check_not_ended()
        if client_disconnected(self._scope):
            raise ClientDisconnect

    def _check_not_ended(self) -> None:
        if self._failure is not None:
            raise self._failure

    def count_body(self, size: int) -> None:
        """Set the size of the body, as far as it has arrived; raises OverloadedError."""
        self.body_size = size
        if self._upload is None:
            self._upload = begin_upload(self._scope, self.tenant, self._end_body)
        self._upload.resize(size)
        self._check_not_ended()

    async def hold_body(self, body: bytearray) -> None:
        """Return when a body may be decoded.

        Raises ClientDisconnect, and OverloadedError if too many bodies wait.
        """
        size = len(body)
        self.count_body(size)
        assert self._upload is not None
        if size > UNHELD_BYTES:
            await _body_bytes.take(size, work=size)
            self._num_decoding += size
            self._upload.resize(0)  # HELD_BYTES limits those that are decoded
        elif any(begin in body for begin in _WIDE):
            self._upload.resize(WIDE_FACTOR * size)
            self._check_not_ended()

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
        """Stop counting the body: the engine has its requests, or the answer begins."""
        num_decoding, self._num_decoding = self._num_decoding, 0
        if num_decoding:
            _body_bytes.give_back(num_decoding)
        if self._upload is not None:
            self._upload.resize(0)
        self._upload = self._failure = None


CLIENT: ContextVar[Client] = ContextVar("client")
"""The client whose request the current task serves; `ClientMiddleware` sets it."""


def current_client() -> Client:
    """Return the client whose request the current task serves; outside of requests a new one."""
    return CLIENT.get(None) or Client()


class _WaitingRequest(NamedTuple):
    place: int
    number: int
    turn: asyncio.Future[None]
    amount: int
    work: int
    client: Client


class Turns:
    """A limited amount, of threads or of bytes, that requests take and give back in turn.

    A request that does not fit waits, and so do all that would be served after it. A tenant waits
    for one request of each other tenant that was waiting before it, at most. Requests of a tenant
    pass larger ones, but none is passed by more work than its own:

        place of a request = work that was begun before it came + its own
    """

    def __init__(self, amount: int) -> None:
        self._free = amount
        # by tenant, the one whose turn is next comes first; a heap for each, by place
        self._waiting: OrderedDict[int, list[_WaitingRequest]] = OrderedDict()
        self._begun_work = 0
        self._numbers = count()

    async def take(self, amount: int = 1, *, work: int = 0) -> None:
        """Wait until the amount is free, and take it.

        work: size of what the request does then; 0 for all if they have their turns as they come.
        Raises ClientDisconnect if the client has left by then, and OverloadedError if its body is
        ended.
        """
        client, turn = current_client(), asyncio.get_running_loop().create_future()
        request = _WaitingRequest(
            self._begun_work + work, next(self._numbers), turn, amount, work, client
        )
        heappush(self._waiting.setdefault(client.tenant, []), request)
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
            _, _, turn, amount, work, client = requests[0]
            if amount > self._free and not turn.done():
                return
            heappop(requests)
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
                self._begun_work += work
                turn.set_result(None)


class WorkThread:
    """A thread on which requests do work in turn.

    What those that wait keep in memory is limited where their bodies are counted. by_size: what a
    request does in a turn is in proportion to its body.
    """

    def __init__(self, name: str, *, by_size: bool = False) -> None:
        self._by_size = by_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._turns = Turns(1)

    def num_waiting(self) -> int:
        """Return how many requests of the client's tenant wait for the thread."""
        return self._turns.num_waiting(current_client().tenant)

    async def run(self, work: Callable[P, R], *args: P.args, **fields: P.kwargs) -> R:
        """Return the result of `work`, a slice of a request's.

        Raises ClientDisconnect, and OverloadedError if the request's body is ended.
        """
        await self._turns.take(work=current_client().body_size if self._by_size else 0)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, partial(work, *args, **fields))
        finally:
            self._turns.give_back()

    def submit(self, work: Callable[[], None]) -> None:
        """Do work that belongs to no request, after what the thread does now."""
        self._thread.submit(work)


_body_bytes: Final = Turns(HELD_BYTES)
_body_thread: Final = WorkThread("bodies", by_size=True)


async def run_for_body(work: Callable[P, R], *args: P.args, **fields: P.kwargs) -> R:
    """Return the result of work on a request's body, which runs on a thread for a large one.

    Raises ClientDisconnect and OverloadedError.
    """
    if current_client().body_size <= INLINE_BYTES:
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
