"""The copying half where there is no connector: nothing is copied."""

from collections.abc import Sequence
from typing import ClassVar, Final

from proto.kv_connector import NO_PAYLOAD, Payload
from worker.kv_cache import KVCache
from worker.kv_connector.base import Finished

NOTHING_FINISHED: Final = Finished([], [])


class NoConnector:
    """WorkerConnector of a daemon without one."""

    per_layer: ClassVar[bool] = False

    def register_kv_caches(self, cache: KVCache) -> None: ...

    def fileno(self) -> int:
        return -1

    def bind_connector_metadata(self, metadata: Payload) -> None: ...

    def handle_preemptions(self) -> None: ...

    def start_load_kv(self) -> None: ...

    def wait_for_layer_load(self, layer: int) -> None: ...

    def save_kv_layer(self, layer: int) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_seq_ids: Sequence[int]) -> Finished:
        return NOTHING_FINISHED

    def take_invalid_blocks(self) -> list[int]:
        return []

    def build_connector_worker_meta(self) -> Payload:
        return NO_PAYLOAD

    def close(self) -> None: ...


NO_CONNECTOR: Final = NoConnector()
