"""The workers' half of a KV connector, as the worker loop and the model runner call it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from proto.messages.kv_connector import NO_PAYLOAD, Payload
from proto.runtime.plugins import connector_class
from proto.runtime.sockets import NO_DESCRIPTOR
from proto.settings.config import ServeConfig
from proto.settings.kv_transfer_config import FIELD, KVTransferConfig
from worker.attention.kv_cache import KVCache
from worker.attention.state_cache import StateCache
from worker.kv_connector.offload.base import BlockDevice

DEFAULTS: Final = ServeConfig()


@dataclass(frozen=True)
class WorkerContext:
    """Facts about this worker that a connector needs.

    rank, num_ranks: position among the tensor-parallel workers. fingerprint: digest of everything
    that changes KV values, equal on all ranks and in the engine. block_size: tokens of a device
    block. device: where the KV cache is. serve_config: all settings.
    """

    rank: int
    num_ranks: int
    fingerprint: bytes
    block_size: int
    device: BlockDevice
    serve_config: ServeConfig = DEFAULTS


class FinishedTransfers(NamedTuple):
    """Sequence ids of requests whose sending or receiving has finished on this rank."""

    sending: list[int]
    recving: list[int]


NOTHING_FINISHED: Final = FinishedTransfers([], [])


class WorkerConnector:
    """Base class of the workers' halves; by default it copies nothing.

    Subclasses are constructed with (KVTransferConfig, WorkerContext), once for each epoch. Order of
    calls in a step:

        bind_connector_metadata, handle_preemptions, start_load_kv ─▶ the step ─▶ wait_for_save,
            wait_for_layer_load for one layer after the other                     get_finished
            save_kv_layer for each layer that is computed

    The calls for layers come from threads, one for loads and one for saves, while other layers are
    computed. Where steps are queued on a device, the next step may be bound before
    `wait_for_save`, unless a step has copies by layer.
    per_layer: whether the connector has copies by layer at all.
    """

    per_layer: bool = False

    def has_layer_copies(self) -> bool:
        """Whether the step that was bound loads or saves by layer; if not, no layer is called."""
        return self.per_layer

    def register_kv_caches(self, cache: KVCache) -> None:
        """Receive the KV cache. Called once for each epoch."""

    def register_states(self, states: StateCache) -> None:
        """Receive the recurrent states, of a model with states, after the KV cache."""

    def fileno(self) -> int:
        """Descriptor that is readable while a finished copy is unreported; -1: none."""
        return NO_DESCRIPTOR

    def bind_connector_metadata(self, metadata: Payload) -> None:
        """Receive the scheduler half's instructions for this step."""

    def handle_preemptions(self) -> None:
        """Block until copies whose blocks this step may overwrite have finished."""

    def start_load_kv(self) -> None:
        """Start the loads of this step and the stores deferred by the previous one."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Block until the KV that this layer reads has been loaded; it is computed afterwards."""

    def save_kv_layer(self, layer: int) -> None:
        """Store a layer, whose K and V of this step are in the cache now; later ones may not be."""

    def wait_for_save(self) -> None:
        """Block until no copy reads KV that another step overwrites. The step is computed."""

    def get_finished(self, finished_seq_ids: Sequence[int]) -> FinishedTransfers:
        """Return transfers finished since the last call, without blocking.

        finished_seq_ids: requests that have ended.
        """
        return NOTHING_FINISHED

    def get_block_ids_with_load_errors(self) -> list[int]:
        """Return device blocks that failed loads have left invalid since the last call."""
        return []

    def get_state_slots_with_load_errors(self) -> list[int]:
        """Return slots of states that failed loads have left invalid since the last call."""
        return []

    def build_connector_worker_meta(self) -> Payload:
        """Return a message for the scheduler's half, or NO_PAYLOAD."""
        return NO_PAYLOAD

    def close(self) -> None:
        """Stop all copies before the KV cache is freed; the epoch ends."""


NO_CONNECTOR: Final = WorkerConnector()


CONNECTORS: Final = {
    "OffloadingConnector": "worker.kv_connector.offload.connector:OffloadingWorker",
    "MultiConnector": "worker.kv_connector.multi:MultiWorker",
    "PeerConnector": "worker.kv_connector.peer.connector:PeerWorker",
    "SharedStorageConnector": "worker.kv_connector.shared_storage:SharedStorageWorker",
}
"""Classes by name; their modules are imported on demand."""


def create_worker_connector(config: KVTransferConfig, context: WorkerContext) -> WorkerConnector:
    """Create the workers' half; NO_CONNECTOR if none is configured. Raises ConfigError."""
    if not config.kv_connector:
        return NO_CONNECTOR
    module = config.kv_connector_module_path
    make = connector_class(config.kv_connector, module, CONNECTORS, "Worker", FIELD)
    connector: WorkerConnector = make(config, context)
    return connector
