"""Compiles grammars in threads, in turns among tenants, and caches the results.

    request ─▶ cached? ─▶ at once
         └▶ quick queue ─▶ 2 threads: sandbox, compile ─▶ event_fd ─▶ pop_compiled ─▶ cache
                               └ over 0.05 s ─▶ slow queue ─▶ 1 thread: the same

A grammar that takes longer than QUICK_SECONDS is compiled again among the slow ones, one at a time,
while the quick ones go on. So one grammar delays another by QUICK_SECONDS of processor time at
most, and slow grammars occupy one core however many there are. In both queues tenants take turns.

Loading a vocabulary holds the interpreter lock for a moment, so a thread does it first, while
the workers load. An engine that replaces one that died has streams waiting and nothing to load
meanwhile; it loads the vocabulary with the first grammar. The process of the sandbox takes seconds
to start on a busy machine: it starts when the engine is idle for the first time (`warm_up`).
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import (
    CompilerFailedError,
    GrammarError,
    GrammarTimeoutError,
    Matcher,
)
from engine_core.structured_output.sandbox import GrammarSandbox
from proto.errors import InvalidRequestError, TokendError
from proto.messages.grammar import GrammarSource
from proto.runtime.sockets import EventFd

logger = logging.getLogger("tokend.grammars")

STACK_BYTES: Final = 64 << 20
"""Stack of a thread that runs grammars; larger than that of the sandbox, so that a grammar that
did not overflow the sandbox does not overflow the engine."""

QUICK_THREADS: Final = 2
QUICK_SECONDS: Final = 0.05
"""Processor time of a grammar before it has to wait among the slow ones. Of 1,493 schemas of
JSONSchemaBench the slowest takes 0.04 s, one of a hundred more than 0.013 s."""
COMPILE_SECONDS: Final = 2.0
"""Processor time of any grammar in the sandbox; the engine then needs about the same time."""

UNAVAILABLE: Final = "structured output is not available for this model"
"""Error of requests with a grammar if the model's tokenizer has no backend."""

_WARM_UP: Final = GrammarSource("regex", "a")

CompiledGrammar = Matcher | GrammarError | CompilerFailedError
"""A matcher to copy, or why there is none."""


class GrammarCache:
    """The most recently used grammars, also invalid ones, so that repeating one costs nothing.

    max_entries, max_bytes: limits of the number of grammars and of the memory of all, with their
    sources; 0 keeps nothing.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[GrammarSource, tuple[CompiledGrammar, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, source: GrammarSource) -> CompiledGrammar | None:
        found = self._entries.get(source)
        if found is None:
            return None
        self._entries.move_to_end(source)
        return found[0]

    def put(self, source: GrammarSource, compiled: CompiledGrammar, num_bytes: int = 0) -> None:
        """Add or replace an entry, and evict the least recently used ones beyond the limits.

        num_bytes: of the compiled grammar.
        """
        _, replaced = self._entries.pop(source, (None, 0))
        num_bytes += source.num_bytes
        self._entries[source] = compiled, num_bytes
        self.num_bytes += num_bytes - replaced
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            _, (_, evicted) = self._entries.popitem(last=False)
            self.num_bytes -= evicted


class GrammarQueue:
    """Grammars that wait for a thread; tenants take turns. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[int, dict[GrammarSource, None]] = OrderedDict()  # by tenant
        self._is_closed = False

    def put(self, tenant: int, source: GrammarSource) -> None:
        with self._changed:
            self._waiting.setdefault(tenant, {})[source] = None
            self._changed.notify()

    def get(self) -> tuple[int, GrammarSource] | None:
        """Wait for the next grammar; return it with its tenant, or None once the queue is closed.

        Other tenants that wait for the same grammar wait for this thread's result.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            tenant, sources = next(iter(self._waiting.items()))
            self._waiting.move_to_end(tenant)
            source = next(iter(sources))
            self._remove(source)
            return tenant, source

    def discard(self, source: GrammarSource) -> bool:
        """Remove a grammar from the turns of all tenants. Return whether it was waiting."""
        with self._changed:
            return self._remove(source)

    def close(self) -> None:
        """End the threads that wait in `get`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _remove(self, source: GrammarSource) -> bool:
        tenants = [one for one, sources in self._waiting.items() if source in sources]
        for tenant in tenants:
            del self._waiting[tenant][source]
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        return bool(tenants)


class GrammarCompiler:
    """Compiles grammars in its threads; all methods are for the engine's thread.

    make_backend: called once, in a thread: at once if `eager`, otherwise with the first grammar.
    event_fd: notified when a grammar is compiled.
    """

    def __init__(
        self,
        make_backend: Callable[[], LLGuidanceBackend],
        sandbox: GrammarSandbox,
        cache: GrammarCache,
        event_fd: EventFd,
        *,
        eager: bool = True,
    ) -> None:
        self._make_backend = make_backend
        self._eager = eager
        self._sandbox = sandbox
        self._cache = cache
        self._event_fd = event_fd
        self._quick = GrammarQueue()
        self._slow = GrammarQueue()
        self._tenants_by_source: dict[GrammarSource, set[int]] = {}  # of grammars in progress
        self._results: queue.SimpleQueue[tuple[GrammarSource, CompiledGrammar, int]] = (
            queue.SimpleQueue()
        )
        self._is_warm = False
        self._backend_lock = threading.Lock()
        self._is_backend_made = False
        self._backend: LLGuidanceBackend | None = None
        run_quick = partial(self._run_thread, self._quick, QUICK_SECONDS)
        run_slow = partial(self._run_thread, self._slow, COMPILE_SECONDS)
        self._threads = [
            *(start_thread(f"grammar compiler {one}", run_quick) for one in range(QUICK_THREADS)),
            start_thread("slow grammar compiler", run_slow),
        ]

    @property
    def backend(self) -> LLGuidanceBackend:
        """Return the backend, which exists once any grammar has been compiled."""
        assert self._backend is not None
        return self._backend

    def request_grammar(self, source: GrammarSource, tenant: int) -> CompiledGrammar | None:
        """Return a grammar from the cache, or None; then `pop_compiled` returns it later."""
        compiled = self._cache.get(source)
        if compiled is None:
            tenants = self._tenants_by_source.setdefault(source, set())
            if tenant not in tenants:
                tenants.add(tenant)
                self._quick.put(tenant, source)
        return compiled

    def warm_up(self) -> None:
        """Start the sandbox by a grammar that no request waits for; later calls do nothing."""
        if not self._is_warm:
            self._is_warm = True
            self.request_grammar(_WARM_UP, 0)

    def withdraw_grammar(self, source: GrammarSource) -> None:
        """Drop a grammar that no request waits for, unless it is being compiled."""
        was_waiting = [grammars.discard(source) for grammars in (self._quick, self._slow)]
        if any(was_waiting):
            self._tenants_by_source.pop(source, None)

    def pop_compiled(self) -> list[tuple[GrammarSource, CompiledGrammar]]:
        """Return the grammars that were compiled since the last call."""
        compiled: list[tuple[GrammarSource, CompiledGrammar]] = []
        while not self._results.empty():
            source, result, num_bytes = self._results.get()
            self._tenants_by_source.pop(source, None)
            if not isinstance(result, CompilerFailedError):
                self._cache.put(source, result, num_bytes)
            compiled.append((source, result))
        return compiled

    def close(self) -> None:
        """End the threads, which takes a few seconds at most: a compilation cannot be stopped."""
        self._quick.close()
        self._slow.close()
        self._sandbox.close()
        for thread in self._threads:
            thread.join()

    def _run_thread(self, grammars: GrammarQueue, seconds: float) -> None:
        if self._eager:
            self._create_backend()
        while (turn := grammars.get()) is not None:
            tenant, source = turn
            self._create_backend()
            compiled, num_bytes = self._compile(source, seconds)
            if isinstance(compiled, GrammarTimeoutError) and grammars is self._quick:
                self._slow.put(tenant, source)
                continue
            if isinstance(compiled, GrammarError):
                compiled = compiled.in_field(source.field)
            self._results.put((source, compiled, num_bytes))
            self._event_fd.notify()

    def _create_backend(self) -> None:
        """Create the backend, unless that was tried before."""
        with self._backend_lock:
            if self._is_backend_made:
                return
            self._is_backend_made = True
            try:
                self._backend = self._make_backend()
            except TokendError as error:
                logger.warning("structured output is not available: %s", error)
            except Exception:
                logger.exception("structured output is not available")

    def _compile(self, source: GrammarSource, seconds: float) -> tuple[CompiledGrammar, int]:
        """Compile a grammar; return it and its memory in bytes.

        Raises nothing, because requests wait for the result.
        """
        if self._backend is None:
            return GrammarError(UNAVAILABLE), 0
        try:
            source.validate()
            num_bytes = 0 if source.kind == "free" else self._sandbox.check(source, seconds)
            return self._backend.compile(source), num_bytes
        except (GrammarError, CompilerFailedError) as error:
            return error, 0
        except InvalidRequestError as error:
            return GrammarError(error.message), 0
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            failure = f"the grammar was not compiled: {type(error).__name__}"
            return CompilerFailedError(failure), 0


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread with a stack of STACK_BYTES."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
