"""Compiles grammars in a few threads, in turns among tenants, and caches the results.

    request ─▶ cached? ─▶ at once
         └▶ queue ─▶ (thread) sandbox ─▶ compile ─▶ event_fd ─▶ pop_compiled ─▶ cache

Loading a vocabulary holds the interpreter lock for a moment, so a thread does it first, while
the workers load. An engine that replaces one that died has streams waiting and nothing to load
meanwhile; it loads the vocabulary with the first grammar.
"""

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import (
    GrammarError,
    Matcher,
    UndecidedGrammarError,
)
from engine_core.structured_output.sandbox import GrammarSandbox
from proto.errors import InvalidRequestError, TokendError
from proto.grammar import GrammarSource
from proto.sockets import EventFd

logger = logging.getLogger("tokend.grammars")

STACK_BYTES: Final = 64 << 20
"""Stack of a thread that runs grammars; larger than that of the sandbox, so that a grammar that
did not overflow the sandbox does not overflow the engine."""

MAX_SANDBOXES: Final = 3
"""Sandbox processes, and threads that compile. Two of them may be busy with one tenant."""
START_AFTER_SECONDS: Final = 0.2
"""Time that a grammar waits before another sandbox starts, which loads the vocabulary again."""

CompiledGrammar = Matcher | GrammarError
"""A matcher to copy, or why the grammar cannot be used."""


class GrammarCache:
    """The most recently used grammars, also invalid ones, so that repeating one costs nothing.

    max_entries, max_bytes: limits of the number of grammars and of the bytes of their sources; 0
    keeps nothing.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, source: GrammarSource) -> CompiledGrammar | None:
        found = self._entries.get(source)
        if found is not None:
            self._entries.move_to_end(source)
        return found

    def put(self, source: GrammarSource, compiled: CompiledGrammar) -> None:
        """Add or replace an entry, and evict the least recently used ones beyond the limits."""
        if source not in self._entries:
            self.num_bytes += source.num_bytes
        self._entries[source] = compiled
        self._entries.move_to_end(source)
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            evicted, _ = self._entries.popitem(last=False)
            self.num_bytes -= evicted.num_bytes


class GrammarQueue:
    """Grammars that wait for a compile thread. Tenants take turns; not thread-safe.

    max_of_tenant: grammars of one tenant that are compiled at a time.
    """

    def __init__(self, max_of_tenant: int) -> None:
        self._max_of_tenant = max_of_tenant
        # By tenant, the next one first; with the times at which its grammars were added.
        self._waiting: OrderedDict[int, dict[GrammarSource, float]] = OrderedDict()
        self._num_started: Counter[int] = Counter()

    def add(self, tenant: int, source: GrammarSource, now: float) -> None:
        self._waiting.setdefault(tenant, {}).setdefault(source, now)

    def discard(self, source: GrammarSource) -> None:
        """Remove a grammar from the queues of all tenants."""
        for tenant in [one for one, sources in self._waiting.items() if source in sources]:
            del self._waiting[tenant][source]
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def start_next(self, added_before: float) -> tuple[int, GrammarSource] | None:
        """Return the next grammar and its tenant, if one was added before this time."""
        for tenant, sources in self._waiting.items():
            source, added = next(iter(sources.items()))
            if added <= added_before and self._num_started[tenant] < self._max_of_tenant:
                self._num_started[tenant] += 1
                self._waiting.move_to_end(tenant)
                self.discard(source)
                return tenant, source
        return None

    def finish(self, tenant: int) -> None:
        """Let the tenant start another grammar, because one is compiled."""
        self._num_started[tenant] -= 1
        if not self._num_started[tenant]:
            del self._num_started[tenant]

    def __bool__(self) -> bool:
        return bool(self._waiting)


class GrammarCompiler:
    """Compiles grammars in a thread for each sandbox; all methods are for the engine's thread.

    One tenant uses all threads but one, so another tenant's grammar never waits for only its
    grammars. A sandbox starts if a grammar has waited for START_AFTER_SECONDS for those that run.

    make_backend: called once, in a thread: at once if `eager`, otherwise with the first grammar.
    event_fd: notified when a grammar is compiled.
    """

    def __init__(
        self,
        make_backend: Callable[[], LLGuidanceBackend],
        sandboxes: Sequence[GrammarSandbox],
        cache: GrammarCache,
        event_fd: EventFd,
        *,
        eager: bool = True,
    ) -> None:
        self._make_backend = make_backend
        self._cache = cache
        self._event_fd = event_fd
        self._changed = threading.Condition()  # guards the three below
        self._queue = GrammarQueue(max(1, len(sandboxes) - 1))
        self._started: set[GrammarSource] = set()  # until their results are popped
        self._is_closing = False
        self._results: queue.SimpleQueue[tuple[GrammarSource, CompiledGrammar]] = (
            queue.SimpleQueue()
        )
        self._backend_lock = threading.Lock()
        self._is_backend_made = False
        self._backend: LLGuidanceBackend | None = None
        self._sandboxes = sandboxes
        self._threads = [
            start_thread(
                f"grammar compiler {index}",
                partial(
                    self._run_thread,
                    sandbox,
                    grace=START_AFTER_SECONDS if index else 0.0,
                    eager=eager and not index,
                ),
            )
            for index, sandbox in enumerate(sandboxes)
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
            with self._changed:
                if source not in self._started:
                    self._queue.add(tenant, source, time.monotonic())
                    self._changed.notify_all()
        return compiled

    def withdraw_grammar(self, source: GrammarSource) -> None:
        """Drop a grammar that no request waits for, unless its compilation has started."""
        with self._changed:
            self._queue.discard(source)

    def pop_compiled(self) -> list[tuple[GrammarSource, CompiledGrammar]]:
        """Return the grammars that were compiled since the last call."""
        compiled: list[tuple[GrammarSource, CompiledGrammar]] = []
        while not self._results.empty():
            source, result = self._results.get()
            with self._changed:
                self._started.discard(source)
            if not isinstance(result, UndecidedGrammarError):
                self._cache.put(source, result)
            compiled.append((source, result))
        return compiled

    def close(self) -> None:
        """End the threads after the grammars in progress, which take a few seconds at most."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread, sandbox in zip(self._threads, self._sandboxes, strict=True):
            thread.join()
            sandbox.close()

    def _run_thread(self, sandbox: GrammarSandbox, *, grace: float, eager: bool) -> None:
        if eager:
            self._create_backend()
        while (started := self._start_next(sandbox, grace)) is not None:
            tenant, source = started
            self._create_backend()
            compiled = self._compile(source, sandbox)
            if isinstance(compiled, GrammarError):
                compiled.param = source.field
            self._results.put((source, compiled))
            self._event_fd.notify()
            with self._changed:
                self._queue.finish(tenant)
                self._changed.notify_all()

    def _start_next(
        self, sandbox: GrammarSandbox, grace: float
    ) -> tuple[int, GrammarSource] | None:
        """Wait for a grammar to compile; None when the compiler closes.

        grace: seconds that a grammar waits for other threads if the sandbox has no process.
        """
        with self._changed:
            while not self._is_closing:
                wait = 0.0 if sandbox.is_running else grace
                started = self._queue.start_next(time.monotonic() - wait)
                if started is not None:
                    self._started.add(started[1])
                    return started
                self._changed.wait(wait if wait and self._queue else None)
        return None

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

    def _compile(self, source: GrammarSource, sandbox: GrammarSandbox) -> CompiledGrammar:
        """Compile a grammar. Raises nothing, because requests wait for the result."""
        if self._backend is None:
            return GrammarError("structured output is not available for this model")
        try:
            source.validate()
            if source.kind != "free":
                sandbox.check(source)
            return self._backend.compile(source)
        except GrammarError as error:
            return error
        except InvalidRequestError as error:
            return GrammarError(error.message)
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            return UndecidedGrammarError(f"the grammar cannot be used: {type(error).__name__}")


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread with a stack of STACK_BYTES."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
