"""Which class is the copying half of which connector. Imported when it is asked for."""

from typing import Final

from proto.kv_connector import find_class, load_class
from proto.kv_transfer_config import FIELD, KVTransferConfig
from worker.kv_connector.base import WorkerConnector, WorkerContext
from worker.kv_connector.nothing import NO_CONNECTOR

CONNECTORS: Final = {
    "OffloadingConnector": "worker.kv_connector.offload.connector:OffloadingWorker",
    "MultiConnector": "worker.kv_connector.multi:MultiWorker",
    "SharedStorageConnector": "worker.kv_connector.shared_storage:SharedStorageWorker",
}


def create_worker_connector(config: KVTransferConfig, context: WorkerContext) -> WorkerConnector:
    """The copying half of what is configured, which may be nothing; raises ConfigError."""
    name, module_path = config.kv_connector, config.kv_connector_module_path
    if not name:
        return NO_CONNECTOR
    if module_path:
        made_by = load_class(f"{module_path}:{name}Worker", FIELD)
    else:
        made_by = find_class(CONNECTORS, name, FIELD)
    connector: WorkerConnector = made_by(config, context)
    return connector
