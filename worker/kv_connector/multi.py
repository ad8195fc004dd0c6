"""The workers' half of several connectors as one: every call goes to all children."""

import select
from collections.abc import Sequence

from proto.messages.kv_connector import NO_PAYLOAD, MultiReport, MultiStep, Payload, pack, unpack
from proto.runtime.sockets import NO_DESCRIPTOR
from proto.settings.kv_transfer_config import KVTransferConfig, child_configs
from worker.attention.kv_cache import KVCache
from worker.attention.state_cache import StateCache
from worker.kv_connector.base import (
    FinishedTransfers,
    WorkerConnector,
    WorkerContext,
    create_worker_connector,
)


class MultiWorker(WorkerConnector):
    """WorkerConnector that combines child connectors and reports finished sends by child."""

    def __init__(self, config: KVTransferConfig, context: WorkerContext) -> None:
        self.children: list[WorkerConnector] = [
            create_worker_connector(child, context) for child in child_configs(config)
        ]
        self._sending: list[list[int]] = [[] for _ in self.children]
        self.per_layer = any(child.per_layer for child in self.children)
        self._poll = select.epoll()
        self._has_descriptors = False
        for child in self.children:
            if child.fileno() != NO_DESCRIPTOR:
                self._poll.register(child.fileno(), select.EPOLLIN)
                self._has_descriptors = True

    def register_kv_caches(self, cache: KVCache) -> None:
        for child in self.children:
            child.register_kv_caches(cache)

    def register_states(self, states: StateCache) -> None:
        for child in self.children:
            child.register_states(states)

    def fileno(self) -> int:
        return self._poll.fileno() if self._has_descriptors else NO_DESCRIPTOR

    def bind_connector_metadata(self, metadata: Payload) -> None:
        parts = unpack(metadata, MultiStep).parts if metadata else [NO_PAYLOAD] * len(self.children)
        for child, part in zip(self.children, parts, strict=True):
            child.bind_connector_metadata(part)

    def handle_preemptions(self) -> None:
        for child in self.children:
            child.handle_preemptions()

    def start_load_kv(self) -> None:
        for child in self.children:
            child.start_load_kv()

    def has_layer_copies(self) -> bool:
        return any(child.has_layer_copies() for child in self.children)

    def wait_for_layer_load(self, layer: int) -> None:
        for child in self.children:
            if child.has_layer_copies():
                child.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        for child in self.children:
            if child.has_layer_copies():
                child.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        for child in self.children:
            child.wait_for_save()

    def get_finished(self, finished_seq_ids: Sequence[int]) -> FinishedTransfers:
        finished = [child.get_finished(finished_seq_ids) for child in self.children]
        for sending, child_finished in zip(self._sending, finished, strict=True):
            sending += child_finished.sending
        return FinishedTransfers(
            [], [seq_id for child_finished in finished for seq_id in child_finished.recving]
        )

    def get_block_ids_with_load_errors(self) -> list[int]:
        return [
            block for child in self.children for block in child.get_block_ids_with_load_errors()
        ]

    def get_state_slots_with_load_errors(self) -> list[int]:
        return [
            slot for child in self.children for slot in child.get_state_slots_with_load_errors()
        ]

    def build_connector_worker_meta(self) -> Payload:
        parts = [child.build_connector_worker_meta() for child in self.children]
        sending, self._sending = self._sending, [[] for _ in self.children]
        return pack(MultiReport(parts, sending)) if any(parts) or any(sending) else NO_PAYLOAD

    def close(self) -> None:
        self._poll.close()
        for child in self.children:
            child.close()
