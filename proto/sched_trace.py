"""The lines of a scheduler trace: what `--sched-trace` writes, and `tokend trace` reads.

JSON, an object a line, told apart by its `kind`; a field that has its default is left out, and a
reader passes over fields that it does not know. The first line is the header. Names, counts and
times only: no text, no token ids, no hashes of them (see `Content`).

Times are whole microseconds since the header's `started_at`. A sequence (one choice of a request)
goes by its handle, which is never used twice in a trace.

    header
    arrival 0
    step 1      snapshot, then the decision: new 0
    result 1    0 has its first token
    step 2      …
    finish 0
    end
"""

from typing import Any, Final

import msgspec

from proto.codec import from_json
from proto.config import SchedulerConfig
from proto.errors import ProtocolError
from proto.lifecycle import KVGroup

VERSION: Final = 1
"""Of the format; another one where a reader of this one would be misled."""
MAX_PINS: Final = 64
"""That a snapshot lists."""


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", gc=False
):
    """time_us: when it was written down, or what it tells happened."""

    time_us: int = 0


class TraceHeader(_Line, frozen=True, kw_only=True, tag="header", omit_defaults=False):
    """What the steps were decided with.

    epoch: of the engine. started_at: Unix time of time_us = 0.
    num_blocks: of the pool, the null block included. scheduler: settings as they came out.
    groups: KV cache groups of the model. device: its name.
    """

    version: int = VERSION
    epoch: int
    started_at: float
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    max_model_len: int
    scheduler: SchedulerConfig
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    device: str = ""


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which full blocks a sequence has, by numbers instead of hashes.

    A block gets the next number (from 1) when its content, which includes all that comes before
    it, is first seen. So a sequence is some blocks that were seen before and some that were not:

        parent 7, num_known 3, first 12, num_new 2      … … 7 12 13

    parent: number of the last block that was known; 0 for none. first: of the first new one.
    """

    parent: int = 0
    num_known: int = 0
    first: int = 0
    num_new: int = 0


class Arrival(_Line, frozen=True, kw_only=True, tag="arrival"):
    """A sequence is in the queue.

    request_id, choice: name it towards the front end; choices arrive one after the other.
    arrived_us: at the front end, which is before the start of the trace where the request was
    taken over from an earlier engine. tenant: 64 bits, 0 for nobody. job: of the client, if known,
    which also says whether this is its last turn, and how long KV is worth keeping behind it.
    num_output_tokens: that an earlier engine generated. blocks: of prompt and those.
    reads_cache: the prompt may be found in the prefix cache.
    """

    handle: int
    request_id: int
    choice: int = 0
    arrived_us: int
    tenant: int = 0
    priority: int = 0
    job: str = ""
    is_last_step: bool = False
    ttl_ms: float | None = None
    num_prompt_tokens: int
    num_output_tokens: int = 0
    max_tokens: int
    blocks: Content = Content()
    reads_cache: bool = True


class PoolUse(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Blocks by what they are for; together all but the null block.

    free: hold nothing. cached: nobody's, but their content can be found. requests: of sequences.
    held: by a connector for a copy. pinned: by jobs between two turns. A block that several
    use counts once, for the first of requests, held, pinned.
    """

    free: int
    cached: int = 0
    requests: int = 0
    held: int = 0
    pinned: int = 0


class PinUse(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A job's blocks between two turns."""

    job: str
    num_blocks: int


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """How things stood before a step was decided.

    waiting: sequences that may be admitted, of which `preempted` ran before. blocked: those set
    aside, by what for. pins: the MAX_PINS that were granted time last, newest first, of `num_pins`.
    token_budget: of the step; seats: sequences that may run at once.
    """

    waiting: int = 0
    preempted: int = 0
    blocked: dict[str, int] = {}
    running: int = 0
    pool: PoolUse
    pins: list[PinUse] = []
    num_pins: int = 0
    token_budget: int
    seats: int


class PrefixHit(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """What an admitted sequence did not need to compute, also where that is nothing.

    num_tokens: that it had. local_tokens: found in the pool (or shared by another choice);
    external_tokens: that `connector` brings, while it waits or (asynchronous) before.
    """

    handle: int
    num_tokens: int
    local_tokens: int = 0
    external_tokens: int = 0
    connector: str = ""
    asynchronous: bool = False


class Decision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """What a step computes. Lists of handles, in order, each beside one of numbers of tokens.

    new: admitted for the first time; resumed: admitted again; hits: of both.
    running, running_tokens: those that ran already; an empty list of numbers stands for one each.
    preempted: in order. num_tokens: of the step. context_tokens: that its sequences have computed
    with it, together.
    """

    new: list[int] = []
    new_tokens: list[int] = []
    resumed: list[int] = []
    resumed_tokens: list[int] = []
    running: list[int] = []
    running_tokens: list[int] = []
    preempted: list[int] = []
    hits: list[PrefixHit] = []
    num_tokens: int = 0
    context_tokens: int = 0


class Step(_Line, frozen=True, kw_only=True, tag="step"):
    """schedule() was called at time_us; one that computes nothing has no result."""

    step: int
    snapshot: Snapshot
    decision: Decision


class Result(_Line, frozen=True, kw_only=True, tag="result"):
    """What a step brought arrived. first: sequences that had no token before.

    compute_seconds: as the workers say, from which the scheduler learns; 0 where they do not.
    """

    step: int
    num_tokens: int = 0
    first: list[int] = []
    compute_seconds: float = 0.0


class Finish(_Line, frozen=True, kw_only=True, tag="finish"):
    """A sequence is over. reason: stop, length, repetition, abort or error.

    num_cached_tokens: found when it was first admitted. blocks: of all its tokens.
    """

    handle: int
    reason: str
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    blocks: Content = Content()


class TurnEnd(_Line, frozen=True, kw_only=True, tag="turn"):
    """The front end has read the answer of a job's turn. tool: that the job waits for, or none."""

    request_id: int
    job: str
    tool: str = ""


class PinBegin(_Line, frozen=True, kw_only=True, tag="pin"):
    """A job keeps blocks when a turn of it ends. ttl_us: for so long at most."""

    job: str
    handle: int
    num_blocks: int
    ttl_us: int = 0


class PinEnd(_Line, frozen=True, kw_only=True, tag="unpin"):
    """It gives them up. reason: such as next turn, expired, room."""

    job: str
    reason: str = ""


class Event(_Line, frozen=True, kw_only=True, tag="event"):
    """Something else that changes what is decided: restart, pause, resume, reset."""

    what: str
    detail: str = ""


class Dropped(_Line, frozen=True, kw_only=True, tag="dropped"):
    """So many lines are missing here: the disk was slower than the engine."""

    num_lines: int


class TraceEnd(_Line, frozen=True, kw_only=True, tag="end"):
    """The last line: shutdown, or that the file is as long as it may be."""

    reason: str


TraceLine = (
    TraceHeader
    | Arrival
    | Step
    | Result
    | Finish
    | TurnEnd
    | PinBegin
    | PinEnd
    | Event
    | Dropped
    | TraceEnd
)
_LINE: Final[Any] = TraceLine


def read_line(line: bytes) -> TraceLine:
    """One line; raises ProtocolError for what is none of this version."""
    read: TraceLine = from_json(line, _LINE)
    if isinstance(read, TraceHeader) and read.version != VERSION:
        raise ProtocolError(f"a trace of version {read.version}; this is for version {VERSION}")
    return read
