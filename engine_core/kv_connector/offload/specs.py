"""Which medium a spec name stands for: its manager here, its handlers in the workers.

Modules are imported when a spec is asked for. A spec that does not come with tokend is a module
(spec_module_path) with these two functions; both halves of tokend find them by the same name.

    make_manager(extra, ManagerContext) → OffloadingManager             in the engine
    make_handlers(extra, HandlerContext) → {(source, destination): OffloadingHandler}   in workers

there called SPECNAME_manager and SPECNAME_handlers.
"""

from collections.abc import Mapping
from typing import Any, Final

from engine_core.kv_connector.offload.base import ManagerContext, OffloadingManager
from engine_core.kv_connector.offload.reuse_filter import (
    FilterReusedOffloadingManager,
    ReuseTracker,
)
from proto.component import find_class, load_class
from proto.kv_transfer_config import CPU_SPEC, DISK_SPEC, FIELD, REMOTE_SPEC, OffloadSettings

_HERE: Final = "engine_core.kv_connector.offload"
MANAGERS: Final = {
    CPU_SPEC: f"{_HERE}.cpu_spec:make_manager",
    DISK_SPEC: f"{_HERE}.disk_manager:make_manager",
    REMOTE_SPEC: f"{_HERE}.remote_manager:make_manager",
}


def create_manager(
    settings: OffloadSettings, extra: Mapping[str, Any], context: ManagerContext
) -> OffloadingManager:
    """The ledger of the medium that the settings name; raises ConfigError."""
    if settings.spec_module_path:
        make = load_class(f"{settings.spec_module_path}:{settings.spec_name}_manager", FIELD)
    else:
        make = find_class(MANAGERS, settings.spec_name, FIELD)
    manager: OffloadingManager = make(extra, context)
    if settings.store_threshold < 2:
        return manager
    tracker = ReuseTracker(settings.store_threshold, settings.max_tracker_size)
    return FilterReusedOffloadingManager(manager, tracker)
