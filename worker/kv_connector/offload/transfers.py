"""All copies of a worker: a registry of handlers by direction.

Owns which handler does what; what a copy is, only handlers know.
"""

from collections.abc import Collection, Mapping

from proto.kv_connector import TransferJob
from proto.kv_events import DEVICE_MEDIUM
from worker.kv_connector.offload.base import OffloadingHandler, TransferResult
from worker.kv_connector.offload.specs import Direction


class Transfers:
    """Hands each job to the handler of (source, destination)."""

    def __init__(self, handlers: Mapping[Direction, OffloadingHandler]) -> None:
        self._handlers = dict(handlers)

    def transfer_async(self, job: TransferJob) -> None:
        """Begin a copy; raises KeyError for a direction that nobody has registered."""
        direction = (DEVICE_MEDIUM, job.medium)
        self._handlers[direction[::-1] if job.is_load else direction].transfer_async(job)

    def get_finished(self) -> list[TransferResult]:
        """Copies of all directions that are over since the last call."""
        return [result for each in self._handlers.values() for result in each.get_finished()]

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these are over."""
        for handler in self._handlers.values():
            handler.wait(set(job_ids))

    def close(self) -> None:
        """Return when no copy touches the device's memory any more."""
        for handler in self._handlers.values():
            handler.close()


NO_TRANSFERS = Transfers({})
