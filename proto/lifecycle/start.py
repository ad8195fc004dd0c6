"""Birth: what a process is given, and what the others hear until the daemon is ready."""

import msgspec

from proto.config import CPU_STEP_TOKENS, ServeConfig
from proto.engine_io import PauseMode
from proto.faults import Fault
from proto.lifecycle.roles import Role
from proto.prepared_model import PreparedModel


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
