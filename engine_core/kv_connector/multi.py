"""Several connectors as one: loads from the first that has anything, saves to all.

Owns which child loads for whom, and the references on blocks that children want to keep when
their requests are over: each child's end on its own, when all ranks have said so.
"""

import select
from collections.abc import Iterable
from itertools import chain
from typing import Any

from engine_core.kv_cache.block import BlockIds
from engine_core.kv_connector.base import (
    ASK_AGAIN,
    NO_MATCH,
    Match,
    SchedulerConnector,
    SchedulerContext,
)
from engine_core.kv_connector.factory import create_scheduler_connector
from engine_core.request import Request
from proto.kv_connector import (
    NO_PAYLOAD,
    KVConnectorOutput,
    MultiReport,
    MultiStep,
    Payload,
    pack,
    unpack,
)
from proto.kv_events import KVEvent
from proto.kv_transfer_config import KVTransferConfig, child_configs
from proto.scheduler_output import SchedulerOutput
from proto.stats import KVMediumStats


class MultiScheduler:
    """SchedulerConnector over children, in the order in which they are asked."""

    def __init__(self, config: KVTransferConfig, context: SchedulerContext) -> None:
        """Raises ConfigError for children that cannot be."""
        self._holds = context.holds
        self._num_ranks = context.num_ranks
        self.children: list[SchedulerConnector] = [
            create_scheduler_connector(each, context) for each in child_configs(config)
        ]
        self._poll = select.epoll()
        self._by_descriptor = {each.fileno(): each for each in self.children if each.fileno() >= 0}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)
        self._chosen: dict[int, int] = {}
        self._kept: dict[tuple[int, int], list[int]] = {}
        self._ranks_left: dict[tuple[int, int], int] = {}

    @property
    def supports_groups(self) -> bool:
        return all(each.supports_groups for each in self.children)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        """All are asked, every time; one that does not know yet makes the request wait."""
        matches = [
            each.get_num_new_matched_tokens(request, num_computed_tokens) for each in self.children
        ]
        if any(each.num_tokens is None for each in matches):
            return ASK_AGAIN
        for index, match in enumerate(matches):
            if match.num_tokens:
                self._chosen[request.seq_id] = index
                return match
        return NO_MATCH

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """The child that loads gets the blocks, the others none."""
        chosen = self._chosen.pop(request.seq_id, -1) if num_external_tokens else -1
        for index, child in enumerate(self.children):
            if index == chosen:
                child.update_state_after_alloc(request, block_ids, num_external_tokens)
            else:
                child.update_state_after_alloc(request, [[] for _ in block_ids], 0)

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        parts = [each.build_connector_meta(output) for each in self.children]
        return pack(MultiStep(parts)) if any(parts) else NO_PAYLOAD

    def wants_step(self) -> bool:
        return any(each.wants_step() for each in self.children)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        nothing = [NO_PAYLOAD] * len(self.children)
        report = MultiReport(nothing, [[] for _ in nothing])
        if output.worker_metadata:
            report = unpack(output.worker_metadata, MultiReport)
        for index, child in enumerate(self.children):
            sent = [each for each in report.sending[index] if self._is_sent(index, each)]
            child.update_connector_output(
                KVConnectorOutput(
                    sent, output.finished_recving, output.invalid_block_ids, report.parts[index]
                )
            )
            for seq_id in sent:
                self._holds.release(self._kept.pop((index, seq_id), []))

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Children that delay the end have references of their own; the request has an end."""
        self._chosen.pop(request.seq_id, None)
        told: dict[str, Any] = {}
        for index, child in enumerate(self.children):
            delays, params = child.request_finished(request, block_ids)
            told.update(params or {})
            if delays:
                blocks = list(chain.from_iterable(block_ids))
                self._holds.hold(blocks)
                self._kept[index, request.seq_id] = blocks
        return False, told or None

    def withdraw(self, request: Request) -> None:
        for each in self.children:
            each.withdraw(request)

    def take_events(self) -> Iterable[KVEvent]:
        return chain.from_iterable(each.take_events() for each in self.children)

    def take_stats(self) -> list[KVMediumStats]:
        return [stats for each in self.children for stats in each.take_stats()]

    def reset_cache(self) -> bool:
        done = [each.reset_cache() for each in self.children]  # all of them, whoever cannot
        return all(done)

    def start_over(self) -> None:
        """References are given up by the scheduler, with all others."""
        self._chosen.clear()
        self._kept.clear()
        self._ranks_left.clear()
        for each in self.children:
            each.start_over()

    def fileno(self) -> int:
        return self._poll.fileno() if self._by_descriptor else -1

    def attend(self) -> None:
        for descriptor, _ in self._poll.poll(0):
            self._by_descriptor[descriptor].attend()

    def close(self) -> None:
        self._poll.close()
        for each in self.children:
            each.close()

    def _is_sent(self, index: int, seq_id: int) -> bool:
        """Whether this was the last rank to say so."""
        key = (index, seq_id)
        self._ranks_left[key] = self._ranks_left.get(key, self._num_ranks) - 1
        if self._ranks_left[key]:
            return False
        del self._ranks_left[key]
        return True
