"""The workers' half of a KV connector, as the worker loop and the model runner call it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from proto.config import ServeConfig
from proto.kv_connector import NO_PAYLOAD, Payload, find_class, load_class
from proto.kv_transfer_config import FIELD, KVTransferConfig
from proto.sockets import NO_DESCRIPTOR
from worker.kv_cache import KVCache

DEFAULTS: Final = ServeConfig()


@dataclass(frozen=True)
class WorkerContext:
    """Facts about this worker that a connector needs.

    rank, num_ranks: position among the tensor-parallel workers. fingerprint: digest of everything
    that changes KV values, equal on all ranks and in the engine. block_size: tokens of a device
    block. serve_config: all settings.
    """

    rank: int
    num_ranks: int
    fingerprint: bytes
    block_size: int
    serve_config: ServeConfig = DEFAULTS


class FinishedTransfers(NamedTuple):
    """Sequence ids of requests whose sending or receiving has finished on this rank."""

    sending: list[int]
    recving: list[int]


NOTHING_FINISHED: Final = FinishedTransfers([], [])


class WorkerConnector:
    """Base class of the workers' halves; by default it copies nothing.

    Order of calls in a step: bind_connector_metadata, handle_preemptions, start_load_kv; for each
    layer wait_for_layer_load and save_kv_layer; wait_for_save; get_finished. Subclasses are
    constructed with (KVTransferConfig, WorkerContext), once for each epoch.
    per_layer: whether the calls for each layer are needed; then neither the fused kernel for all
        layers nor CUDA graphs can be used.
    """

    per_layer: bool = False

    def register_kv_caches(self, cache: KVCache) -> None:
        """Receive the KV cache. Called once for each epoch."""

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
        """Block until the KV that this layer reads has been loaded."""

    def save_kv_layer(self, layer: int) -> None:
        """Store a layer, whose K and V of this step are in the cache now."""

    def wait_for_save(self) -> None:
        """Block until no copy reads KV that the next step overwrites. The step is computed."""

    def get_finished(self, finished_seq_ids: Sequence[int]) -> FinishedTransfers:
        """Return transfers finished since the last call, without blocking.

        finished_seq_ids: requests that have ended.
        """
        return NOTHING_FINISHED

    def get_block_ids_with_load_errors(self) -> list[int]:
        """Return device blocks that failed loads have left invalid since the last call."""
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
    "SharedStorageConnector": "worker.kv_connector.shared_storage:SharedStorageWorker",
}
"""Classes by name; their modules are imported on demand."""


def create_worker_connector(config: KVTransferConfig, context: WorkerContext) -> WorkerConnector:
    """Create the workers' half; NO_CONNECTOR if none is configured. Raises ConfigError."""
    name, module_path = config.kv_connector, config.kv_connector_module_path
    if not name:
        return NO_CONNECTOR
    if module_path:
        connector_class = load_class(f"{module_path}:{name}Worker", FIELD)
    else:
        connector_class = find_class(CONNECTORS, name, FIELD)
    connector: WorkerConnector = connector_class(config, context)
    return connector
