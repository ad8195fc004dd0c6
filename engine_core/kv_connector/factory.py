"""Which class is the deciding half of which connector. Imported when it is asked for."""

from typing import Final

from engine_core.kv_connector.base import SchedulerConnector, SchedulerContext
from engine_core.kv_connector.nothing import NO_CONNECTOR
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
    """The deciding half of what is configured, which may be nothing.

    Raises ConfigError for a name that nobody has registered, and for a connector that cannot
    do with the KV cache groups of this model.
    """
    name, module_path = config.kv_connector, config.kv_connector_module_path
    if not name:
        return NO_CONNECTOR
    if module_path:
        made_by = load_class(f"{module_path}:{name}Scheduler", FIELD)
    else:
        made_by = find_class(CONNECTORS, name, FIELD)
    connector: SchedulerConnector = made_by(config, context)
    num_groups = len(context.geometry.groups)
    if num_groups > 1 and not connector.supports_groups:
        connector.close()
        raise ConfigError(
            f"{FIELD}: {name} does not support models with several KV cache groups, "
            f"and this one has {num_groups}",
            FIELD,
        )
    return connector
