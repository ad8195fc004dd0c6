"""Compiles grammars in a thread, one after the other, and caches the results.

    request ─▶ cached? ─▶ at once
         └▶ queue ─▶ (thread) sandbox ─▶ compile ─▶ event_fd ─▶ pop_compiled ─▶ cache

Loading a vocabulary holds the interpreter lock for a moment, so the thread does it first, while
the workers load. An engine that replaces one that died has streams waiting and nothing to load
meanwhile; it loads the vocabulary with the first grammar.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import GrammarError, Matcher
from engine_core.structured_output.sandbox import GrammarSandbox
from proto.errors import InvalidRequestError, TokendError
from proto.grammar import GrammarSource
from proto.sockets import EventFd

logger = logging.getLogger("tokend.grammars")

STACK_BYTES: Final = 64 << 20
"""Stack of a thread that runs grammars; larger than that of the sandbox, so that a grammar that
did not overflow the sandbox does not overflow the engine."""

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


class GrammarCompiler:
    """Compiles grammars in its thread; all methods are for the engine's thread.

    make_backend: called once, in the thread: at once if `eager`, otherwise with the first grammar.
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
        self._sources: queue.SimpleQueue[GrammarSource | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[GrammarSource, CompiledGrammar]] = (
            queue.SimpleQueue()
        )
        self._in_progress: set[GrammarSource] = set()
        self._backend: LLGuidanceBackend | None = None
        self._thread = start_thread("grammar compiler", self._run_thread)

    @property
    def backend(self) -> LLGuidanceBackend:
        """Return the backend, which exists once any grammar has been compiled."""
        assert self._backend is not None
        return self._backend

    def request_grammar(self, source: GrammarSource) -> CompiledGrammar | None:
        """Return a grammar from the cache, or None; then `pop_compiled` returns it later."""
        compiled = self._cache.get(source)
        if compiled is None and source not in self._in_progress:
            self._in_progress.add(source)
            self._sources.put(source)
        return compiled

    def pop_compiled(self) -> list[tuple[GrammarSource, CompiledGrammar]]:
        """Return the grammars that were compiled since the last call."""
        compiled: list[tuple[GrammarSource, CompiledGrammar]] = []
        while not self._results.empty():
            source, result = self._results.get()
            self._in_progress.discard(source)
            self._cache.put(source, result)
            compiled.append((source, result))
        return compiled

    def close(self) -> None:
        """End the thread after the grammar in progress, which takes a few seconds at most."""
        self._sources.put(None)
        self._thread.join()
        self._sandbox.close()

    def _run_thread(self) -> None:
        if self._eager:
            self._create_backend()
        source = self._sources.get()
        if source is not None and not self._eager:
            self._create_backend()
        while source is not None:
            compiled = self._compile(source)
            if isinstance(compiled, GrammarError):
                compiled = compiled.in_field(source.field)
            self._results.put((source, compiled))
            self._event_fd.notify()
            source = self._sources.get()

    def _create_backend(self) -> None:
        try:
            self._backend = self._make_backend()
        except TokendError as error:
            logger.warning("structured output is not available: %s", error)
        except Exception:
            logger.exception("structured output is not available")

    def _compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar. Raises nothing, because requests wait for the result."""
        if self._backend is None:
            return GrammarError("structured output is not available for this model")
        try:
            source.validate()
            if source.kind != "free":
                self._sandbox.check(source)
            return self._backend.compile(source)
        except InvalidRequestError as error:
            return GrammarError(error.message)
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            return GrammarError(f"the grammar cannot be used: {type(error).__name__}")


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread with a stack of STACK_BYTES."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
