"""How processes start, find each other and end.

supervisor ──ProcessBoot (inherited descriptor)──▶ every process
worker ──WorkerReady──▶ engine ──InitializeCache──▶ worker ──CacheReady──▶ engine
engine ──EngineReady──▶ front ends and supervisor
front end ──FrontEndReady──▶ supervisor
any process ──Progress, Fatal──▶ supervisor ──Shutdown──▶ any process
engine, front end ──ProtocolViolation──▶ supervisor, which ends whom it names

When one of them dies the others go on, and hear from the supervisor whom to meet now:

engine died      supervisor ──NewEngine──▶ workers, front ends
worker died      supervisor ──NewWorkers──▶ engine ──WorkersReady──▶ supervisor
front end died   supervisor ──NewFrontEnd──▶ engine
front end stuck  engine ──FrontEndStalled──▶ supervisor, which kills it

Whether they still move is asked, because who hangs tells nothing:

supervisor ──Ping──▶ engine, front ends ──EngineAlive, Alive──▶ supervisor ──Condition──▶ front ends
worker that shares a model ──AwaitsRanks──▶ supervisor, which looks at the others first

A reload brings another engine and other workers, beside those of now or in their place:

supervisor ──NextEngine──▶ front ends ──NextReady──▶ supervisor ──SwitchEngine──▶ front ends
front ends ──Switched, EngineLeft──▶ supervisor ──Shutdown──▶ the old engine, its workers

Before the end the daemon drains:

supervisor ──Drain──▶ front ends ──UnderWay──▶ supervisor ──Shutdown──▶ any process

Links of the data path are numbered by epochs, all from one counter of the supervisor:
those between engine and workers by the worker epoch, those between engine and front
ends by the engine's own. A new engine has a new number for both.
"""

import time
from typing import Final, Literal

import msgspec

from proto.config import CPU_STEP_TOKENS, ServeConfig
from proto.engine_io import PauseMode
from proto.errors import ErrorInfo
from proto.faults import Fault
from proto.prepared_model import PreparedModel

Role = Literal["api_server", "engine_core", "worker"]

_TITLES: Final[dict[Role, str]] = {
    "api_server": "api",
    "engine_core": "engine",
    "worker": "worker",
}


def process_title(role: Role) -> str:
    """What users call the processes of a role: "api", "engine", "worker"."""
    return _TITLES[role]


def process_name(role: Role, index: int) -> str:
    """What users see of a process: its title, its log lines, its obituary."""
    return f"{_TITLES[role]} {index}"


# ---- Start: from the boot message to readiness ----


class ProcessBoot(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is given at birth, over an inherited descriptor.

    role, index: which process this is ("worker", 0).
    incarnation: counts restarts of this very process, from 0.
    num_hung: of them, those after a life that did not move any more.
    born_at: seconds of the monotonic clock.
    epoch: of the engine; names its links to the front ends.
    worker_epoch: names the links between the engine and its workers.
    run_dir: the daemon's private directory, for sockets.
    death_fd: read end of a pipe that closes when the supervisor is gone.
    listen_fds: listening sockets of a front end.
    metrics_fd: memory that all front ends share, METRIC_BYTES for each; None for none.
    front_ends: for an engine, the incarnation of each front end, by index.
    pause_mode: for an engine, the pause that it goes on with; None for none.
    faults: that tests have asked for, in any process.
    generation: engine and workers that a start or a reload has brought, and those that
        took their places, have the same; it is the first epoch of theirs.
    """

    protocol_version: int
    role: Role
    index: int
    incarnation: int
    epoch: int
    worker_epoch: int
    run_dir: str
    death_fd: int
    config: ServeConfig
    model: PreparedModel
    listen_fds: tuple[int, ...] = ()
    front_ends: tuple[int, ...] = (0,)
    pause_mode: PauseMode | None = None
    faults: tuple[Fault, ...] = ()
    generation: int = 1
    metrics_fd: int | None = None
    num_hung: int = 0
    born_at: float = 0.0


class Phase(msgspec.Struct, array_like=True, frozen=True):
    """What a process did on its way to being ready, and how long it took."""

    what: str
    seconds: float


class ProcessStart(msgspec.Struct, array_like=True, frozen=True):
    """The way of one process, from its birth: one phase after the other."""

    role: Role
    index: int
    phases: tuple[Phase, ...]


class KVGroup(msgspec.Struct, array_like=True, frozen=True):
    """Layers with a block table of their own.

    sliding_window: a token sees itself and this many less one before it; None for
        all. Blocks that every later token is past are given back.
    """

    sliding_window: int | None = None


class KVCacheGeometry(msgspec.Struct, array_like=True, frozen=True):
    """Shape of a worker's KV cache, from which the engine sizes the pool.

    The cache is one buffer [block, slot, K/V, kv_head, token, dim].

    num_slots: layers that share a block (layers per group).
    num_kv_heads: per device.
    head_dim: elements.
    dtype: "bfloat16", "float32", …
    bytes_per_token: all slots, K and V, and the scales of int8.
    groups: KV cache groups; a block of any group has the same size and one pool holds all.
    """

    num_slots: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    bytes_per_token: int
    groups: tuple[KVGroup, ...] = (KVGroup(),)


class WeightMemory(msgspec.Struct, array_like=True, frozen=True):
    """What the weights of products take in one form: packed, int8, bf16, f32 or f16."""

    form: str
    num_bytes: int


class WorkerReady(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """The weights are loaded; this is what fits beside them.

    kv_cache_bytes: memory that the worker grants to the KV pool.
    fingerprint: 32 bytes over everything that changes KV values; root of the block hashes.
    weights: memory of each form that there is.
    phases: until here, since the birth of the process.
    computes_ahead: it gains from a step that is there before the tokens of the last are known.
    step_tokens: the token budget of a step that its memory is shared out for.
    """

    protocol_version: int
    epoch: int
    rank: int
    geometry: KVCacheGeometry
    kv_cache_bytes: int
    vocab_size: int
    fingerprint: bytes
    device_name: str
    weights: tuple[WeightMemory, ...] = ()
    phases: tuple[Phase, ...] = ()
    computes_ahead: bool = False
    step_tokens: int = CPU_STEP_TOKENS


class InitializeCache(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """Create the KV tensors and the rows. num_blocks counts the null block 0.

    fingerprint: rank 0's, by which all ranks name elsewhere what they compute together.
    """

    protocol_version: int
    epoch: int
    num_blocks: int
    block_size: int
    max_model_len: int
    fingerprint: bytes = b""


class CacheReady(msgspec.Struct, array_like=True, tag=12, frozen=True):
    epoch: int
    rank: int


class EngineReady(msgspec.Struct, array_like=True, tag=13, frozen=True):
    """The engine takes requests.

    max_model_len: usable length: the model's, the setting's or the pool's, the least.
    num_blocks: usable KV blocks, without the null block.
    max_num_queued_reqs, max_num_queued_tokens: limits of the queue; 0 for none.
    kv_cache_bytes: memory of the pool, of all workers together.
    weights: memory of each form of the weights, of all workers together.
    starts: of the workers and of the engine itself.
    """

    protocol_version: int
    epoch: int
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    device_name: str
    max_num_queued_reqs: int = 0
    max_num_queued_tokens: int = 0
    kv_cache_bytes: int = 0
    weights: tuple[WeightMemory, ...] = ()
    starts: tuple[ProcessStart, ...] = ()


class FrontEndReady(msgspec.Struct, array_like=True, tag=14, frozen=True):
    """A front end answers. phases: until here, since its birth."""

    index: int
    phases: tuple[Phase, ...] = ()


class PhaseClock:
    """begun: seconds of the monotonic clock."""

    def __init__(self, begun: float) -> None:
        self._begun = self._last = begun
        self._phases: list[Phase] = []

    def end(self, what: str) -> None:
        """What was done since the last mark."""
        now = time.monotonic()
        self._phases.append(Phase(what, now - self._last))
        self._last = now

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All that have ended, in order."""
        return tuple(self._phases)


# ---- Operator messages, replacement of processes, drain and shutdown ----


class Progress(msgspec.Struct, array_like=True, tag=15, frozen=True):
    """A line for the terminal while something long runs. `fraction` is 0 to 1 or None."""

    role: Role
    index: int
    what: str
    fraction: float | None = None


class Notice(msgspec.Struct, array_like=True, tag=16, frozen=True):
    """One line that the operator should read."""

    role: Role
    index: int
    message: str


class Fatal(msgspec.Struct, array_like=True, tag=17, frozen=True):
    """Last words of a process that cannot go on."""

    role: Role
    index: int
    error: ErrorInfo


class Shutdown(msgspec.Struct, array_like=True, tag=18, frozen=True):
    """End now, in order. Sent by the supervisor."""


class NewEngine(msgspec.Struct, array_like=True, tag=19, frozen=True):
    """The engine died and another one starts: meet it at the paths of these epochs.

    A worker forgets rows and KV and keeps its weights. A front end sends what is open again.
    died: it did; or it ends in order and makes room, for a reload in place.
    """

    epoch: int
    worker_epoch: int
    died: bool = True


class NewWorkers(msgspec.Struct, array_like=True, tag=20, frozen=True):
    """A worker died, and with it all that were computed together: others start."""

    worker_epoch: int


class NewFrontEnd(msgspec.Struct, array_like=True, tag=21, frozen=True):
    """A front end died, its requests with it, and another one starts."""

    index: int
    incarnation: int


class Restarted(msgspec.Struct, array_like=True, tag=22, frozen=True):
    """For the statistics of the front ends: a process was started again.

    hung: it was ended by force, because it did not move any more.
    """

    role: Role
    hung: bool = False


class WorkersReady(msgspec.Struct, array_like=True, tag=24, frozen=True):
    """The workers of this epoch take steps."""

    worker_epoch: int


class Paused(msgspec.Struct, array_like=True, tag=25, frozen=True):
    """The engine is paused; None: no longer. For the engine that may follow.

    From the supervisor, to all engines that there are in a reload: be so, too.
    """

    mode: PauseMode | None


class Drain(msgspec.Struct, array_like=True, tag=40, frozen=True):
    """Let no more requests in, and tell of those that are under way (UnderWay)."""


class UnderWay(msgspec.Struct, array_like=True, tag=41, frozen=True):
    """HTTP requests that a draining front end still answers; comes at once, and with 0."""

    index: int
    num_requests: int


class AbortRequests(msgspec.Struct, array_like=True, tag=49, frozen=True):
    """End the HTTP requests whose answers have one of these ids, whichever front end has them.

    From the front end that an operator has asked to the supervisor, and from there to all.
    owner: name of the key that they must have come with; None for any.
    """

    request_ids: list[str]
    owner: str | None = None


class DrainWanted(msgspec.Struct, array_like=True, tag=42, frozen=True):
    """An operator has asked a front end that the daemon drains and ends."""

    index: int


# ---- Health: pings, heartbeats, hang detection ----


class Heartbeat(msgspec.Struct, array_like=True, tag=23, frozen=True):
    """The engine has completed steps with the workers of this epoch. `step`: the last one."""

    worker_epoch: int
    step: int


class Ping(msgspec.Struct, array_like=True, tag=35, frozen=True):
    """Answer as soon as your loop comes to it. One is under way at a time."""


class Alive(msgspec.Struct, array_like=True, tag=36, frozen=True):
    """Answer to a Ping: the loop of this process turns."""


class EngineAlive(msgspec.Struct, array_like=True, tag=37, frozen=True):
    """An engine's answer to a Ping.

    num_steps: steps that all workers of this epoch have answered.
    awaits: ranks of workers that owe an answer, to a step, to what their start needs, or, where
        nobody can go on without it, about a copy of the KV connector.
    ready: the workers of this epoch take steps.
    has_work: there is something to schedule.
    num_reports: what workers of this epoch have said of such copies.
    """

    worker_epoch: int
    num_steps: int = 0
    awaits: tuple[int, ...] = ()
    ready: bool = False
    has_work: bool = False
    num_reports: int = 0


class AwaitsRanks(msgspec.Struct, array_like=True, tag=61, frozen=True):
    """A worker is in the middle of a step and has waited long for those that share its model.

    It hangs only if they all do.
    """

    rank: int


class NotReady(msgspec.Struct, array_like=True, frozen=True):
    """A reason not to send requests here. since: seconds of the monotonic clock."""

    what: str
    since: float


class Condition(msgspec.Struct, array_like=True, tag=38, frozen=True):
    """For the health of the front ends: all that is amiss now; replaces what was said before."""

    reasons: tuple[NotReady, ...] = ()


class FrontEndStalled(msgspec.Struct, array_like=True, tag=34, frozen=True):
    """This life of a front end does not read what the engine sends; the engine has given it up."""

    index: int
    incarnation: int


class ProtocolViolation(msgspec.Struct, array_like=True, tag=60, frozen=True):
    """Somebody said what it cannot mean, and nobody listens to it any more: end it.

    role: "worker" or "engine_core". epoch: the worker epoch of a worker, the engine's own of
    an engine; in another epoch the sender hears somebody else. reason: for the operator.
    """

    role: Literal["worker", "engine_core"]
    index: int
    epoch: int
    reason: str


# ---- Reload ----


class NextEngine(msgspec.Struct, array_like=True, tag=43, frozen=True):
    """A reload: get ready for another engine, and for another version of the model.

    in_place: it comes when the one of now is gone, and takes its requests over.
    """

    epoch: int
    model: PreparedModel
    in_place: bool


class NextReady(msgspec.Struct, array_like=True, tag=44, frozen=True):
    """A front end is ready for that engine, and that engine for it; or not, and why."""

    index: int
    epoch: int
    error: ErrorInfo | None = None


class SwitchEngine(msgspec.Struct, array_like=True, tag=45, frozen=True):
    """Ask that engine from now on; what is open stays with the one before, if that goes on."""

    epoch: int


class Switched(msgspec.Struct, array_like=True, tag=48, frozen=True):
    """A front end asks that engine: whoever comes from now on is answered by it."""

    index: int
    epoch: int


class EngineLeft(msgspec.Struct, array_like=True, tag=46, frozen=True):
    """A front end has nothing open any more at the engine of before."""

    index: int
    epoch: int


class DropEngine(msgspec.Struct, array_like=True, tag=47, frozen=True):
    """An engine beside that of now is gone: one that was to come, or one that was to be left.

    What is open there goes to the engine of now.
    """

    epoch: int


class ReloadState(msgspec.Struct, frozen=True):
    """A file in the run directory, for `tokend reload`. pid: of the supervisor.

    count: reloads that are over. under_way: one is, or is wanted. problem: of the last one.
    """

    pid: int
    count: int = 0
    under_way: bool = False
    problem: str = ""


ToSupervisor = (
    EngineReady
    | FrontEndReady
    | Progress
    | Notice
    | Fatal
    | Heartbeat
    | WorkersReady
    | Paused
    | Alive
    | EngineAlive
    | FrontEndStalled
    | ProtocolViolation
    | UnderWay
    | DrainWanted
    | AwaitsRanks
    | AbortRequests
    | NextReady
    | Switched
    | EngineLeft
)


FromSupervisor = (
    Shutdown
    | NewEngine
    | NewWorkers
    | NewFrontEnd
    | Paused
    | Restarted
    | Ping
    | Condition
    | AbortRequests
    | Drain
    | NextEngine
    | SwitchEngine
    | DropEngine
)
