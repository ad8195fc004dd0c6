"""The deciding half where there is no connector: nothing is known, kept or copied."""

from collections.abc import Iterable
from typing import Any, ClassVar, Final

from engine_core.kv_cache.block import BlockIds
from engine_core.kv_connector.base import NO_MATCH, Match
from engine_core.request import Request
from proto.event_fd import NO_DESCRIPTOR
from proto.kv_connector import NO_PAYLOAD, KVConnectorOutput, Payload
from proto.kv_events import KVEvent
from proto.scheduler_output import SchedulerOutput
from proto.stats import KVMediumStats


class NoConnector:
    """SchedulerConnector of a daemon without one."""

    supports_groups: ClassVar[bool] = True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        return NO_MATCH

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        return NO_PAYLOAD

    def wants_step(self) -> bool:
        return False

    def update_connector_output(self, output: KVConnectorOutput) -> None: ...

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def withdraw(self, request: Request) -> None: ...

    def take_events(self) -> Iterable[KVEvent]:
        return ()

    def take_stats(self) -> list[KVMediumStats]:
        return []

    def reset_cache(self) -> bool:
        return True

    def start_over(self) -> None: ...

    def fileno(self) -> int:
        return NO_DESCRIPTOR

    def attend(self) -> None: ...

    def close(self) -> None: ...


NO_CONNECTOR: Final = NoConnector()
