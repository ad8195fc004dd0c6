"""The copying half of several connectors as one: every call goes to all of them."""

import select
from collections.abc import Sequence

from proto.kv_connector import NO_PAYLOAD, MultiReport, MultiStep, Payload, pack, unpack
from proto.kv_transfer_config import KVTransferConfig, child_configs
from worker.kv_cache import KVCache
from worker.kv_connector.base import Finished, WorkerConnector, WorkerContext
from worker.kv_connector.factory import create_worker_connector


class MultiWorker:
    """WorkerConnector over children. What they have sent goes to the deciding half by child."""

    def __init__(self, config: KVTransferConfig, context: WorkerContext) -> None:
        self.children: list[WorkerConnector] = [
            create_worker_connector(each, context) for each in child_configs(config)
        ]
        self._sending: list[list[int]] = [[] for _ in self.children]
        self._poll = select.epoll()
        self._has_descriptors = False
        for each in self.children:
            if each.fileno() >= 0:
                self._poll.register(each.fileno(), select.EPOLLIN)
                self._has_descriptors = True

    @property
    def per_layer(self) -> bool:
        return any(each.per_layer for each in self.children)

    def register_kv_caches(self, cache: KVCache) -> None:
        for each in self.children:
            each.register_kv_caches(cache)

    def fileno(self) -> int:
        return self._poll.fileno() if self._has_descriptors else -1

    def bind_connector_metadata(self, metadata: Payload) -> None:
        parts = unpack(metadata, MultiStep).parts if metadata else [NO_PAYLOAD] * len(self.children)
        for each, part in zip(self.children, parts, strict=True):
            each.bind_connector_metadata(part)

    def handle_preemptions(self) -> None:
        for each in self.children:
            each.handle_preemptions()

    def start_load_kv(self) -> None:
        for each in self.children:
            each.start_load_kv()

    def wait_for_layer_load(self, layer: int) -> None:
        for each in self.children:
            each.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        for each in self.children:
            each.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        for each in self.children:
            each.wait_for_save()

    def get_finished(self, finished_seq_ids: Sequence[int]) -> Finished:
        finished = [each.get_finished(finished_seq_ids) for each in self.children]
        for sending, each in zip(self._sending, finished, strict=True):
            sending += each.sending
        return Finished([], [seq_id for each in finished for seq_id in each.recving])

    def take_invalid_blocks(self) -> list[int]:
        return [block for each in self.children for block in each.take_invalid_blocks()]

    def build_connector_worker_meta(self) -> Payload:
        parts = [each.build_connector_worker_meta() for each in self.children]
        sending, self._sending = self._sending, [[] for _ in self.children]
        return pack(MultiReport(parts, sending)) if any(parts) or any(sending) else NO_PAYLOAD

    def close(self) -> None:
        self._poll.close()
        for each in self.children:
            each.close()
