"""Reading a trace: the sequences that its lines describe.

A truncated last line is skipped, since the engine may have been killed.
"""

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from proto.errors import ProtocolError, TokendError
from proto.messages.sched_trace import (
    Arrival,
    Content,
    Finish,
    TraceHeader,
    TraceLine,
    TurnEnd,
    read_line,
)
from proto.settings.config import SchedulerConfig
from tests.benchmarks.agent_jobs.load import AgentJob, AgentLoad, JobTurn, draw_jobs, draw_others

# Token ids from the content numbers of a trace: equal where the original tokens were equal.
#
# Every token of a block has the number of its content as its id, so two sequences share the same
# prefix hashes as before. Tokens without a number (the end of a sequence) are unique.


STOP: Final = (1 << 31) - 1
"""Stop token of a sequence that ended before its maximal length."""
VOCAB_SIZE: Final = 1 << 31
_OWN: Final = 1 << 30
"""First id of unique tokens, by seq_id."""


class Chains:
    """The order of block contents.

    runs       first 12, parent 7          contents   … 6 7 12 13 14
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._parents: list[int] = []

    def learn(self, content: Content) -> None:
        """Add the content of a line; called in the order of lines."""
        if content.num_new:
            self._firsts.append(content.first)
            self._parents.append(content.parent)

    def blocks(self, content: Content) -> list[int]:
        """Return the numbers of a sequence's full blocks, from the first on.

        Raise ValueError for a content whose beginning is unknown.
        """
        pieces: list[range] = []
        last, missing = content.parent, content.num_known
        if content.num_new:
            pieces.append(range(content.first, content.first + content.num_new))
        while missing:
            index = bisect_right(self._firsts, last) - 1
            if index < 0:
                raise ValueError(f"the trace does not say what comes before content {last}")
            first = max(self._firsts[index], last - missing + 1)
            pieces.append(range(first, last + 1))
            missing -= last + 1 - first
            last = self._parents[index]
        return [number for piece in reversed(pieces) for number in piece]


class Tokens:
    """The token ids of one sequence, including future outputs.

    blocks: numbers of the full blocks that are known.
    """

    __slots__ = ("_blocks", "_own", "_size")

    def __init__(self, blocks: list[int], block_size: int, seq_id: int) -> None:
        self._blocks = blocks
        self._size = block_size
        self._own = _OWN + seq_id

    def first(self, number: int) -> list[int]:
        """Return the first tokens."""
        size, blocks = self._size, self._blocks
        whole = blocks[: -(-number // size)]
        tokens = [token for block in whole for token in [block] * size][:number]
        return tokens + [self._own] * (number - len(tokens))

    def at(self, position: int) -> int:
        """Return the token at a position."""
        block = position // self._size
        return self._blocks[block] if block < len(self._blocks) else self._own


class UnreadableTraceError(TokendError):
    """The file is missing or not a trace."""


@dataclass(slots=True)
class RecordedRequest:
    """One choice of a request; finish is None if the trace ends before it.

    tool: the tool that a turn of a job calls; "" if unknown.
    """

    arrival: Arrival
    finish: Finish | None = None
    tool: str = ""

    @property
    def num_outputs(self) -> int:
        """Number of output tokens."""
        return self.finish.num_output_tokens if self.finish else self.arrival.max_tokens

    @property
    def content(self) -> Content:
        """The last known content."""
        return self.finish.blocks if self.finish else self.arrival.blocks


@dataclass
class Recording:
    """lines: without the header. sequences: by seq_id, in the order of their arrival."""

    header: TraceHeader
    lines: list[TraceLine] = field(default_factory=list)
    sequences: dict[int, RecordedRequest] = field(default_factory=dict)
    chains: Chains = field(default_factory=Chains)
    _turns: dict[int, int] = field(default_factory=dict)  # request → first seq_id

    def tokens(self, sequence: RecordedRequest) -> Tokens:
        """Return the token ids of prompt and outputs."""
        arrival = sequence.arrival
        blocks = self.chains.blocks(arrival.blocks)
        blocks += self.chains.blocks(sequence.content)[len(blocks) :]
        return Tokens(blocks, self.header.block_size, arrival.seq_id)

    def take(self, line: TraceLine) -> None:
        """Add the next line."""
        self.lines.append(line)
        if isinstance(line, Arrival):
            self.sequences[line.seq_id] = RecordedRequest(line)
            if line.job:
                self._turns.setdefault(line.request_id, line.seq_id)
            self.chains.learn(line.blocks)
        elif isinstance(line, Finish):
            self.chains.learn(line.blocks)
            if line.seq_id in self.sequences:
                self.sequences[line.seq_id].finish = line
        elif isinstance(line, TurnEnd) and line.request_id in self._turns:
            self.sequences[self._turns[line.request_id]].tool = line.tool


def read(path: str) -> Recording:
    """Read a trace; raise UnreadableTraceError, which names the line."""
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


# Arrival times of requests, some of which depend on the end of others.
#
# Requests without a job and first turns of jobs arrive at their recorded times. Every other turn
# arrives its recorded interval after the end of the previous turn, because the agent waits for the
# answer and then for its tool.
#
#     recorded    turn 1 ├─────┤ gap ├── turn 2 ──┤
#     simulated   turn 1 ├──────────┤ gap ├─ turn 2 ─┤
#
# A turn that arrived before the end of the previous one (jobs may send two requests at once)
# arrives its recorded interval after the arrival of that one.


class Arrivals(Protocol):
    """Future sequences by arrival time in seconds."""

    def __bool__(self) -> bool:
        """Whether the arrival time of a sequence is known."""
        ...

    @property
    def next_time(self) -> float:
        """Of the first that is to come; there must be one."""
        ...

    def take(self, now: float) -> RecordedRequest | None:
        """Return the next sequence that has arrived, or None."""
        ...

    def ended(self, seq_id: int, now: float) -> None:
        """Note the end of a sequence, on which later arrivals may depend."""
        ...


class InTime:
    """Sequences by their arrival times, in seconds.

    rate: factor of the arrival rate of first turns and of requests without a job.
    open_loop: the factor applies to all, and no turn waits for another one.
    """

    def __init__(
        self, sequences: Iterable[RecordedRequest], rate: float = 1.0, open_loop: bool = False
    ) -> None:
        self._heap: list[tuple[float, int]] = []
        self._sequences: dict[int, RecordedRequest] = {}
        self._after_end: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._after_start: dict[int, list[tuple[float, int]]] = defaultdict(list)
        last: dict[str, RecordedRequest] = {}
        for each in sequences:
            seq_id, job = each.arrival.seq_id, each.arrival.job
            self._sequences[seq_id] = each
            before = last.get(job) if job and not open_loop else None
            if before is None:
                self._push(each.arrival.time_us / 1e6 / rate, seq_id)
            else:
                self._chain(before, each)
            if job:
                last[job] = each

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def next_time(self) -> float:
        """Of the first that is to come; there must be one."""
        return self._heap[0][0]

    def take(self, now: float) -> RecordedRequest | None:
        """Return the next sequence that has arrived, or None."""
        if not self._heap or self._heap[0][0] > now:
            return None
        time, seq_id = heapq.heappop(self._heap)
        for gap, follower in self._after_start.pop(seq_id, ()):
            self._push(time + gap, follower)
        return self._sequences[seq_id]

    def ended(self, seq_id: int, now: float) -> None:
        """Note the end of a sequence; its follower arrives after its interval."""
        for gap, follower in self._after_end.pop(seq_id, ()):
            self._push(now + gap, follower)

    def _chain(self, before: RecordedRequest, follower: RecordedRequest) -> None:
        arrived, seq_id = follower.arrival.time_us, follower.arrival.seq_id
        ended = before.finish.time_us if before.finish else None
        if ended is not None and arrived >= ended:
            self._after_end[before.arrival.seq_id].append(((arrived - ended) / 1e6, seq_id))
        else:
            gap = (arrived - before.arrival.time_us) / 1e6
            self._after_start[before.arrival.seq_id].append((gap, seq_id))

    def _push(self, time: float, seq_id: int) -> None:
        heapq.heappush(self._heap, (time, seq_id))


class Together:
    """A constant number of concurrent jobs, in their order.

    Every turn arrives at the end of the previous one, as if tools took no time, and a job at the
    end of another one, to measure only the server. A request without a job is a job of one turn.
    """

    def __init__(self, sequences: Iterable[RecordedRequest], number: int) -> None:
        jobs: dict[str, deque[RecordedRequest]] = defaultdict(deque)
        for each in sequences:
            jobs[each.arrival.job or f"request {each.arrival.request_id}"].append(each)
        self._unstarted = deque(jobs.values())
        self._rest: dict[int, deque[RecordedRequest]] = {}
        self._ready: deque[RecordedRequest] = deque()
        self._now = 0.0
        for _ in range(number):
            self._start()

    def __bool__(self) -> bool:
        return bool(self._ready)

    @property
    def next_time(self) -> float:
        return self._now

    def take(self, now: float) -> RecordedRequest | None:
        return self._ready.popleft() if self._ready else None

    def ended(self, seq_id: int, now: float) -> None:
        self._now = now
        turns = self._rest.pop(seq_id)
        if turns:
            self._next(turns)
        else:
            self._start()

    def _start(self) -> None:
        if self._unstarted:
            self._next(self._unstarted.popleft())

    def _next(self, turns: deque[RecordedRequest]) -> None:
        turn = turns.popleft()
        self._rest[turn.arrival.seq_id] = turns
        self._ready.append(turn)


# A generated load of agent sessions as a recording without steps.
#
# In the nominal times of the recording a turn takes one second, and the time between two turns is
# the duration of the tool; a replay uses only the latter.


_BLOCK_SIZE: Final = 16
_SECOND: Final = 1_000_000


def recording_of(load: AgentLoad) -> Recording:
    """Return the recording of a load; its pool holds everything, and orders reduce it."""
    return _Writing(load).recording


class _Writing:
    """Writes jobs. Contents are numbered as in a trace, system prompts first."""

    def __init__(self, load: AgentLoad) -> None:
        self._load = load
        self._num_contents = 0
        self._lines: list[Arrival | Finish | TurnEnd] = []
        self._num_turns = 0
        shared = load.system_tokens // _BLOCK_SIZE
        self._systems = [self._new(0, 0, shared) for _ in range(load.num_systems)]
        for number, job in enumerate(draw_jobs(load)):
            self._write_job(f"agent-{number}", job)
        for starts_s, turn in draw_others(load):
            self._write_turn("", round(starts_s * _SECOND), Content(0, 0), turn.new_tokens, turn)
        self.recording = self._record()

    def _record(self) -> Recording:
        longest = self._load.longest
        most = self._num_contents + 2 + longest // _BLOCK_SIZE
        header = TraceHeader(
            epoch=1,
            started_at=0.0,
            num_blocks=most,
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=True,
            max_model_len=longest,
            scheduler=SchedulerConfig(max_num_queued_reqs=0, max_num_queued_tokens=0),
            device="none",
        )
        recording = Recording(header)
        for system in self._systems:
            recording.chains.learn(system)
        for line in self._lines:
            recording.take(line)
        return recording

    def _write_job(self, name: str, job: AgentJob) -> None:
        content, num_tokens = self._systems[job.system], self._load.system_tokens
        now = round(job.starts_s * _SECOND)
        for turn in job.turns:
            num_prompt = num_tokens + turn.new_tokens
            num_tokens = num_prompt + turn.output_tokens
            content = self._write_turn(name, now, content, num_prompt, turn)
            now += _SECOND + round(turn.tool_s * _SECOND)

    def _write_turn(
        self, job: str, now: int, content: Content, num_prompt: int, turn: JobTurn
    ) -> Content:
        """Write a turn; return its last content."""
        asked = self._extended(content, num_prompt)
        said = self._extended(asked, num_prompt + turn.output_tokens)
        seq_id = self._num_turns
        self._num_turns += 1
        self._lines.append(
            Arrival(
                time_us=now,
                arrived_us=now,
                seq_id=seq_id,
                request_id=seq_id,
                job=job,
                is_last_step=not turn.tool,
                num_prompt_tokens=num_prompt,
                max_tokens=turn.output_tokens,
                blocks=asked,
            )
        )
        self._lines.append(
            Finish(
                time_us=now + _SECOND,
                seq_id=seq_id,
                reason="length",
                num_output_tokens=turn.output_tokens,
                blocks=said,
            )
        )
        if job:
            self._lines.append(
                TurnEnd(time_us=now + _SECOND, request_id=seq_id, job=job, tool=turn.tool)
            )
        return said

    def _extended(self, content: Content, num_tokens: int) -> Content:
        """Return a longer content, whose existing blocks are known."""
        num_known = content.num_known + content.num_new
        last = content.first + content.num_new - 1 if content.num_new else content.parent
        return self._new(last, num_known, num_tokens // _BLOCK_SIZE - num_known)

    def _new(self, parent: int, num_known: int, num_new: int) -> Content:
        if not num_new:
            return Content(parent, num_known)
        first = self._num_contents + 1
        self._num_contents += num_new
        return Content(parent, num_known, first, num_new)
