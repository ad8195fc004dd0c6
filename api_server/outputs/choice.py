"""One choice of a request: its tokens, its text, how it ended.

Owns the tokens of the choice and the text that the client has not seen yet. Knows
nothing of the engine or of HTTP.
"""

from dataclasses import dataclass, field
from typing import Final

from api_server.outputs.detokenizer import Detokenizer
from api_server.outputs.logprobs import LogprobRow, TextToken
from api_server.outputs.stop_strings import StopMatcher
from api_server.outputs.turn import Listener, unheard
from api_server.outputs.unsent import Unsent
from proto.engine_io import FinishReason

REPETITION_DETECTED: Final = "repetition_detected"
"""The stop_reason of a choice that repeats itself."""


@dataclass(slots=True)
class Delta:
    """What a choice gained since it was last looked at.

    index: place of the choice in the answer.
    tokens: where the text of each token begins, when log-probabilities were asked for.
    num_tokens: output tokens of the choice so far, these included.
    finish_reason: set in the last delta of a choice and in no other.
    """

    index: int
    text: str
    token_ids: list[int]
    tokens: list[TextToken]
    num_tokens: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Choice:
    """Text of one choice, growing.

    index: its place in the answer, over all prompts of the HTTP request.
    text_start: characters before the first output (the prompt, when it is echoed);
    offsets of tokens count from there.
    min_tokens: stop strings that are complete within so many tokens do not count.
    shows_stop: the text of a stop token is part of the choice's.
    interval: new tokens that make a piece of news, after the first one.
    counts_tokens: tokens are news also where they bring no text.
    unsent: of all choices of the HTTP request.
    heard: is given all text that is shown.
    """

    index: int
    detokenizer: Detokenizer
    stops: StopMatcher
    min_tokens: int = 0
    text_start: int = 0
    shows_stop: bool = False
    interval: int = 1
    counts_tokens: bool = False
    unsent: Unsent = field(default_factory=Unsent)
    heard: Listener = unheard
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _num_decoded_characters: int = 0
    _num_taken: int = 0
    _pieces: list[str] = field(default_factory=list)
    _new_tokens: list[TextToken] = field(default_factory=list)
    _end_reported: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_news(self) -> bool:
        """Whether a delta would show anything, and it is time for one."""
        if self.finished and not self._end_reported:
            return True
        num_new = len(self.token_ids) - self._num_taken
        if self._num_taken and num_new < self.interval:
            return False
        return bool(self._pieces or self._new_tokens) or (self.counts_tokens and num_new > 0)

    def extend(
        self,
        token_ids: list[int],
        rows: list[LogprobRow],
        finish_reason: FinishReason | None,
        stop_reason: int | None,
    ) -> int:
        """Take in new tokens; returns how many count, fewer when a stop string ended the choice.

        rows: one for each token, or none at all.
        """
        stopped = finish_reason is FinishReason.STOP and not self.shows_stop
        silent = len(token_ids) - 1 if stopped else len(token_ids)
        for position, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if rows:
                offset = self.text_start + self._num_decoded_characters
                self._new_tokens.append(TextToken(token_id, offset, rows[position]))
                self.unsent.add_entries(len(rows[position].token_ids))
            if position >= silent:
                break  # a stop token ends the choice and has no text
            if self._add_text(self.detokenizer.feed(token_id)):
                return position + 1
        if finish_reason is not None:
            self._end(finish_reason, stop_reason)
        return len(token_ids)

    def take(self) -> Delta:
        """Everything since the last call; merges what came in between."""
        text = "".join(self._pieces)
        tokens, self._new_tokens = self._new_tokens, []
        self._pieces.clear()
        delta = Delta(
            self.index,
            text,
            self.token_ids[self._num_taken :],
            tokens,
            len(self.token_ids),
        )
        self._num_taken = len(self.token_ids)
        if self.finished and not self._end_reported:
            self._end_reported = True
            delta.finish_reason = str(self.finish_reason)
            delta.stop_reason = self.stop_reason
        return delta

    def _add_text(self, piece: str) -> bool:
        """True when a stop string is complete."""
        if not piece:
            return False
        self._num_decoded_characters += len(piece)
        shown, stop = self.stops.feed(piece, armed=len(self.token_ids) > self.min_tokens)
        if shown:
            self._show(shown)
        if stop is None:
            return False
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return True

    def _end(self, finish_reason: FinishReason, stop_reason: int | None) -> None:
        if self._add_text(self.detokenizer.flush()):
            return
        rest = self.stops.flush()
        if rest:
            self._show(rest)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if finish_reason is FinishReason.REPETITION:
            self.stop_reason = REPETITION_DETECTED

    def _show(self, text: str) -> None:
        self._pieces.append(text)
        self.heard(text)
        self.unsent.add_text(text)
