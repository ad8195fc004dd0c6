"""What was compiled of late, bounded by number and by the bytes of the sources.

Least recently used goes first. Refusals are kept as well: a client that asks for the same
impossible grammar again costs nothing.
"""

from collections import OrderedDict

from engine_core.structured_output.base import GrammarError, Matcher
from proto.grammar import GrammarSource

Compiled = Matcher | GrammarError


class GrammarCache:
    """max_entries, max_bytes: what is kept at most; 0 keeps nothing."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[GrammarSource, Compiled] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Of the sources."""
        return self._num_bytes

    def get(self, source: GrammarSource) -> Compiled | None:
        """None where it has to be compiled."""
        found = self._entries.get(source)
        if found is not None:
            self._entries.move_to_end(source)
        return found

    def put(self, source: GrammarSource, compiled: Compiled) -> None:
        """Keep what a source came to, and drop what is too much."""
        if source not in self._entries:
            self._num_bytes += source.num_bytes
        self._entries[source] = compiled
        self._entries.move_to_end(source)
        while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
            dropped, _ = self._entries.popitem(last=False)
            self._num_bytes -= dropped.num_bytes
