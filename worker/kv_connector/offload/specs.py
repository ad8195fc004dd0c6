"""Which handlers a spec name stands for in a worker; see the engine's specs of the same names."""

from collections.abc import Mapping
from typing import Any, Final

from proto.component import find_class, load_class
from proto.kv_transfer_config import CPU_SPEC, DISK_SPEC, FIELD, REMOTE_SPEC, OffloadSettings
from worker.kv_connector.offload.base import HandlerContext, OffloadingHandler

_HERE: Final = "worker.kv_connector.offload"
HANDLERS: Final = {
    CPU_SPEC: f"{_HERE}.cpu_spec:make_handlers",
    DISK_SPEC: f"{_HERE}.disk_medium:make_handlers",
    REMOTE_SPEC: f"{_HERE}.remote_medium:make_handlers",
}
Direction = tuple[str, str]
"""(source, destination): names of media."""


def create_handlers(
    settings: OffloadSettings, extra: Mapping[str, Any], context: HandlerContext
) -> Mapping[Direction, OffloadingHandler]:
    """Both directions of the medium that the settings name; raises ConfigError."""
    if settings.spec_module_path:
        make = load_class(f"{settings.spec_module_path}:{settings.spec_name}_handlers", FIELD)
    else:
        make = find_class(HANDLERS, settings.spec_name, FIELD)
    handlers: Mapping[Direction, OffloadingHandler] = make(extra, context)
    return handlers
