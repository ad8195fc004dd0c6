"""Messages between front ends and the engine.

Front end → engine: EngineCoreRequest, SessionInput, Abort, AdminCall, TurnEnded, Watch (view),
AdapterCall (lora).
Engine → front end: EngineReady (lifecycle.py), EngineCoreOutputs, AdminReply, EngineView (view),
AdapterList, AdapterReply (lora).

Every message has the epoch of the engine; messages of another epoch are dropped. Each output has
the index of its first token, so that repeated tokens after a restart are recognised.

    request id (made by the front end, unique over the run of the daemon)
    63      55 54          40 39                                0
    |front end| incarnation  | counter                          |

    seq_id     32 bits, made by the engine at admission; names a sequence (one choice of a
               request) between engine and workers, and is not reused within an epoch

A resumable session is a request whose input comes in parts. Each part is a turn, which ends as a
request does. The prompt of the next turn is all tokens so far, without the last output (it was
sampled but never computed), and the new part:

    EngineCoreRequest(resumable)  [1 2 3]  →  10 11, stop, goes_on
    SessionInput                  [4 5]    →  prompt 1 2 3 10 4 5; 4 and 5 are computed
    SessionInput                  [], last →  the session ends, now or after the current turn

An agent session is the work of an agent on one task: requests that are its turns, with tool calls
in between. The API calls its id `job_id`, or `session_id`.

    turn 1 ends ── TurnEnded(agent_session, tool) ── the tool runs ── turn 2 of the session arrives
    └───────────── the engine may retain the turn's KV ───────────────┘

The front end makes the names of agent sessions and tools; agent sessions of different tenants have
different names.
"""

import enum
import math
from collections.abc import Iterator
from hashlib import blake2b
from itertools import count
from typing import Final, Literal

import msgspec

from proto.errors import ErrorInfo
from proto.messages.grammar import GrammarSource
from proto.messages.lora import AdapterCall, LoRARequest
from proto.messages.multimodal import MultiModalFeature
from proto.messages.pooling import PoolingParams
from proto.messages.sampling_params import SamplingParams, ThinkingRule
from proto.messages.stats import SchedulerStats
from proto.messages.view import Watch

MAX_FRONT_ENDS = 1 << 8
MAX_INCARNATIONS = 1 << 15


def request_ids(front_end: int, incarnation: int) -> Iterator[int]:
    """Return the request ids of one incarnation of a front end, in order.

    Raises ValueError for an index outside [0, 256) or an incarnation outside [0, 32768).
    """
    if not 0 <= front_end < MAX_FRONT_ENDS:
        raise ValueError(f"front end {front_end} is outside [0, {MAX_FRONT_ENDS})")
    if not 0 <= incarnation < MAX_INCARNATIONS:
        raise ValueError(f"incarnation {incarnation} is outside [0, {MAX_INCARNATIONS})")
    return count((front_end << 55) | (incarnation << 40))


MAX_NAME_LENGTH: Final = 256
"""Maximum characters of the name of an agent session or a tool."""


class AgentHint(msgspec.Struct, array_like=True, frozen=True):
    """The agent session that a request belongs to.

    session: its name. is_last_step: whether this is its last turn.
    ttl_ms: milliseconds for which the client wants KV retained after the turn; None: the engine
        decides.
    """

    session: str
    is_last_step: bool = False
    ttl_ms: float | None = None


NO_AGENT: Final = AgentHint("")
"""For a request that belongs to no agent session."""

_NAME_DIGEST_BYTES: Final = 16


def agent_session_name(session_id: str, tenant: int) -> str:
    """Return the name of an agent session by the id that its client gives, and its tenant.

    A letter and 32 hex digits.
    """
    key = tenant.to_bytes(8, "little")
    return "j" + blake2b(session_id.encode(), key=key, digest_size=_NAME_DIGEST_BYTES).hexdigest()


class TurnEnded(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """A turn of an agent session has ended, and its output is parsed.

    request_id: of the turn. tool: name of the tool that the agent calls now; "" for none. Ignored
    for a session that has ended or is unknown.
    """

    epoch: int
    request_id: int
    agent_session: str
    tool: str = ""


PauseMode = Literal["finish_running", "freeze"]
"""finish_running: running requests go on and no other starts. freeze: nothing is computed."""

MAX_CHOICES: Final = 128
"""Maximum choices of one request."""


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
    """One request, with all that is needed to continue it after an engine restart.

    request_id: see the top of this file.
    prompt_token_ids: [num_prompt_tokens], each below the vocabulary size.
    n: number of choices; choice i samples with the key (seed, i, position).
    output_token_ids: per choice, the tokens already generated; empty for a new request.
    finished_choices: choices that have ended.
    seed: 64 bits; random if the client gives none.
    arrival_time: seconds on the monotonic clock of the machine.
    priority: lower is first, with a scheduling policy that uses it.
    cache_salt: separates prefix caches; part of the hash of the first block.
    crash_count: processes that died while this request was computed, since its last progress.
    resumable: opens a session; the SessionInput with `last` closes it.
    tenant: 64 bits, the tenant for fair scheduling; 0 for none.
    accepted: an engine has accepted it before, so limits of the queue do not apply.
    queue_deadline, deadline: seconds on the monotonic clock of the machine, for the first step and
        for the end; infinite for none.
    grammar: for the text of each choice; None for free text.
    agent: the agent session that this is a turn of; None for none.
    thinking: markers and budget of reasoning, if a grammar applies after it or a budget ends it.
    label: id of the response. reader: 64 bits, the user who may see it in the live view.
    trace_headers: W3C trace context, `traceparent` and `tracestate`; empty for none.
    pooling_params: pool the prompt instead of generating; None for a request that generates.
    skip_reading_prefix_cache: compute the whole prompt; its KV is cached for other requests.
    prompt_embeds: little-endian float32 [num_prompt_tokens, hidden], what the first layer gets in
        place of the embedding of the prompt's tokens, which are all 0 then; empty for none.
    lora_request: the adapter; None for the model alone.
    mm_features: images of the prompt, in its order.
    kv_transfer_request: `kv_transfer_params` of the client, a JSON object for the KV connector;
        empty for none.
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
    trace_headers: dict[str, str] = {}
    pooling_params: PoolingParams | None = None
    skip_reading_prefix_cache: bool = False
    prompt_embeds: bytes = b""
    lora_request: LoRARequest | None = None
    mm_features: list[MultiModalFeature] = []
    kv_transfer_request: bytes = b""

    @property
    def trace_id(self) -> str:
        """The trace that the request belongs to, 32 hexadecimal digits; "" for none."""
        return self.trace_headers.get("traceparent", "")[3:35]


class Abort(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """End a request, or one choice of it, in any state. No further output follows.

    reason: "disconnect" if the client is gone, "stop_string" if the front end found a stop string.
    choice: None for all choices.
    """

    epoch: int
    request_id: int
    reason: Literal["disconnect", "stop_string"]
    choice: int | None = None


AdminName = Literal[
    "reset_prefix_cache",
    "reset_encoder_cache",
    "check_integrity",
    "pause",
    "resume",
    "get_num_unfinished",
    "get_pause",
    "start_profile",
    "stop_profile",
]


class AdminCall(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """An admin call; exactly one AdminReply with the same call_id follows.

    pause_mode: for "pause". The reply does not wait for running requests.
    ends_unfinished: for "pause". First end all requests with FinishReason.ABORT.
    reset_running_requests: for "reset_prefix_cache". Preempt and recompute running requests;
        without it the call fails if there are any.
    reset_external: for "reset_prefix_cache". Also drop KV stored by the KV connector.
    """

    epoch: int
    call_id: int
    name: AdminName
    pause_mode: PauseMode = "finish_running"
    reset_running_requests: bool = False
    reset_external: bool = False
    ends_unfinished: bool = False


class AdminReply(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Result of an AdminCall: `ok`, or `detail` with the reason of the failure.

    value: number of unfinished choices for "get_num_unfinished"; for "get_pause" 1 if paused, with
        the mode as `detail`, and 0 otherwise; for a profile the number of processes that failed.
    detail: for "stop_profile", paths of the files, one a line.
    """

    epoch: int
    call_id: int
    ok: bool
    detail: str = ""
    value: int = 0


class SessionInput(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """The next part of a session's input; it waits for the end of the current turn.

    prompt_token_ids: [num_new_tokens]; empty only with `last`.
    sampling_params: for the new turn; None keeps those of the last one.
    max_tokens and the indices of outputs and draws count from the start of the turn.
    last: no more input follows; the session ends with this turn, or, without tokens, with the
    one before.
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


class EventType(enum.IntEnum):
    """What happened to a choice in the scheduler; numbers as in vLLM.

    QUEUED: it, or the next turn of its session, waits. SCHEDULED: a step has its tokens, for the
    first time or again. PREEMPTED: it has lost its KV, and waits again.
    """

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An event of a choice.

    timestamp: seconds on the machine's monotonic clock.
    num_cached_tokens: of SCHEDULED, prompt tokens that were in the prefix cache the first time.
    num_external_tokens: those of them that a connector loaded.
    """

    type: EventType
    timestamp: float
    num_cached_tokens: int = 0
    num_external_tokens: int = 0


class RoutedExperts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The experts that computed consecutive tokens of one choice, best first.

    first_position: of the first token, counted from the beginning of the prompt.
    data: little-endian unsigned integers of `num_bytes` bytes, [tokens, num_layers, top_k]; only
        layers with experts count.
    """

    first_position: int
    num_layers: int
    top_k: int
    num_bytes: int
    data: bytes


class EngineCoreOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Output of one choice in one step.

    token_index: index, among the choice's output tokens (a session's: the turn's), of
        new_token_ids[0].
    stop_reason: the stop token id when a stop token other than EOS ended the choice.
    events: of the choice since its last output, in order.
    goes_on: a turn of a session ended with this finish_reason, and the session continues.
    kv_transfer_params: with a finish_reason, data of the KV connector for the client, a JSON
        object; empty for none. Bytes, so that decoding this message does not parse it.
    pooler_output: float32 little-endian, the result of a pooling request, with its finish_reason.
    num_accepted_drafts: the first of new_token_ids that were accepted tokens of a draft.
    A choice gets exactly one output with a finish_reason and without goes_on, unless
    the front end aborted it.
    """

    request_id: int
    choice: int
    token_index: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    events: tuple[EngineCoreEvent, ...] = ()
    logprobs: LogprobsArrays | None = None
    prompt_logprobs: LogprobsArrays | None = None
    error: ErrorInfo | None = None
    goes_on: bool = False
    kv_transfer_params: bytes = b""
    routed_experts: RoutedExperts | None = None
    pooler_output: bytes = b""
    num_accepted_drafts: int = 0


class RequestProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Progress of a choice that took part in crashes and has no new token since.

    Sent first with zeros, before the choice's first step is scheduled.
    num_computed_tokens: tokens of prompt and outputs in completed steps.
    num_tokens_under_way: these and those of steps in flight.
    """

    request_id: int
    num_computed_tokens: int
    num_tokens_under_way: int


class EngineCoreOutputs(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """All outputs for one front end at the end of a step.

    timestamp: monotonic seconds at which the tokens left the engine.
    accepted: ids of requests accepted since the last message; a refused request gets an output
        with an error instead.
    stats: sent to one front end per step, if possible one that gets a message anyway.
    alone: ids of requests that run alone from now on, because they may have caused crashes.
    progress: sent before the step is computed, because the step may crash the engine.
    """

    epoch: int
    step: int
    timestamp: float
    outputs: list[EngineCoreOutput] = []
    accepted: list[int] = []
    stats: SchedulerStats | None = None
    alone: list[int] = []
    progress: list[RequestProgress] = []


ToEngine = EngineCoreRequest | SessionInput | Abort | AdminCall | TurnEnded | Watch | AdapterCall
