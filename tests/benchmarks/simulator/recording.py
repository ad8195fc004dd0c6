"""A trace, read.

Owns what its lines say about each sequence. A last line that was cut off is passed over: the engine
may have been killed.
"""

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from deploy.bench.agents.load import AgentJob, AgentLoad, JobTurn, draw_jobs, draw_others
from proto.config import SchedulerConfig
from proto.errors import ProtocolError, TokendError
from proto.sched_trace import Arrival, Content, Finish, TraceHeader, TraceLine, TurnEnd, read_line

# From the numbers of a trace back to token ids: other tokens, that are alike where theirs were.
#
# Every token of a block has the number of its content as its id, so two sequences hash alike up to
# where they did. What no number covers (the end of a sequence) is like nothing else.


STOP: Final = (1 << 31) - 1
"""Ends a sequence that ended before its length did."""
VOCAB_SIZE: Final = 1 << 31
_OWN: Final = 1 << 30
"""From here on: what is like nothing else, by seq_id."""


class Chains:
    """Which content comes before which.

    runs       first 12, parent 7          contents   … 6 7 12 13 14
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._parents: list[int] = []

    def learn(self, content: Content) -> None:
        """What a line says; in the order of the lines."""
        if content.num_new:
            self._firsts.append(content.first)
            self._parents.append(content.parent)

    def blocks(self, content: Content) -> list[int]:
        """The numbers of a sequence's full blocks, from the first on.

        Raises ValueError for a content whose beginning nobody has told.
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
    """The token ids of one sequence, outputs to come included.

    blocks: numbers of the full blocks that are known.
    """

    __slots__ = ("_blocks", "_own", "_size")

    def __init__(self, blocks: list[int], block_size: int, seq_id: int) -> None:
        self._blocks = blocks
        self._size = block_size
        self._own = _OWN + seq_id

    def first(self, number: int) -> list[int]:
        """So many."""
        size, blocks = self._size, self._blocks
        whole = blocks[: -(-number // size)]
        tokens = [token for block in whole for token in [block] * size][:number]
        return tokens + [self._own] * (number - len(tokens))

    def at(self, position: int) -> int:
        """One."""
        block = position // self._size
        return self._blocks[block] if block < len(self._blocks) else self._own


class UnreadableTraceError(TokendError):
    """It is no trace, or there is none."""


@dataclass(slots=True)
class RecordedRequest:
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
    """lines: without the header. sequences: by seq_id, in the order of their arrival."""

    header: TraceHeader
    lines: list[TraceLine] = field(default_factory=list)
    sequences: dict[int, RecordedRequest] = field(default_factory=dict)
    chains: Chains = field(default_factory=Chains)
    _turns: dict[int, int] = field(default_factory=dict)  # request → first seq_id

    def tokens(self, sequence: RecordedRequest) -> Tokens:
        """Of prompt and outputs."""
        arrival = sequence.arrival
        blocks = self.chains.blocks(arrival.blocks)
        blocks += self.chains.blocks(sequence.content)[len(blocks) :]
        return Tokens(blocks, self.header.block_size, arrival.seq_id)

    def take(self, line: TraceLine) -> None:
        """The next line."""
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


# When which request comes, where what comes depends on what has ended.
#
# Requests without a job come when they came. The turns of a job follow each other: the first comes
# when it came, each other one so long after the end of the one before as it did, because the agent
# behind it waits for the answer and then for its tool.
#
#     recorded    turn 1 ├─────┤ gap ├── turn 2 ──┤
#     simulated   turn 1 ├──────────┤ gap ├─ turn 2 ─┤
#
# A turn that came before the end of the one before (jobs may ask for two things at once) comes as
# long after the arrival of that one as it did.


class Arrivals(Protocol):
    """Sequences that are still to come, by the time of their arrival, in seconds."""

    def __bool__(self) -> bool:
        """Somebody's time is known."""
        ...

    @property
    def next_time(self) -> float:
        """Of the first that is to come; there must be one."""
        ...

    def take(self, now: float) -> RecordedRequest | None:
        """The next one that has come; None where there is none."""
        ...

    def ended(self, seq_id: int, now: float) -> None:
        """Who waited for its end comes later."""
        ...


class InTime:
    """Sequences by the time of their arrival, in seconds.

    rate: first turns, and requests without a job, come so many times as fast.
    open_loop: everything does, and nothing waits for anything.
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
        """The next one that has come; None where there is none."""
        if not self._heap or self._heap[0][0] > now:
            return None
        time, seq_id = heapq.heappop(self._heap)
        for gap, follower in self._after_start.pop(seq_id, ()):
            self._push(time + gap, follower)
        return self._sequences[seq_id]

    def ended(self, seq_id: int, now: float) -> None:
        """Who waited for its end comes after its gap."""
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
    """So many jobs at once, in their order, for as long as there are enough.

    Each turn comes at the end of the one before, as if tools took no time, and a job at the end of
    another one: what is measured is the server alone. A request without a job is a job of its own.
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


# A drawn load of agent sessions as a recording without steps.
#
# In the nominal times of the recording a turn takes one second, and the time between two turns is
# the duration of the tool; a replay takes nothing else from them.


_BLOCK_SIZE: Final = 16
_SECOND: Final = 1_000_000


def recording_of(load: AgentLoad) -> Recording:
    """The same for the same load. Its pool holds everything; orders make it smaller."""
    return _Writing(load).recording


class _Writing:
    """Writes job after job. Contents are numbered as a trace would, system prompts first."""

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
        """Returns its last content."""
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
        """The same and more, of which the blocks that it had are known."""
        num_known = content.num_known + content.num_new
        last = content.first + content.num_new - 1 if content.num_new else content.parent
        return self._new(last, num_known, num_tokens // _BLOCK_SIZE - num_known)

    def _new(self, parent: int, num_known: int, num_new: int) -> Content:
        if not num_new:
            return Content(parent, num_known)
        first = self._num_contents + 1
        self._num_contents += num_new
        return Content(parent, num_known, first, num_new)
