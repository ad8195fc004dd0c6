"""The scheduler's half of a KV connector.

A connector knows KV that is not in this engine's block pool: in host memory, on a disk, in a Redis
server. This half decides in the engine what to load and to store, without ever blocking; the other
half (`worker/kv_connector`) copies. Method names are those of vLLM's KVConnectorBase_V1. Start with
`SchedulerConnector`; `create_scheduler_connector` creates the configured one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import TransferRefs
from engine_core.request import Request
from proto.errors import ConfigError
from proto.messages.kv_connector import NO_PAYLOAD, KVConnectorOutput, Payload
from proto.messages.kv_events import KVEvent
from proto.messages.lifecycle import KVCacheGeometry
from proto.messages.scheduler_output import BlockIds, SchedulerOutput
from proto.messages.stats import KVMediumStats, KVTier
from proto.runtime.plugins import connector_class
from proto.runtime.sockets import NO_DESCRIPTOR
from proto.settings.config import ServeConfig
from proto.settings.kv_transfer_config import FIELD, KVTransferConfig


class DevicePrefix(NamedTuple):
    """What the pools have of a request after its cached prefix, in a model with recurrent states.

    num_with_kv: its first tokens with KV, states or not. state_ends: numbers of its first tokens
    after which a pool has a state; more than the cached prefix has.
    """

    num_with_kv: int
    state_ends: frozenset[int]


class Match(NamedTuple):
    """Tokens of a request that a connector can load after those in the device's prefix cache.

    num_tokens: whole blocks; None: not known yet, the connector will unblock the request.
    is_async: the request waits in WAITING_FOR_REMOTE_KVS until the load is reported; otherwise the
        worker loads before it computes the step.
    """

    num_tokens: int | None
    is_async: bool


NO_MATCH: Final = Match(0, is_async=False)
NOT_KNOWN_YET: Final = Match(None, is_async=False)
DEFAULTS: Final = ServeConfig()


def always_storable(seq_id: int) -> bool:
    """Value of `is_storable` for a connector that is used without a scheduler."""
    return True


@dataclass(frozen=True)
class SchedulerContext:
    """Parts of the engine that a connector may use.

    geometry: KV cache of one rank. block_size: tokens of a device block. fingerprint: digest of
    everything that changes KV values, equal on all ranks. num_ranks: tensor-parallel workers.
    transfer_refs: references that keep device blocks allocated during a copy.
    block_ids: returns a copy of a sequence's block tables, with null blocks outside its window.
    unblock: reschedules a request that got NOT_KNOWN_YET; engine thread only.
    serve_config: all settings.
    is_storable: whether all loads that a sequence relies on have succeeded; if not, its computed KV
    must not be stored.
    state_slots: has the slots of a model with recurrent states; None for any other.
    """

    geometry: KVCacheGeometry
    block_size: int
    num_blocks: int
    fingerprint: bytes
    num_ranks: int
    transfer_refs: TransferRefs
    block_ids: Callable[[int], BlockIds]
    unblock: Callable[[Request], None]
    serve_config: ServeConfig = DEFAULTS
    is_storable: Callable[[int], bool] = always_storable
    state_slots: KVCacheManager | None = None


class SchedulerConnector:
    """Base class of the scheduler's halves; by default it has no KV and copies nothing.

    Subclasses are constructed with (KVTransferConfig, SchedulerContext). All methods are called in
    the engine's thread and must not block. supports_groups: whether the connector works with
    several KV cache groups (hybrid models). supports_states: whether it also copies recurrent
    states; for a model with states it is refused otherwise.
    """

    supports_groups: bool = True
    supports_states: bool = False

    def on_new_request(self, request: Request) -> None:
        """A request enters the queue; `request.kv_transfer_request` is what its client has sent."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        """Return how many tokens can be loaded after the first `num_computed_tokens`.

        At least one token of the request is left to compute. May be called repeatedly.
        """
        return NO_MATCH

    def match_with_states(
        self, request: Request, num_computed_tokens: int, on_device: DevicePrefix
    ) -> Match:
        """Return the same for a model with recurrent states.

        The match ends where the pools and the connector together have KV and a state. What the
        pools hold is not loaded. A load within a step is not supported.
        """
        return NO_MATCH

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Plan the load of a request for which blocks were allocated.

        block_ids: complete block tables, one for each KV cache group.
        num_external_tokens: of the matched tokens, those to load; 0: the request starts without a
            load. They end with request.num_computed_tokens.
        """

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        """Return the workers' instructions for this step. Called once for every step."""
        return NO_PAYLOAD

    def needs_step(self) -> bool:
        """Whether the workers must receive a step even if it computes nothing.

        Called before each step; the next build_connector_meta belongs to that step. Deferred copies
        need one.
        """
        return False

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Process one rank's report.

        finished_sending, finished_recving: requests for which all ranks have finished.
        invalid_block_ids, worker_metadata: of this rank only.
        """

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request in any state.

        Returns whether its blocks must stay allocated until `finished_sending` contains it, and
        the `kv_transfer_params` for the client.
        """
        return False, None

    def invalidate_request(self, request: Request) -> None:
        """Make everything that a running or finished request has stored impossible to find.

        Called if its KV may be corrupt.
        """

    def take_events(self) -> Iterable[KVEvent]:
        """Return blocks stored on and removed from the media since the last call."""
        return ()

    def drain_stats(self) -> list[KVMediumStats]:
        """Return copies and lookups since the last call, for each medium."""
        return []

    def tiers(self) -> list[KVTier]:
        """Return how full each medium is whose size is known."""
        return []

    def reset_cache(self) -> bool:
        """Forget all stored blocks; False, with nothing changed, while copies are in flight."""
        return True

    def on_worker_restart(self) -> None:
        """Drop all copies in flight: the workers that made them are gone and will not report."""

    def fileno(self) -> int:
        """Descriptor that becomes readable when a background thread has news; -1: none."""
        return NO_DESCRIPTOR

    def process_notifications(self) -> None:
        """Handle news from background threads, and unblock requests that waited for it."""

    def close(self) -> None:
        """Release threads, sockets and descriptors; the engine stops."""


NO_CONNECTOR: Final = SchedulerConnector()


CONNECTORS: Final = {
    "OffloadingConnector": "engine_core.kv_connector.offload.connector:OffloadingScheduler",
    "MultiConnector": "engine_core.kv_connector.multi:MultiScheduler",
    "PeerConnector": "engine_core.kv_connector.peer:PeerScheduler",
    "SharedStorageConnector": "engine_core.kv_connector.shared_storage:SharedStorageScheduler",
}
"""Classes by name; their modules are imported on demand."""


def create_scheduler_connector(
    config: KVTransferConfig, context: SchedulerContext
) -> SchedulerConnector:
    """Create the scheduler's half; NO_CONNECTOR if none is configured.

    Raises ConfigError for an unknown name, and for a connector that does not support the model's
    KV cache groups.
    """
    name = config.kv_connector
    if not name:
        return NO_CONNECTOR
    module = config.kv_connector_module_path
    make = connector_class(config.kv_connector, module, CONNECTORS, "Scheduler", FIELD)
    connector: SchedulerConnector = make(config, context)
    num_groups = context.geometry.num_block_groups
    if context.state_slots is not None and not connector.supports_states:
        connector.close()
        raise ConfigError(f"{FIELD}: {name} does not copy recurrent states", FIELD)
    if num_groups > 1 and not connector.supports_groups:
        connector.close()
        raise ConfigError(
            f"{FIELD}: {name} does not support models with several KV cache groups, "
            f"and this one has {num_groups}",
            FIELD,
        )
    return connector
