"""A worker as its process starts it, without the process."""

from collections.abc import Callable

from proto.messages.lifecycle import ProcessBoot
from proto.runtime.sockets import Link
from worker.worker import PreparedWorker, Worker


def started_worker(
    boot: ProcessBoot, connect_engine: Callable[[int], Link], supervisor: Link
) -> Worker:
    """Load the model of `boot`, connect to its engine, and return what serves it."""
    return Worker(PreparedWorker(boot, supervisor), boot, connect_engine, supervisor)
