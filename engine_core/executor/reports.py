"""What the workers of one epoch have finished for the KV connector, rank by rank.

A request's copy is over when every rank has said so. Blocks that hold what they should not are
told at once, whoever says it: the others' parts of them are of no use without that one.

Owns the count of ranks that have yet to report each handle.
"""

from collections.abc import Sequence

from proto.kv_transfer import KVConnectorOutput


class ReportJoiner:
    """Joins the reports of `num_ranks` workers."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sending: dict[int, int] = {}
        self._recving: dict[int, int] = {}

    def join(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """One rank's report, of which only those handles are left that all ranks have finished."""
        if self._num_ranks == 1:
            return output
        return KVConnectorOutput(
            self._count(self._sending, output.finished_sending),
            self._count(self._recving, output.finished_recving),
            output.invalid_block_ids,
            output.worker_metadata,
        )

    def _count(self, left: dict[int, int], handles: Sequence[int]) -> list[int]:
        finished = []
        for handle in handles:
            left[handle] = left.get(handle, self._num_ranks) - 1
            if not left[handle]:
                del left[handle]
                finished.append(handle)
        return finished
