"""A connector that does not come with tokend, as its module path would name it."""

from worker.kv_connector.base import WorkerConnector


class OutsideScheduler(WorkerConnector):
    """Remembers what it was made from; copes with one group."""

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
