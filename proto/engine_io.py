"""Messages between the front ends and the engine.

Front end → engine: EngineCoreRequest, SessionInput, Abort, AdminCall, TurnEnded (agents),
Watch (view).
Engine → front end: EngineReady (lifecycle/), EngineCoreOutputs, AdminReply, EngineView (view).

Every message carries the epoch; one of another epoch is dropped. Each output
names the index of its first token, so a repeat after a restart is recognised.

A session is a request whose input comes in parts. Each part is a turn, which ends as
a request does; the next turn's prompt is what there is, but for the last output (it
was drawn and never computed), and the new part:

    EngineCoreRequest(resumable)  [1 2 3]  →  10 11, stop, goes_on
    SessionInput                  [4 5]    →  prompt 1 2 3 10 4 5; computed are 4 and 5
    SessionInput                  [], last →  the end, if no turn is under way
"""

import enum
import math
from collections.abc import Iterator
from itertools import count
from typing import Final, Literal

import msgspec

from proto.errors import ErrorInfo
from proto.grammar import GrammarSource
from proto.sampling_params import SamplingParams, ThinkingRule
from proto.stats import SchedulerStats
from proto.view import Watch

MAX_CLIENTS = 1 << 8
MAX_INCARNATIONS = 1 << 15


def request_ids(client_index: int, incarnation: int) -> Iterator[int]:
    """The request ids of one incarnation of one front end, in order.

    Raises ValueError for an index outside [0, 256) or an incarnation outside
    [0, 32768).
    """
    if not 0 <= client_index < MAX_CLIENTS:
        raise ValueError(f"client_index {client_index} is outside [0, {MAX_CLIENTS})")
    if not 0 <= incarnation < MAX_INCARNATIONS:
        raise ValueError(f"incarnation {incarnation} is outside [0, {MAX_INCARNATIONS})")
    return count((client_index << 55) | (incarnation << 40))


MAX_NAME_LENGTH: Final = 256
"""Characters of the name of a job or a tool."""


class AgentHint(msgspec.Struct, array_like=True, frozen=True):
    """Whose turn a request is.

    job: name of the agent's work; is_last_step: no turn follows this one.
    ttl_ms: milliseconds for which its KV is worth keeping when it ends, by the client's own
        account; None leaves it to the engine.
    """

    job: str
    is_last_step: bool = False
    ttl_ms: float | None = None


NO_AGENT: Final = AgentHint("")
"""Of a request that is nobody's turn."""


class TurnEnded(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """The answer of a turn has been read: what the job does until its next one.

    request_id: of the turn. tool: the name of the tool that it waits for now; empty where it
    called none. A job that is over, or unknown, is passed over.
    """

    epoch: int
    request_id: int
    job: str
    tool: str = ""


PauseMode = Literal["finish_running", "freeze"]
"""finish_running: no request begins, those that have begun go on. freeze: nothing is computed."""

MAX_CHOICES: Final = 128
"""Most choices of one request."""


class FinishReason(enum.IntEnum):
    """Why a choice ended; `str()` gives the API's word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, array_like=True, tag=1, frozen=True, kw_only=True):
    """One request, complete enough to be taken up where an earlier engine left it.

    request_id: made by the front end, unique over the run.
    prompt_token_ids: [num_prompt_tokens], each below the vocabulary size.
    n: number of choices; choice i draws with (seed, i, position).
    output_token_ids: per choice, the tokens already generated; empty for a new request.
    finished_choices: choices that need no more tokens.
    seed: 64 bits, always set: the front end draws one when the client gives none.
    arrival_time: seconds on the monotonic clock of the machine.
    priority: lower goes first, where the policy asks.
    cache_salt: separates prefix caches; enters the hash of the first block.
    crash_count: processes that died while this request was computed, since it got further.
    resumable: opens a session, which the `last` SessionInput closes.
    tenant: 64 bits, who shares the engine fairly with other tenants; 0 where nobody is named.
    accepted: an engine has taken it in before, so no limit of the queue refuses it now.
    queue_deadline, deadline: seconds on the monotonic clock of the machine, before which it
        must have begun and must be over; infinite for none.
    grammar: what the text of each choice has to be; None leaves it free.
    agent: the job that this is a turn of; None for none.
    thinking: how it begins with thoughts, where the engine has to know: a grammar holds after
        them, and a budget ends them.
    label: the id of its answer. reader: 64 bits, who is shown it in the live view.
    """

    epoch: int
    request_id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    arrival_time: float
    n: int = 1
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: tuple[tuple[int, ...], ...] = ()
    finished_choices: tuple[int, ...] = ()
    crash_count: int = 0
    resumable: bool = False
    tenant: int = 0
    accepted: bool = False
    queue_deadline: float = math.inf
    deadline: float = math.inf
    grammar: GrammarSource | None = None
    agent: AgentHint | None = None
    thinking: ThinkingRule | None = None
    label: str = ""
    reader: int = 0


class Abort(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """End a request, or one choice of it, whatever state it is in.

    reason: "disconnect" when nobody listens any more, "stop_string" when the front
    end found the end of a choice itself. No output follows for what is aborted.
    choice: None for all choices.
    """

    epoch: int
    request_id: int
    reason: Literal["disconnect", "stop_string"]
    choice: int | None = None


AdminName = Literal[
    "reset_prefix_cache", "check_integrity", "pause", "resume", "get_num_unfinished", "get_pause"
]


class AdminCall(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """An operator's call; exactly one AdminReply with the same call_id follows.

    pause_mode: of "pause". The reply does not wait for anyone to finish.
    ends_unfinished: of "pause". Requests, waiting ones too, end first, for FinishReason.ABORT.
    reset_running_requests: of "reset_prefix_cache". Requests that hold blocks lose them
    and are computed again; without it the call fails while there are any. reset_external: what
    the KV connector keeps elsewhere is forgotten as well.
    """

    epoch: int
    call_id: int
    name: AdminName
    pause_mode: PauseMode = "finish_running"
    reset_running_requests: bool = False
    reset_external: bool = False
    ends_unfinished: bool = False


class AdminReply(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """`ok` tells whether the call did what it is named for; `detail` says why not.

    value: the number that "get_num_unfinished" asks for, in choices; of "get_pause" 1 in a
    pause, whose mode is the `detail`, and 0 otherwise.
    """

    epoch: int
    call_id: int
    ok: bool
    detail: str = ""
    value: int = 0


class SessionInput(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """The next part of a session's input. It waits for the end of the turn under way.

    prompt_token_ids: [num_new_tokens]; empty only with `last`.
    sampling_params: of the turn that it begins; None keeps those of the turn before.
    max_tokens and the indices of outputs and draws count from the start of the turn.
    last: no more input follows; the session ends with the turn, or, where there are
    no tokens, with the turn before.
    """

    epoch: int
    request_id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams | None = None
    last: bool = False


class LogprobsArrays(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of consecutive positions, packed.

    first_position: output index (sampled tokens) or prompt position of the first row.
    width: columns; column 0 is the chosen (or actual) token, then the best ones in order.
    token_ids: int32 little-endian [rows, width].
    logprobs: float32 little-endian [rows, width], natural logarithm, raw logits.
    ranks: int32 little-endian [rows], rank of the chosen token, 1 is the best.
    """

    first_position: int
    width: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes


class FirstTokenInfo(msgspec.Struct, array_like=True, frozen=True):
    """Comes once per choice, with its first output of an engine's life.

    num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    queued_at, scheduled_at: seconds on the machine's monotonic clock.
    num_external_tokens: of those that were found, which a connector had.
    """

    num_cached_tokens: int
    queued_at: float
    scheduled_at: float
    num_external_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one choice got in one step.

    token_index: index, among the choice's output tokens (a session's: the turn's), of
        new_token_ids[0].
    stop_reason: the stop token id when a stop token other than EOS ended the choice.
    goes_on: a turn of a session is over, for the finish_reason that is given, but not
        the session.
    kv_transfer_params: with a finish_reason, what the KV connector has the client told, a JSON
        object; empty for nothing. Bytes, so that decoding this never looks into it.
    A choice gets exactly one output with a finish_reason and without goes_on, unless
    the front end aborted it.
    """

    request_id: int
    choice: int
    token_index: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    first: FirstTokenInfo | None = None
    logprobs: LogprobsArrays | None = None
    prompt_logprobs: LogprobsArrays | None = None
    error: ErrorInfo | None = None
    goes_on: bool = False
    kv_transfer_params: bytes = b""


class RequestProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How far the computation of a choice is that brought crashes along and has no token since.

    Comes first, with zeros, when the engine begins with it, before its first step is decided.
    num_computed_tokens: of prompt and outputs, in steps that are complete.
    num_tokens_under_way: the same and those of the steps that are not.
    """

    request_id: int
    num_computed_tokens: int
    num_tokens_under_way: int


class EngineCoreOutputs(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """Everything the engine tells one front end at the end of a step.

    timestamp: monotonic seconds at which the tokens left the engine.
    accepted: ids of requests that were taken in since the last message; a request
    that is refused gets an output with an error instead.
    stats: to one front end, of those that are told something if there are any.
    alone: ids of requests that are computed with nothing beside them from now on, because
    they may be what the engine or its workers died of.
    progress: comes before the step is computed, because afterwards there may be no engine.
    """

    epoch: int
    step: int
    timestamp: float
    outputs: list[EngineCoreOutput] = []
    accepted: list[int] = []
    stats: SchedulerStats | None = None
    alone: list[int] = []
    progress: list[RequestProgress] = []


ToEngine = EngineCoreRequest | SessionInput | Abort | AdminCall | TurnEnded | Watch
