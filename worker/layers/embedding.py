"""Token embedding, and the tables that it looks rows up in."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import Kernels
from worker.layers.kernel_weights import KernelWeight, unpack_blocks
from worker.layers.linear import sum_in_float32
from worker.layers.norm import Norm
from worker.layers.triton_codes import CodedWeight
from worker.parallel.group import RankGroup


class EmbeddingTable(Protocol):
    """Rows of numbers [vocab, hidden] in any format."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        ...

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] to a new [T, hidden]; raises IndexError for an id outside the table."""
        ...


class DenseTable:
    """One tensor [vocab, hidden]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.dtype = table.dtype

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._table.index_select(0, token_ids)


class KernelTable:
    """A weight in a format of our kernels, perhaps a tied head's; rows are unpacked on use."""

    def __init__(self, weight: KernelWeight, dtype: torch.dtype) -> None:
        self._weight = weight
        self.dtype = dtype

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weight.rows(token_ids, self.dtype)


class CodedTable:
    """A weight as codes on a GPU, perhaps a tied head's; rows are converted on use."""

    def __init__(self, weight: CodedWeight, dtype: torch.dtype) -> None:
        self._weight = weight
        self.dtype = dtype

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weight.rows(token_ids, self.dtype)


class MappedTable:
    """A view [vocab, hidden] of a mapped file; rows are converted on use.

    The pages that lookups touch are in the page cache, which all processes share.
    """

    def __init__(self, stored: torch.Tensor, dtype: torch.dtype) -> None:
        self._stored = stored
        self.dtype = dtype

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._stored.index_select(0, token_ids).to(self.dtype)


class MappedBlockTable:
    """The quantisation blocks [vocab, hidden] of a mapped GGUF file; see MappedTable.

    stored: uint8 [vocab, bytes of a row], contiguous.
    """

    def __init__(
        self,
        kernels: Kernels,
        block_type: str,
        stored: npt.NDArray[np.uint8],
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self._kernels = kernels
        self._type = block_type
        self._stored = stored
        self._hidden = hidden
        self.dtype = dtype

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return unpack_blocks(
            self._kernels, self._type, self._stored, self._hidden, token_ids, self.dtype
        )


class VocabParallelTable:
    """A table of `num_tokens` rows of which this rank holds those of the tokens in `own`."""

    def __init__(
        self, table: EmbeddingTable, group: RankGroup, own: range, num_tokens: int
    ) -> None:
        self._table = table
        self._group = group
        self._own = own
        self._num_tokens = num_tokens

    @property
    def dtype(self) -> torch.dtype:
        return self._table.dtype

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        if token_ids.device.type == "cpu":  # the check would have to wait for another device
            self._refuse_invalid(token_ids)
        elsewhere = (token_ids < self._own.start) | (token_ids >= self._own.stop)
        rows = self._table.rows((token_ids - self._own.start).masked_fill_(elsewhere, 0))
        rows.masked_fill_(elsewhere[:, None], 0.0)
        # one summand of each number is not zero, so nothing is rounded
        return sum_in_float32(self._group.gather(rows)).to(rows.dtype)

    def _refuse_invalid(self, token_ids: torch.Tensor) -> None:
        invalid = (token_ids < 0) | (token_ids >= self._num_tokens)
        if invalid.any():
            raise IndexError(f"row {int(token_ids[invalid][0])} of {self._num_tokens}")


class Embedding:
    """Rows of a table, times a scale that is first rounded to the table's dtype."""

    def __init__(self, table: EmbeddingTable, scale: float = 1.0) -> None:
        self._table = table
        self._scale = torch.tensor(scale, dtype=table.dtype)
        self._scaled = scale != 1.0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] to a new [T, hidden]; raises IndexError for an id outside the table."""
        rows = self.rows(token_ids)
        return rows.mul_(self._scale) if self._scaled else rows

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the same without the scale."""
        return self._table.rows(token_ids)


class EncoderInput:
    """The input of an encoder's layers: the norm of a sum of embeddings, computed in float32.

    words: of the tokens. positions, token_types: tables [rows, hidden] in float32, or None;
    first_position: row of position 0.
    """

    def __init__(
        self,
        words: Embedding,
        positions: torch.Tensor | None,
        first_position: int,
        token_types: torch.Tensor | None,
        norm: Norm,
    ) -> None:
        self._words = words
        self._token_types = token_types
        self._norm = norm
        self._positions = None if positions is None else positions[first_position:]
        assert token_types is None or positions is not None, "no family has types without positions"
        if self._positions is not None and token_types is not None:
            self._positions = self._positions + token_types[0]
            self._token_types = token_types - token_types[0]

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [T, hidden] for int64 [T]; token_types: None if all are 0."""
        words = self._words(token_ids)
        total = words.float()
        if self._positions is not None:
            total = total + self._positions.index_select(0, positions)
        if self._token_types is not None and token_types is not None:
            total = total + self._token_types.index_select(0, token_types)
        return self._norm(total).to(words.dtype)
