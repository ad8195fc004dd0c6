"""An external connector, loaded by its module path."""

from worker.kv_connector.base import WorkerConnector


class OutsideScheduler(WorkerConnector):
    """Scheduler side; records its constructor arguments and supports one KV cache group."""

    supports_groups = False

    def __init__(self, config, context):
        self.config, self.context = config, context
        self.closed = False

    def close(self):
        self.closed = True


class OutsideWorker(WorkerConnector):
    """Worker side; records its constructor arguments."""

    def __init__(self, config, context):
        self.config, self.context = config, context
