"""A trace, read.

Owns what its lines say about each sequence. A last line that was cut off is passed over: the engine
may have been killed.
"""

from dataclasses import dataclass, field
from pathlib import Path

from engine_core.replay.chains import Chains, Tokens
from proto.errors import ProtocolError, TokendError
from proto.sched_trace import (
    Arrival,
    Content,
    Finish,
    TraceHeader,
    TraceLine,
    TurnEnd,
    read_line,
)


class UnreadableTraceError(TokendError):
    """It is no trace, or there is none."""


@dataclass(slots=True)
class Sequence:
    """What happened to one choice of a request; finish is None where the trace ends before it.

    tool: that a turn of a job calls; "" where it is not known.
    """

    arrival: Arrival
    finish: Finish | None = None
    tool: str = ""

    @property
    def num_outputs(self) -> int:
        """All that it got."""
        return self.finish.num_output_tokens if self.finish else self.arrival.max_tokens

    @property
    def content(self) -> Content:
        """As far as anything is known of it."""
        return self.finish.blocks if self.finish else self.arrival.blocks


@dataclass
class Recording:
    """lines: without the header. sequences: by handle, in the order of their arrival."""

    header: TraceHeader
    lines: list[TraceLine] = field(default_factory=list)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    chains: Chains = field(default_factory=Chains)
    _turns: dict[int, int] = field(default_factory=dict)  # request → first handle

    def tokens(self, sequence: Sequence) -> Tokens:
        """Of prompt and outputs."""
        arrival = sequence.arrival
        blocks = self.chains.blocks(arrival.blocks)
        blocks += self.chains.blocks(sequence.content)[len(blocks) :]
        return Tokens(blocks, self.header.block_size, arrival.handle)

    def take(self, line: TraceLine) -> None:
        """The next line."""
        self.lines.append(line)
        if isinstance(line, Arrival):
            self.sequences[line.handle] = Sequence(line)
            if line.job:
                self._turns.setdefault(line.request_id, line.handle)
            self.chains.learn(line.blocks)
        elif isinstance(line, Finish):
            self.chains.learn(line.blocks)
            if line.handle in self.sequences:
                self.sequences[line.handle].finish = line
        elif isinstance(line, TurnEnd) and line.request_id in self._turns:
            self.sequences[self._turns[line.request_id]].tool = line.tool


def read(path: str) -> Recording:
    """Raises UnreadableTraceError, which names the line."""
    try:
        written = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UnreadableTraceError(f"{path}: {error.strerror}") from None
    recording: Recording | None = None
    for number, text in enumerate(written, 1):
        if not text:
            continue
        try:
            line = read_line(text)
        except ProtocolError as error:
            if number == len(written) and recording is not None:
                break
            raise UnreadableTraceError(f"{path}, line {number}: {error}") from None
        if isinstance(line, TraceHeader) and recording is None:
            recording = Recording(line)
        elif recording is None or isinstance(line, TraceHeader):
            raise UnreadableTraceError(f"{path}, line {number}: a trace has one header, first")
        else:
            recording.take(line)
    if recording is None:
        raise UnreadableTraceError(f"{path}: there is nothing in it")
    return recording
