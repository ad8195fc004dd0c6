"""A grammar that begins at a marker.

    text      Let me look it up. <tool>{"name": "find"}
    allowed   anything ─────────────── │ what the grammar says
                                       └ the trigger is complete

The trigger may end in the middle of a token; what stands behind it there is the beginning of
the text that the grammar is for.
"""

from collections.abc import Sequence
from typing import Protocol

from engine_core.structured_output.base import Matcher


class Texts(Protocol):
    """From tokens to their bytes, and back."""

    def text_of(self, token_id: int) -> bytes: ...

    def tokens_of(self, text: bytes) -> list[int]: ...


class DormantMatcher:
    """Free until its trigger has come, then `inner`.

    trigger: bytes of text; empty for none. trigger_token_id: a token; None for none.
    """

    def __init__(
        self,
        inner: Matcher,
        texts: Texts,
        trigger: bytes,
        trigger_token_id: int | None = None,
        *,
        seen: bytes = b"",
        awake: bool = False,
    ) -> None:
        self.inner = inner
        self._texts = texts
        self._trigger = trigger
        self._trigger_token_id = trigger_token_id
        self._seen = seen  # the end of the text, shorter than the trigger
        self._awake = awake

    def copy(self) -> "DormantMatcher":
        return DormantMatcher(
            self.inner.copy(),
            self._texts,
            self._trigger,
            self._trigger_token_id,
            seen=self._seen,
            awake=self._awake,
        )

    @property
    def is_free(self) -> bool:
        return not self._awake

    @property
    def error(self) -> str:
        return self.inner.error if self._awake else ""

    def consume(self, token_ids: Sequence[int]) -> None:
        for place, token_id in enumerate(token_ids):
            if self._awake:
                self.inner.consume(token_ids[place:])
                return
            self._look(token_id)

    def _look(self, token_id: int) -> None:
        if token_id == self._trigger_token_id:
            self._awake = True
            return
        if not self._trigger:
            return
        text = self._seen + self._texts.text_of(token_id)
        before, found, behind = text.partition(self._trigger)
        if found:
            self._awake = True
            if behind:
                self.inner.consume(self._texts.tokens_of(behind))
        else:
            self._seen = before[max(0, len(before) - len(self._trigger) + 1) :]
