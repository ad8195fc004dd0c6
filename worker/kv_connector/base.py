"""The copying half of a KV connector, as the worker's loop and the model runner see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from proto.config import ServeConfig
from proto.kv_connector import NO_PAYLOAD, Payload
from worker.kv_cache import KVCache

DEFAULTS: Final = ServeConfig()


@dataclass(frozen=True)
class WorkerContext:
    """rank, num_ranks: of this worker among those that share the model.

    fingerprint: of what all of them compute, as the deciding half knows it.
    serve_config: all settings.
    """

    rank: int
    num_ranks: int
    fingerprint: bytes
    block_size: int
    serve_config: ServeConfig = DEFAULTS


class Finished(NamedTuple):
    """Handles whose sending, and whose receiving, is over."""

    sending: list[int]
    recving: list[int]


class WorkerConnector(Protocol):
    """A step: bind, preemptions, loads; per layer wait and save; wait_for_save; get_finished.

    Made from (KVTransferConfig, WorkerContext), once an epoch.
    per_layer: it wants to be called around each layer's attention, which then cannot be part of
        a kernel that computes all layers, or of a graph.
    """

    @property
    def per_layer(self) -> bool: ...

    def register_kv_caches(self, cache: KVCache) -> None:
        """Called once an epoch, with the memory that blocks lie in."""
        ...

    def fileno(self) -> int:
        """Readable when a copy is over of which nothing was said yet; -1: never between steps."""
        ...

    def bind_connector_metadata(self, metadata: Payload) -> None:
        """What the deciding half has for this step."""
        ...

    def handle_preemptions(self) -> None:
        """Wait for copies whose blocks somebody else may write to in this step."""
        ...

    def start_load_kv(self) -> None:
        """Begin this step's loads, and the stores that the step before has put off."""
        ...

    def wait_for_layer_load(self, layer: int) -> None:
        """A layer is about to attend: what it reads has to be there."""
        ...

    def save_kv_layer(self, layer: int) -> None:
        """A layer's K and V of this step are written."""
        ...

    def wait_for_save(self) -> None:
        """The step is computed: nothing that it will overwrite is still being read."""
        ...

    def get_finished(self, finished_seq_ids: Sequence[int]) -> Finished:
        """finished_seq_ids: requests that are over. Never waits."""
        ...

    def take_invalid_blocks(self) -> list[int]:
        """Device blocks that a load has not filled, since the last call."""
        ...

    def build_connector_worker_meta(self) -> Payload:
        """For the deciding half, since the last call; NO_PAYLOAD for nothing."""
        ...

    def close(self) -> None:
        """The epoch ends: no copy touches the memory after this."""
        ...


__all__ = ["NO_PAYLOAD", "Finished", "WorkerConnector", "WorkerContext"]
