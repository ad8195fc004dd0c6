"""Block tables of all rows in all KV cache groups, as one array that a step gathers from."""

import numpy as np
from numpy.typing import NDArray

from proto.scheduler_output import BlockIds


class BlockTable:
    """`ids[group, row, i]` is the block that holds tokens [i * block_size, (i + 1) * block_size).

    ids: int32 [num_groups, num_rows, max_blocks]; entries past the end of a row are
        meaningless, and so are those of blocks that a group's window has passed.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, num_groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.ids: NDArray[np.int32] = np.zeros(
            (num_groups, num_rows, -(-max_model_len // block_size)), dtype=np.int32
        )
        self._length = [[0] * num_groups for _ in range(num_rows)]

    def replace(self, row: int, block_ids: BlockIds) -> None:
        """Give a row its whole table in each group."""
        self._length[row] = [0] * self.num_groups
        self.append(row, block_ids)

    def append(self, row: int, block_ids: BlockIds) -> None:
        """Add blocks at the end of a row; one list, perhaps empty, for each group."""
        length = self._length[row]
        for group, (start, added) in enumerate(zip(length, block_ids, strict=True)):
            self.ids[group, row, start : start + len(added)] = added
            length[group] = start + len(added)
