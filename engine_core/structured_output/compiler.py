"""Compiles grammars in a thread, one after the other, and keeps what came of it.

    order ─▶ cached? ─▶ at once
        └▶ queue ─▶ (thread) trial ─▶ compile ─▶ event_fd ─▶ take ─▶ cache

Reading a vocabulary takes a moment in which nothing else of this process runs, so the thread begins
with that, while workers load. Where nothing has to load, because an engine takes the place of one
that died, streams wait for it, and it is done with the first grammar. Owns thread, trial and
cache; knows nothing of requests.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from engine_core.structured_output.base import GrammarBackend, GrammarError
from engine_core.structured_output.cache import Compiled, GrammarCache
from engine_core.structured_output.trial import Trial
from proto.errors import InvalidRequestError, TokendError
from proto.grammar import GrammarSource

logger = logging.getLogger("tokend.grammars")

STACK_BYTES: Final = 64 << 20
"""Of the threads here: more than the trial had, so that what did not fill that one fits."""
_END: Final = None


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A thread with a deep stack that nobody waits for at the end."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


class GrammarCompiler:
    """From sources to matchers.

    make_backend: called once, in the thread; at once where it is `eager`, or with the first order.
    ring: when there is something to take.
    """

    def __init__(
        self,
        make_backend: Callable[[], GrammarBackend],
        trial: Trial,
        cache: GrammarCache,
        ring: Callable[[], None],
        *,
        eager: bool = True,
    ) -> None:
        self._make_backend = make_backend
        self._eager = eager
        self._trial = trial
        self._cache = cache
        self._ring = ring
        self._commands: queue.SimpleQueue[GrammarSource | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[GrammarSource, Compiled]] = queue.SimpleQueue()
        self._ordered: set[GrammarSource] = set()
        self._backend: list[GrammarBackend] = []  # one, once it is made
        self._thread = start_thread("grammar compiler", self._run)

    @property
    def backend(self) -> GrammarBackend:
        """There is one as soon as anything was compiled."""
        return self._backend[0]

    def order(self, source: GrammarSource) -> Compiled | None:
        """What a source comes to, if that is known; otherwise `take` brings it."""
        compiled = self._cache.get(source)
        if compiled is None and source not in self._ordered:
            self._ordered.add(source)
            self._commands.put(source)
        return compiled

    def take(self) -> list[tuple[GrammarSource, Compiled]]:
        """What was compiled since the last call."""
        taken: list[tuple[GrammarSource, Compiled]] = []
        while not self._done.empty():
            source, compiled = self._done.get()
            self._ordered.discard(source)
            self._cache.put(source, compiled)
            taken.append((source, compiled))
        return taken

    def close(self) -> None:
        """Compile nothing more; waits for what is under way, a few seconds at most."""
        self._commands.put(_END)
        self._thread.join()
        self._trial.close()

    def _run(self) -> None:
        if self._eager:
            self._begin()
        source = self._commands.get()
        if source is not _END and not self._eager:
            self._begin()
        while source is not _END:
            compiled = self._compiled(source)
            if isinstance(compiled, GrammarError):
                compiled.param = source.field
            self._done.put((source, compiled))
            self._ring()
            source = self._commands.get()

    def _begin(self) -> None:
        try:
            self._backend.append(self._make_backend())
        except TokendError as error:
            logger.warning("structured output is not available: %s", error)
        except Exception:
            logger.exception("structured output is not available")

    def _compiled(self, source: GrammarSource) -> Compiled:
        """Never raises: whoever waits for it would wait for ever."""
        if not self._backend:
            return GrammarError("structured output is not available for this model")
        try:
            source.validate()
            if source.kind != "free":
                self._trial.check(source)
            return self.backend.compile(source)
        except InvalidRequestError as error:
            return GrammarError(error.message)
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            return GrammarError(f"the grammar cannot be used: {type(error).__name__}")
