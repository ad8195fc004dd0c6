"""Creates the scheduler's half of the configured KV connector; modules are imported on demand."""

from typing import Final

from engine_core.kv_connector.base import NO_CONNECTOR, SchedulerConnector, SchedulerContext
from proto.errors import ConfigError
from proto.kv_connector import find_class, load_class
from proto.kv_transfer_config import FIELD, KVTransferConfig

CONNECTORS: Final = {
    "OffloadingConnector": "engine_core.kv_connector.offload.connector:OffloadingScheduler",
    "MultiConnector": "engine_core.kv_connector.multi:MultiScheduler",
    "SharedStorageConnector": "engine_core.kv_connector.shared_storage:SharedStorageScheduler",
}


def create_scheduler_connector(
    config: KVTransferConfig, context: SchedulerContext
) -> SchedulerConnector:
    """Create the scheduler's half; NO_CONNECTOR if none is configured.

    Raises ConfigError for an unknown name, and for a connector that does not support the model's
    KV cache groups.
    """
    name, module_path = config.kv_connector, config.kv_connector_module_path
    if not name:
        return NO_CONNECTOR
    if module_path:
        connector_class = load_class(f"{module_path}:{name}Scheduler", FIELD)
    else:
        connector_class = find_class(CONNECTORS, name, FIELD)
    connector: SchedulerConnector = connector_class(config, context)
    num_groups = len(context.geometry.groups)
    if num_groups > 1 and not connector.supports_groups:
        connector.close()
        raise ConfigError(
            f"{FIELD}: {name} does not support models with several KV cache groups, "
            f"and this one has {num_groups}",
            FIELD,
        )
    return connector
