"""What was copied, for the metrics."""

from engine_core.kv_connector.offload.jobs import Job
from proto.stats import KVMediumStats


class CopyStatistics:
    """Counts copies between the device and one medium, since they were last taken."""

    def __init__(self, medium: str) -> None:
        self._medium = medium
        self._clear()

    def _clear(self) -> None:
        self.num_skipped = self.num_unstored = self._num_failed = 0
        self._num_copies = {True: 0, False: 0}
        self._num_bytes = {True: 0, False: 0}
        self._seconds = {True: 0.0, False: 0.0}

    def count(self, job: Job) -> None:
        """All ranks have reported a copy."""
        is_load = job.transfer.is_load
        if not job.succeeded:
            self._num_failed += 1
            return
        self._num_copies[is_load] += 1
        self._num_bytes[is_load] += job.num_bytes
        self._seconds[is_load] += job.seconds

    def take(self, usage: float) -> KVMediumStats:
        """usage: of the medium, 0 to 1."""
        taken = KVMediumStats(
            medium=self._medium,
            num_loads=self._num_copies[True],
            load_bytes=self._num_bytes[True],
            load_seconds=self._seconds[True],
            num_stores=self._num_copies[False],
            store_bytes=self._num_bytes[False],
            store_seconds=self._seconds[False],
            num_skipped=self.num_skipped,
            num_unstored=self.num_unstored,
            num_failed=self._num_failed,
            usage=usage,
        )
        self._clear()
        return taken
