"""A connector that does not come with tokend, as its module path would name it."""

from engine_core.kv_connector.nothing import NoConnector
from worker.kv_connector.nothing import NoConnector as NoWorkerConnector


class OutsideScheduler(NoConnector):
    """Remembers what it was made from; copes with one group."""

    supports_groups = False

    def __init__(self, config, context):
        self.config, self.context = config, context
        self.closed = False

    def close(self):
        self.closed = True


class OutsideWorker(NoWorkerConnector):
    """The same."""

    def __init__(self, config, context):
        self.config, self.context = config, context
