"""One request and what came of it: when, how much, and whether it failed.

The figures are those of `vllm bench serve`:

    sent        first event with a choice                          last such event
      │◀──── TTFT ────▶│◀─ gap ─▶│◀─ gap ─▶│ …                          │
      │◀──────────────────────────── E2EL ─────────────────────────────▶│
    TPOT = (E2EL − TTFT) / (output tokens − 1);  the gaps are the ITLs.
"""

from array import array
from dataclasses import dataclass, field

from proto.openai_stream import StreamEvent


def no_gaps() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Exchange:
    """Seconds on the monotonic clock. error: empty if it did not fail.

    waited: seconds in the client itself, for a place among those that may be under way.
    asked_tokens: output tokens that were asked for. keep_text: whether pieces are kept.
    """

    asked_tokens: int
    keep_text: bool = False
    waited: float = 0.0
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: "array[float]" = field(default_factory=no_gaps)
    num_chunks: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    counted_tokens: int = 0
    finished: bool = False
    error: str = ""
    pieces: list[str] = field(default_factory=list)

    def take(self, event: StreamEvent, now: float) -> None:
        """Note an event that arrived now."""
        if event.choices:
            if self.num_chunks:
                self.gaps.append(now - self.last)
            else:
                self.first = now
            self.num_chunks += 1
            self.last = now
            for choice in event.choices:
                self.finished = self.finished or choice.finish_reason is not None
                if self.keep_text:
                    self.pieces.append(choice.added)
        if event.usage is not None:
            self.input_tokens = event.usage.prompt_tokens or 0
            self.counted_tokens = event.usage.completion_tokens or 0
            details = event.usage.prompt_tokens_details
            self.cached_tokens = (details.cached_tokens or 0) if details else 0
        self.error = self.error or event.failure

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def output_tokens(self) -> int:
        """What the server has counted; its chunks where it counts nothing."""
        return self.counted_tokens or self.num_chunks

    @property
    def ttft(self) -> float:
        return self.first - self.started

    @property
    def e2el(self) -> float:
        return self.last - self.started

    @property
    def tpot(self) -> float:
        """0 for a single token."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0
