"""Creates the workers' half of the configured KV connector; modules are imported on demand."""

from typing import Final

from proto.kv_connector import find_class, load_class
from proto.kv_transfer_config import FIELD, KVTransferConfig
from worker.kv_connector.base import NO_CONNECTOR, WorkerConnector, WorkerContext

CONNECTORS: Final = {
    "OffloadingConnector": "worker.kv_connector.offload.connector:OffloadingWorker",
    "MultiConnector": "worker.kv_connector.multi:MultiWorker",
    "SharedStorageConnector": "worker.kv_connector.shared_storage:SharedStorageWorker",
}


def create_worker_connector(config: KVTransferConfig, context: WorkerContext) -> WorkerConnector:
    """Create the workers' half; NO_CONNECTOR if none is configured. Raises ConfigError."""
    name, module_path = config.kv_connector, config.kv_connector_module_path
    if not name:
        return NO_CONNECTOR
    if module_path:
        connector_class = load_class(f"{module_path}:{name}Worker", FIELD)
    else:
        connector_class = find_class(CONNECTORS, name, FIELD)
    connector: WorkerConnector = connector_class(config, context)
    return connector
