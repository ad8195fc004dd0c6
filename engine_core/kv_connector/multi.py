"""Several connectors as one: loads from the first child that has a match, saves to all.

It remembers which child loads for which request, and references blocks that a child still sends
after their request has finished, until all ranks have reported that child's end.
"""

import select
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from engine_core.kv_connector.base import (
    NO_MATCH,
    NOT_KNOWN_YET,
    DevicePrefix,
    Match,
    SchedulerConnector,
    SchedulerContext,
    create_scheduler_connector,
)
from engine_core.request import Request
from proto.messages.kv_connector import (
    NO_PAYLOAD,
    KVConnectorOutput,
    MultiReport,
    MultiStep,
    Payload,
    pack,
    unpack,
)
from proto.messages.kv_events import KVEvent
from proto.messages.scheduler_output import BlockIds, SchedulerOutput
from proto.messages.stats import KVMediumStats, KVTier
from proto.runtime.sockets import NO_DESCRIPTOR
from proto.settings.kv_transfer_config import KVTransferConfig, child_configs


class MultiScheduler(SchedulerConnector):
    """SchedulerConnector that combines child connectors, in the order of their priority."""

    def __init__(self, config: KVTransferConfig, context: SchedulerContext) -> None:
        """Raises ConfigError if a child's configuration is wrong."""
        self._transfer_refs = context.transfer_refs
        self._num_block_groups = context.geometry.num_block_groups
        self._num_ranks = context.num_ranks
        self.children: list[SchedulerConnector] = [
            create_scheduler_connector(child, context) for child in child_configs(config)
        ]
        self.supports_groups = all(child.supports_groups for child in self.children)
        self.supports_states = all(child.supports_states for child in self.children)
        self._poll = select.epoll()
        self._by_descriptor = {
            child.fileno(): child for child in self.children if child.fileno() != NO_DESCRIPTOR
        }
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)
        self._chosen: dict[int, int] = {}
        self._sending_blocks: dict[tuple[int, int], list[int]] = {}
        self._ranks_left: dict[tuple[int, int], int] = {}

    def on_new_request(self, request: Request) -> None:
        for child in self.children:
            child.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        """Return the first child's match; the request waits if any child does not know yet."""
        return self._choose(
            request,
            [
                child.get_num_new_matched_tokens(request, num_computed_tokens)
                for child in self.children
            ],
        )

    def match_with_states(
        self, request: Request, num_computed_tokens: int, on_device: DevicePrefix
    ) -> Match:
        return self._choose(
            request,
            [
                child.match_with_states(request, num_computed_tokens, on_device)
                for child in self.children
            ],
        )

    def _choose(self, request: Request, matches: Sequence[Match]) -> Match:
        if any(match.num_tokens is None for match in matches):
            return NOT_KNOWN_YET
        for index, match in enumerate(matches):
            if match.num_tokens:
                self._chosen[request.seq_id] = index
                return match
        return NO_MATCH

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Pass the allocated blocks to the child that loads, and no blocks to the others."""
        chosen = self._chosen.pop(request.seq_id, -1) if num_external_tokens else -1
        for index, child in enumerate(self.children):
            if index == chosen:
                child.update_state_after_alloc(request, block_ids, num_external_tokens)
            else:
                child.update_state_after_alloc(request, [[] for _ in block_ids], 0)

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        parts = [child.build_connector_meta(output) for child in self.children]
        return pack(MultiStep(parts)) if any(parts) else NO_PAYLOAD

    def needs_step(self) -> bool:
        return any(child.needs_step() for child in self.children)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        nothing = [NO_PAYLOAD] * len(self.children)
        report = MultiReport(nothing, [[] for _ in nothing])
        if output.worker_metadata:
            report = unpack(output.worker_metadata, MultiReport)
        for index, child in enumerate(self.children):
            sent = [
                seq_id for seq_id in report.sending[index] if self._all_ranks_sent(index, seq_id)
            ]
            child.update_connector_output(
                KVConnectorOutput(
                    sent,
                    output.finished_recving,
                    output.invalid_block_ids,
                    report.parts[index],
                    output.invalid_state_slots,
                )
            )
            for seq_id in sent:
                self._transfer_refs.release(self._sending_blocks.pop((index, seq_id), []))

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Finish the request in all children, without delaying the release of its own blocks.

        For a child that still sends blocks, they get references of their own.
        """
        self._chosen.pop(request.seq_id, None)
        client_params: dict[str, Any] = {}
        for index, child in enumerate(self.children):
            delays, params = child.request_finished(request, block_ids)
            client_params.update(params or {})
            if delays:
                blocks = list(chain.from_iterable(block_ids[: self._num_block_groups]))
                self._transfer_refs.hold(blocks)
                self._sending_blocks[index, request.seq_id] = blocks
        return False, client_params or None

    def invalidate_request(self, request: Request) -> None:
        for child in self.children:
            child.invalidate_request(request)

    def take_events(self) -> Iterable[KVEvent]:
        return chain.from_iterable(child.take_events() for child in self.children)

    def drain_stats(self) -> list[KVMediumStats]:
        return [stats for child in self.children for stats in child.drain_stats()]

    def tiers(self) -> list[KVTier]:
        return [tier for child in self.children for tier in child.tiers()]

    def reset_cache(self) -> bool:
        done = [child.reset_cache() for child in self.children]  # call every child
        return all(done)

    def on_worker_restart(self) -> None:
        """Drop all copies; the scheduler releases the block references itself."""
        self._chosen.clear()
        self._sending_blocks.clear()
        self._ranks_left.clear()
        for child in self.children:
            child.on_worker_restart()

    def fileno(self) -> int:
        return self._poll.fileno() if self._by_descriptor else NO_DESCRIPTOR

    def process_notifications(self) -> None:
        for descriptor, _ in self._poll.poll(0):
            self._by_descriptor[descriptor].process_notifications()

    def close(self) -> None:
        self._poll.close()
        for child in self.children:
            child.close()

    def _all_ranks_sent(self, index: int, seq_id: int) -> bool:
        """Count a rank's report; return whether all ranks have reported."""
        key = (index, seq_id)
        self._ranks_left[key] = self._ranks_left.get(key, self._num_ranks) - 1
        if self._ranks_left[key]:
            return False
        del self._ranks_left[key]
        return True
