"""Block tables of all rows, as one array that a step gathers from."""

import numpy as np
from numpy.typing import NDArray

from proto.scheduler_output import BlockIds


class BlockTable:
    """`ids[row, i]` is the block that holds tokens [i * block_size, (i + 1) * block_size).

    ids: int32 [num_rows, max_blocks]; entries past `length[row]` are meaningless.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.ids: NDArray[np.int32] = np.zeros(
            (num_rows, -(-max_model_len // block_size)), dtype=np.int32
        )
        self._length = [0] * num_rows

    def replace(self, row: int, block_ids: BlockIds) -> None:
        """Give a row its whole table."""
        self._length[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: BlockIds) -> None:
        """Add blocks at the end of a row."""
        (added,) = block_ids
        start = self._length[row]
        self.ids[row, start : start + len(added)] = added
        self._length[row] = start + len(added)
