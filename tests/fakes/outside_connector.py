"""A connector from outside tokend, loaded by its module path."""

from worker.kv_connector.base import WorkerConnector


class OutsideScheduler(WorkerConnector):
    """Remembers its constructor arguments; supports one KV cache group."""

    supports_groups = False

    def __init__(self, config, context):
        self.config, self.context = config, context
        self.closed = False

    def close(self):
        self.closed = True


class OutsideWorker(WorkerConnector):
    """The same."""

    def __init__(self, config, context):
        self.config, self.context = config, context
