"""Messages between supervisor and processes: start, replacement, health, reload, drain, shutdown.

Start:

supervisor ──ProcessBoot (inherited descriptor)──▶ every process ──Prepared──▶ supervisor
supervisor ──TakePlace──▶ every process: at once, or when it replaces another (standby processes)
worker ──WorkerReady──▶ engine ──InitializeCache──▶ worker ──CacheReady──▶ engine
engine ──EngineReady──▶ front ends and supervisor
front end ──FrontEndReady──▶ supervisor
any process ──Progress, Fatal──▶ supervisor ──Shutdown──▶ any process
engine, front end ──ProtocolViolation──▶ supervisor, which kills the process at fault

A process died; the others go on and connect to its successor:

engine died       supervisor ──NewEngine──▶ workers, front ends
worker died       supervisor ──NewWorkers──▶ engine ──WorkersReady──▶ supervisor
front end died    supervisor ──NewFrontEnd──▶ engine
front end stuck   engine ──FrontEndStalled──▶ supervisor, which kills it

Hang detection:

supervisor ──Ping──▶ engine, front ends ──EngineAlive, Alive──▶ supervisor
supervisor ──HealthStatus──▶ front ends
worker of several ──WaitingForRanks──▶ supervisor, which checks the other ranks first

Reload, with a new engine beside the old one or in its place:

supervisor ──NextEngine──▶ front ends ──NextReady──▶ supervisor ──SwitchEngine──▶ front ends
front ends ──Switched, OldEngineIdle──▶ supervisor ──Shutdown──▶ old engine and its workers

Of several engines, one after the other; if the model changes, the first switch is that of all.

Drain before shutdown:

supervisor ──Drain──▶ front ends ──DrainProgress──▶ supervisor ──Shutdown──▶ any process

Numbers that tell successive processes apart:

epoch         Which incarnation of which engine. New when an engine starts. Names the sockets
              between engine and front ends, and is in every message between them.
worker_epoch  Which workers with which engine. New when an engine or a worker starts. Names the
              sockets between engine and workers, and is in every message between them.
generation    Which reload of which engine: the epoch of the first engine that a start or a reload
              has brought in this place. Engines and workers that replace dead ones have the same
              generation.
incarnation   Restarts of one process (role, index), from 0. Names its socket to the supervisor;
              part of the request ids of a front end.

Epochs of both kinds come from one counter of the supervisor (`EpochCounter`), so none occurs twice.

--data-parallel-size N starts N engines, each with T workers of its own (--tensor-parallel-size):

index         Which process of a role: engines 0 … N - 1, workers 0 … N·T - 1.
rank          Which worker of an engine: 0 … T - 1. Worker `index` is of engine index // T.
"""

import time
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from proto.errors import ErrorInfo
from proto.messages.engine_io import PauseMode
from proto.messages.lora import AdapterCard, AdapterList
from proto.messages.prepared_model import PreparedModel
from proto.runtime.faults import Fault
from proto.settings.config import CPU_STEP_TOKENS, ServeConfig, memory_size
from proto.settings.kv_events_config import KVEventsConfig
from proto.settings.speculative_config import DRAFT_POSITIONS, HEAD_METHODS

Role = Literal["api_server", "engine_core", "worker"]

_TITLES: Final[dict[Role, str]] = {"api_server": "api", "engine_core": "engine", "worker": "worker"}


def process_title(role: Role) -> str:
    """Return the name that users see for a role: "api", "engine", "worker"."""
    return _TITLES[role]


def process_name(role: Role, index: int) -> str:
    """Return the name of a process in its title, log lines and exit report, such as "worker 0"."""
    return f"{_TITLES[role]} {index}"


# ---- Start: from the boot message to readiness ----


class ProcessBoot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a process needs to start.

    A process reads one from an inherited descriptor, and prepares itself by it: it imports its
    modules, a worker loads the weights. It runs by another, which TakePlace brings. The first one
    of a standby process has no epochs, and an index among the standby processes of its role.

    role, index: which process this is ("worker", 0).
    epoch, worker_epoch, generation, incarnation: see the tables at the top of this file; of a
        front end, the epochs of engine 0.
    engine_epochs: for a front end, the epoch of each engine, by index.
    num_hung: restarts of this process after a hang.
    born_at: start of the process, seconds of the monotonic clock.
    run_dir: the daemon's private directory, for sockets.
    death_fd: read end of a pipe that closes when the supervisor ends.
    listen_fds, admin_fds: listening sockets of a front end for all clients, and for operators.
    metrics_fd: memory shared by all front ends, METRIC_BYTES each; None without metrics.
    weights_fd: of a worker, the file in memory for packed weights; None where none are packed.
    weights_generation: the first generation that had these weights, in the start or the reload.
    front_ends: for an engine, the incarnation of each front end, by index.
    pause_mode: for an engine, the pause to start with; None for no pause.
    adapters: for an engine, those of an earlier one; None if it is the first of its model.
    faults: faults to inject, of all processes.
    draft_model: that of --speculative-config; None without one.
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
    admin_fds: tuple[int, ...] = ()
    front_ends: tuple[int, ...] = (0,)
    pause_mode: PauseMode | None = None
    faults: tuple[Fault, ...] = ()
    generation: int = 1
    weights_generation: int = 1
    metrics_fd: int | None = None
    num_hung: int = 0
    born_at: float = 0.0
    draft_model: PreparedModel | None = None
    adapters: tuple[AdapterCard, ...] | None = None
    engine_epochs: tuple[int, ...] = (1,)
    weights_fd: int | None = None

    @property
    def has_place(self) -> bool:
        """Whether it is of a process that serves or will serve at once; not of a standby one."""
        return self.epoch > 0

    @property
    def name(self) -> str:
        """The name in titles and log lines, such as "worker 0" or "standby worker 0"."""
        name = process_name(self.role, self.index)
        return name if self.has_place else f"standby {name}"

    @property
    def engine(self) -> int:
        """Index of the engine that a worker serves, or of this engine; 0 for a front end."""
        if self.role == "worker":
            return self.index // self.config.parallel.tensor_parallel_size
        return self.index if self.role == "engine_core" else 0

    @property
    def rank(self) -> int:
        """Number of a worker among those of its engine; 0 for another process."""
        if self.role == "worker":
            return self.index % self.config.parallel.tensor_parallel_size
        return 0

    @property
    def replaces_dead(self) -> bool:
        """Whether a worker replaces a dead one, or serves an engine that does."""
        return self.worker_epoch != self.generation

    @property
    def starts_alone(self) -> bool:
        """Whether a worker starts after all engines have started with the daemon."""
        return not self.has_place or (self.worker_epoch > self.config.parallel.data_parallel_size)


class Prepared(msgspec.Struct, array_like=True, tag=63, frozen=True):
    """A process has done what needs no place, and waits for one."""


class TakePlace(msgspec.Struct, array_like=True, tag=64, frozen=True):
    """Run as the process that `boot` names."""

    boot: ProcessBoot


class PlanBoot(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of `tokend plan` needs, read from its standard input."""

    config: ServeConfig
    model: PreparedModel
    as_json: bool = False
    draft_model: PreparedModel | None = None


class StartPhase(msgspec.Struct, array_like=True, frozen=True):
    """One phase of a process's start, and its duration."""

    what: str
    seconds: float


class ProcessStart(msgspec.Struct, array_like=True, frozen=True):
    """Phases of the start of one process, in order."""

    role: Role
    index: int
    phases: tuple[StartPhase, ...]


NOT_CACHED: Final = "not_cached"
"""The kind of a KV group whose layers read K and V only in the step that computes them."""

RECURRENT_STATE: Final = "recurrent_state"
"""The kind of a KV group whose layers keep a state of a fixed size for each sequence."""

LEAST_STATE_SLOTS: Final = 4
"""Fewest usable slots for states: those of a sequence that runs, and of prompts that come again."""


def slots_per_sequence(caches_prefixes: bool) -> int:
    """Return how many slots for states a running sequence may always have.

    Where prefixes are cached these are the state at the last end of a block, which later requests
    may find, and the current one.
    """
    return 2 if caches_prefixes else 1


class KVGroup(msgspec.Struct, array_like=True, frozen=True):
    """Layers that share a block table.

    sliding_window: tokens that a token attends to, itself included; None for all. Blocks before
        the window are freed.
    kind: name of a class in `engine_core/kv_cache/groups.py:GROUP_KINDS`; empty for attention,
        NOT_CACHED for the attention of encoders, RECURRENT_STATE for layers without attention.
    """

    sliding_window: int | None = None
    kind: str = ""


class KVCacheGeometry(msgspec.Struct, array_like=True, frozen=True):
    """Shape of a worker's KV cache; the engine computes the size of the pool from it.

    The cache is one buffer [block, slot, K/V, kv_head, token, dim]; latent KV has no V.

    num_slots: layers per group; they share a block.
    num_kv_heads: per device.
    head_dim: elements.
    dtype: "bfloat16", "float32", …
    bytes_per_token: all slots, K and V, and the scales of int8; 0 if nothing is kept between steps.
    groups: KV cache groups, all in one pool of blocks of the same size, except for that of states.
    num_parts: 2 for K and V, 1 for latents, which are both.
    state_bytes: of one slot with the states of a sequence; 0 without such layers.
    """

    num_slots: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    bytes_per_token: int
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    num_parts: int = 2
    state_bytes: int = 0

    @property
    def block_groups(self) -> tuple[KVGroup, ...]:
        """Groups whose blocks are those of the KV pool; they precede that of states."""
        return tuple(group for group in self.groups if group.kind != RECURRENT_STATE)

    @property
    def num_block_groups(self) -> int:
        return len(self.block_groups)

    @property
    def is_cached(self) -> bool:
        """Whether sequences have blocks; an encoder's do not, and are computed in one step each."""
        return self.bytes_per_token > 0


class WeightFormatMemory(msgspec.Struct, array_like=True, frozen=True):
    """Memory of the weights in one format: packed, int8, bf16, f32 or f16.

    is_shared: whether workers of other engines read the same memory.
    """

    form: str
    num_bytes: int
    is_shared: bool = False


_WEIGHT_FORMATS: Final = {"packed": "packed as stored"}
"""Weight formats in words; the others are named by their data type."""


def describe_weights(formats: Iterable[WeightFormatMemory]) -> str:
    """Return memory and format of weights for the operator, such as "257 MiB bf16"."""
    parts = (
        f"{memory_size(part.num_bytes)} {_WEIGHT_FORMATS.get(part.form, part.form)}"
        for part in formats
    )
    return " + ".join(parts) or "none"


class ComputeShape(msgspec.Struct, array_like=True, frozen=True):
    """Floating-point operations of one worker's part of the model; a product of n by m weights
    with a token's vector is 2·n·m.

    linear_flops: per token, of the projections in all layers.
    head_flops: per position that is sampled.
    attention_flops: for layers of each window (None: full attention), per pair of query and key.
    """

    linear_flops: int = 0
    head_flops: int = 0
    attention_flops: tuple[tuple[int | None, int], ...] = ()


class WorkerReady(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """A worker has loaded the weights and knows the memory that is left.

    kv_cache_bytes: memory available for the KV pool.
    fingerprint: 32-byte hash of everything that affects KV values; root of the block hashes.
    weights: memory by weight format, that of a draft model included.
    phases: phases of the start so far.
    computes_ahead: whether it can take the next step before the tokens of the last are known.
    step_tokens: token budget of a step that its memory was planned for.
    model_fingerprint: hash of what affects KV values and is the same on all ranks.
    compute: for estimates of FLOPs.
    num_state_slots: slots for states that its memory was planned for, the null slot included.
    is_batch_invariant: whether a token has the same bits in a step of any number of rows.
    draft_method: that of its draft model (proto/settings/speculative_config.py); "" for none.
        max_draft_len: tokens of a sequence beyond which that proposes nothing.
    routing_bytes: of a token's routed experts; 0 if no request may return them.
    draft_bytes_per_token: of its KV, beside that of the geometry. draft_weight_bytes: those of
        `weights` that are its. draft_fingerprint: hash of what its drafts depend on and is the same
        on all ranks; empty for none.
    kernels: what computes, in words for the operator.
    kv_cache_grows: whether the KV pool takes memory only as it is used.
    """

    protocol_version: int
    epoch: int
    rank: int
    geometry: KVCacheGeometry
    kv_cache_bytes: int
    vocab_size: int
    fingerprint: bytes
    device_name: str
    weights: tuple[WeightFormatMemory, ...] = ()
    phases: tuple[StartPhase, ...] = ()
    computes_ahead: bool = False
    step_tokens: int = CPU_STEP_TOKENS
    model_fingerprint: bytes = b""
    compute: ComputeShape = ComputeShape()
    num_state_slots: int = 0
    is_batch_invariant: bool = False
    draft_method: str = ""
    max_draft_len: int = 0
    draft_bytes_per_token: int = 0
    draft_weight_bytes: int = 0
    draft_fingerprint: bytes = b""
    routing_bytes: int = 0
    kernels: str = ""
    kv_cache_grows: bool = False

    @property
    def num_draft_positions(self) -> int:
        """Positions that a step may sample beyond one for each sequence, for drafts."""
        return 0 if self.computes_ahead else DRAFT_POSITIONS

    @property
    def num_dropped_blocks(self) -> int:
        """Cached blocks at the end of a prefix hit that are computed again, for a draft head."""
        return 1 if self.draft_method in HEAD_METHODS else 0


class InitializeCache(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """Allocate the KV cache and the input batch. num_blocks includes the null block 0.

    num_state_slots: slots for states, with the null slot 0; 0 for a model without states.
    fingerprint: that of rank 0; all ranks use it in names of KV stored outside the pool.
    """

    protocol_version: int
    epoch: int
    num_blocks: int
    block_size: int
    max_model_len: int
    fingerprint: bytes = b""
    num_state_slots: int = 0


class CacheReady(msgspec.Struct, array_like=True, tag=12, frozen=True):
    """The KV cache of a worker is allocated."""

    epoch: int
    rank: int


class EngineReady(msgspec.Struct, array_like=True, tag=13, frozen=True):
    """The engine accepts requests.

    max_model_len: minimum of the model's length, the setting and the capacity of the KV pool.
    num_blocks: usable KV blocks, without the null block.
    max_num_queued_reqs, max_num_queued_tokens: limits of the queue; 0 for no limit.
    kv_cache_bytes: memory of the pool, sum over all workers. kv_cache_tokens: that it holds.
    weights: memory by weight format, sum over all workers.
    routing_bytes: of a token's routed experts; 0 if no request may return them.
    starts: start phases of the workers and of the engine itself.
    kernels, kv_cache_grows: of a worker. drafts: methods by which tokens are drafted, and how many.
    kv_events: where the engine publishes KV events; None if it does not.
    engine: index of the engine.
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
    kv_cache_tokens: int = 0
    weights: tuple[WeightFormatMemory, ...] = ()
    starts: tuple[ProcessStart, ...] = ()
    routing_bytes: int = 0
    kernels: str = ""
    kv_cache_grows: bool = False
    drafts: str = ""
    kv_events: KVEventsConfig | None = None
    engine: int = 0


class FrontEndReady(msgspec.Struct, array_like=True, tag=14, frozen=True):
    """A front end accepts HTTP requests. phases: phases of its start."""

    index: int
    phases: tuple[StartPhase, ...] = ()


class PhaseClock:
    """Measures the phases of a start. begun: start of the process, seconds of the monotonic clock.

    The first phase includes the start of the Python interpreter.
    """

    def __init__(self, begun: float) -> None:
        self._begun = self._last = begun
        self._phases: list[StartPhase] = []

    def end(self, what: str) -> None:
        """End a phase: everything since the end of the last one."""
        now = time.monotonic()
        self._phases.append(StartPhase(what, now - self._last))
        self._last = now

    def skip(self) -> None:
        """Leave the time since the end of the last phase out."""
        self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the process."""
        return time.monotonic() - self._begun

    @property
    def phases(self) -> tuple[StartPhase, ...]:
        return tuple(self._phases)


# ---- Operator messages, replacement of processes, drain and shutdown ----


class Progress(msgspec.Struct, array_like=True, tag=15, frozen=True):
    """Progress of a long operation, for the terminal. `fraction` is 0 to 1, or None if unknown."""

    what: str
    fraction: float | None = None


class Notice(msgspec.Struct, array_like=True, tag=16, frozen=True):
    """One line for the operator. is_warning: something is wrong."""

    message: str
    is_warning: bool = False


class Fatal(msgspec.Struct, array_like=True, tag=17, frozen=True):
    """The error that ends a process."""

    role: Role
    index: int
    error: ErrorInfo


class Shutdown(msgspec.Struct, array_like=True, tag=18, frozen=True):
    """Request an orderly exit. Sent by the supervisor."""


class NewEngine(msgspec.Struct, array_like=True, tag=19, frozen=True):
    """A new engine starts in place of the old one: connect to the sockets of these epochs.

    Its workers drop requests and KV and keep their weights. Front ends send open requests again.
    died: True after a crash; False if the old engine shuts down for a reload in place.
    engine: its index.
    """

    epoch: int
    worker_epoch: int
    died: bool = True
    engine: int = 0


class NewWorkers(msgspec.Struct, array_like=True, tag=20, frozen=True):
    """All workers of an engine are replaced, because one of them died."""

    worker_epoch: int


class NewFrontEnd(msgspec.Struct, array_like=True, tag=21, frozen=True):
    """A front end died, its requests are lost, and a new one starts."""

    index: int
    incarnation: int


class Restarted(msgspec.Struct, array_like=True, tag=22, frozen=True):
    """A process was restarted, for metrics; of a worker also for requests, which change the engine.

    hung: whether it was killed because it hung. engine: its index, or that of the workers' engine;
    None for a front end.
    """

    role: Role
    hung: bool = False
    engine: int | None = None


class WorkersReady(msgspec.Struct, array_like=True, tag=24, frozen=True):
    """The workers of this epoch are ready for steps."""

    worker_epoch: int


class Paused(msgspec.Struct, array_like=True, tag=25, frozen=True):
    """The engine is paused, or resumed if `mode` is None. A later engine starts in the same state.

    Front ends ask all engines. The supervisor forwards it to the other engine during a reload.
    """

    mode: PauseMode | None


class Drain(msgspec.Struct, array_like=True, tag=40, frozen=True):
    """Refuse new requests, and report the open ones (DrainProgress)."""


class DrainProgress(msgspec.Struct, array_like=True, tag=41, frozen=True):
    """Open HTTP requests of a draining front end; sent at once, at each change, and at 0."""

    index: int
    num_requests: int


class AbortRequests(msgspec.Struct, array_like=True, tag=49, frozen=True):
    """Abort HTTP requests by response id, at all front ends.

    Sent by the front end of the admin call to the supervisor, which forwards it to all.
    owner: abort only requests that came with the key of this name; None for any.
    """

    request_ids: list[str]
    owner: str | None = None


class ProfileFrontEnds(msgspec.Struct, array_like=True, tag=50, frozen=True):
    """Begin or end a profile at all front ends; sent like AbortRequests."""

    wanted: bool


class ForgetImages(msgspec.Struct, array_like=True, tag=62, frozen=True):
    """Drop pixels of images that no request uses, at all front ends; sent like AbortRequests."""


class DrainRequested(msgspec.Struct, array_like=True, tag=42, frozen=True):
    """An admin call to a front end requests that the daemon drains and exits."""

    index: int


# ---- Health: pings, heartbeats, hang detection ----


class Heartbeat(msgspec.Struct, array_like=True, tag=23, frozen=True):
    """The engine has completed steps with the workers of this epoch, `step` last."""

    worker_epoch: int
    step: int


class Ping(msgspec.Struct, array_like=True, tag=35, frozen=True):
    """Liveness probe, answered by the main loop. Only one is outstanding at a time."""


class Alive(msgspec.Struct, array_like=True, tag=36, frozen=True):
    """Answer to a Ping: the main loop of this process runs."""


class EngineAlive(msgspec.Struct, array_like=True, tag=37, frozen=True):
    """An engine's answer to a Ping.

    num_steps: steps completed by all workers of this epoch.
    awaits: ranks of workers that have not answered yet: a step, a message of the start, or a KV
        transfer that all requests wait for.
    ready: whether the workers of this epoch are ready for steps.
    has_work: whether there is something to schedule.
    num_reports: reports about KV transfers received while no worker owed a step.
    catches_up: whether requests that a crash has interrupted are not yet where they were.
    """

    worker_epoch: int
    num_steps: int = 0
    awaits: tuple[int, ...] = ()
    ready: bool = False
    has_work: bool = False
    num_reports: int = 0
    catches_up: bool = False


class WaitingForRanks(msgspec.Struct, array_like=True, tag=61, frozen=True):
    """A worker has waited long, in the middle of a step, for the other ranks.

    It counts as hung only if all ranks wait.
    """

    rank: int


class NotReady(msgspec.Struct, array_like=True, frozen=True):
    """A reason why an engine is not ready. since: seconds of the monotonic clock.

    engine: its index; None if the reason is one of the whole daemon. is_restarted: it, or its
    workers, have ended, and successors are planned or start; other engines can take its requests.
    rests: they are started only after minutes, and then with the pause and adapters of the others.
    """

    what: str
    since: float
    engine: int | None = None
    is_restarted: bool = False
    rests: bool = False


class HealthStatus(msgspec.Struct, array_like=True, tag=38, frozen=True):
    """All reasons why the daemon or one of its engines is not ready now, for /health/ready.

    Replaces the last message. The daemon is ready as long as one engine is.
    standby_engines, standby_workers: standby processes that are ready to replace another.
    """

    reasons: tuple[NotReady, ...] = ()
    standby_engines: int = 0
    standby_workers: int = 0


class FrontEndStalled(msgspec.Struct, array_like=True, tag=34, frozen=True):
    """A front end does not read its outputs, and the engine has disconnected it."""

    index: int
    incarnation: int


class ProtocolViolation(msgspec.Struct, array_like=True, tag=60, frozen=True):
    """A process has sent an invalid message and is ignored from now on; the supervisor kills it.

    index: of the process, as in its name. epoch: for a worker its worker epoch, for an engine its
    epoch; in a later epoch the message is out of date. reason: for the operator.
    """

    role: Literal["worker", "engine_core"]
    index: int
    epoch: int
    reason: str


# ---- Reload ----


class NextEngine(msgspec.Struct, array_like=True, tag=43, frozen=True):
    """A reload has started: load the new version of the model and connect to the new engine.

    model: None for a further engine of the model that the last message had.
    in_place: the only engine starts after the old one has ended, and takes over its requests.
    engine: index of the new engine.
    """

    epoch: int
    model: PreparedModel | None
    in_place: bool
    engine: int = 0


class NextReady(msgspec.Struct, array_like=True, tag=44, frozen=True):
    """A front end and the new engine are connected and ready; or the error that prevents it."""

    index: int
    epoch: int
    error: ErrorInfo | None = None


class SwitchEngine(msgspec.Struct, array_like=True, tag=45, frozen=True):
    """Send new requests to this engine; open ones stay with the old engine if that still runs.

    engine: its index.
    epochs: if several engines get another model, the epochs of all of them by index: from now on
        no old engine gets new requests. Those of other indices start when the old ones have ended.
    """

    epoch: int
    engine: int = 0
    epochs: tuple[int, ...] = ()


class Switched(msgspec.Struct, array_like=True, tag=48, frozen=True):
    """A front end sends new requests to this engine from now on."""

    index: int
    epoch: int


class OldEngineIdle(msgspec.Struct, array_like=True, tag=46, frozen=True):
    """A front end has no open request at the old engine."""

    index: int
    epoch: int


class DropEngine(msgspec.Struct, array_like=True, tag=47, frozen=True):
    """An engine other than the current ones is gone: a new one that failed, or an old one.

    Its open requests are sent to an engine of the same model.
    """

    epoch: int


class DaemonState(msgspec.Struct, frozen=True):
    """State of a daemon, as a file in its run directory, for commands such as `tokend ps`.

    pid: of the supervisor. url: address of the front ends. model: its first name in the API.
    source: the model as it was given on the command line, or to the last `tokend reload MODEL`.
    paths: of the files or folders of the model and of its draft model, absolute.
    count: completed reloads. under_way: a reload runs or is requested.
    error: what the last reload has changed, and its error; or "". ending: the daemon drains or
        stops; it does not reload.
    needs_key: clients need an API key. num_engines: that serve the model.
    """

    pid: int
    url: str = ""
    model: str = ""
    source: str = ""
    paths: tuple[str, ...] = ()
    count: int = 0
    under_way: bool = False
    error: str = ""
    ending: bool = False
    needs_key: bool = False
    num_engines: int = 1


ToSupervisor = (
    Prepared
    | EngineReady
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
    | DrainProgress
    | DrainRequested
    | WaitingForRanks
    | AbortRequests
    | ProfileFrontEnds
    | ForgetImages
    | NextReady
    | Switched
    | OldEngineIdle
    | AdapterList
)


FromSupervisor = (
    TakePlace
    | Shutdown
    | NewEngine
    | NewWorkers
    | NewFrontEnd
    | Paused
    | Restarted
    | Ping
    | HealthStatus
    | AbortRequests
    | ProfileFrontEnds
    | ForgetImages
    | Drain
    | NextEngine
    | SwitchEngine
    | DropEngine
    | AdapterList
)
