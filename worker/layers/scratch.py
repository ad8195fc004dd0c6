"""Memory for what is computed for each token of a step and read at once: allocated once.

What is read later, by the sampler or the engine, must not lie here. On an accelerator it is
new each time: torch keeps memory at hand there, and a captured graph goes on using what it
was recorded with, which must not be given back when a longer step comes.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scratch:
    """tensor: [num_rows, size], contiguous. address: where it begins."""

    tensor: torch.Tensor
    address: int
    num_rows: int


class RowBuffer:
    """Rows of `size` elements; holds as many as were ever asked for at once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory = torch.empty((0, size))
        self._space = Scratch(self._memory, 0, 0)

    def rows(self, like: torch.Tensor) -> Scratch:
        """As many rows as `like` has, of its dtype and on its device, with whatever is in them."""
        count = like.shape[0]
        if like.device.type != "cpu":
            tensor = like.new_empty((count, self._size))
            return Scratch(tensor, tensor.data_ptr(), count)
        if (self._memory.dtype, self._memory.device) != (like.dtype, like.device):
            self._memory = like.new_empty((0, self._size))
        elif count == self._space.num_rows:
            return self._space
        if count > len(self._memory):
            self._memory = like.new_empty((count, self._size))
        tensor = self._memory[:count]
        self._space = Scratch(tensor, tensor.data_ptr(), count)
        return self._space
