"""Which rows and columns of each weight one rank has, and where they lie in a file.

    q k v gate up, embedding, head    rows
    o down                            columns
    norms, biases of o                all of it

A piece of rows is a range of the file's bytes; columns are cut out of what was read. In blocks
they can be only where a cut is between two blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from proto.prepared_model import TensorEntry, TensorIndex
from worker.loader.blocks import BLOCKS, StoredBlocks
from worker.loader.names import name_in_file
from worker.models.spec import ModelSpec, parameter_shapes
from worker.parallel.shares import Share, divide

_ALL: Final = slice(None)
_UNITS: Final = (64, 32)
"""Inner columns that are rotated together, or have a scale together, where a form makes its own."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and columns of a weight; slices of all of it where it is not divided that way."""

    rows: slice = field(default_factory=lambda: _ALL)
    columns: slice = field(default_factory=lambda: _ALL)

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that is left of a whole weight."""
        sizes = (
            len(range(*part.indices(size)))
            for part, size in zip((self.rows, self.columns), whole, strict=False)
        )
        return tuple(sizes)

    def entry_of(self, entry: TensorEntry) -> TensorEntry:
        """The entry with its rows only; all columns."""
        first, end, _ = self.rows.indices(entry.shape[0])
        if end - first == entry.shape[0]:
            return entry
        row_bytes = entry.num_bytes // entry.shape[0]
        return TensorEntry(
            entry.name,
            entry.type,
            (end - first, *entry.shape[1:]),
            entry.file,
            entry.offset + first * row_bytes,
            (end - first) * row_bytes,
        )

    def separates(self, block_size: int, num_columns: int) -> bool:
        """Whether a cut between columns is within a block."""
        first, end, _ = self.columns.indices(num_columns)
        return bool(first % block_size or (end % block_size and end != num_columns))

    def columns_of(self, stored: StoredBlocks) -> StoredBlocks:
        """Blocks with these columns only: a copy; no block is separated."""
        first, end, _ = self.columns.indices(stored.columns)
        if end - first == stored.columns:
            return stored
        size, num_bytes = BLOCKS[stored.type]
        blocks = stored.data.reshape(stored.rows, -1, num_bytes)[:, first // size : end // size]
        data = np.ascontiguousarray(blocks).reshape(-1)
        return StoredBlocks(stored.type, stored.rows, end - first, data, stored.row_order)


def pieces(spec: ModelSpec, share: Share) -> dict[str, Piece]:
    """The piece of every weight of a model, by tokend's names."""
    query, kv = (_times(each, spec.head_dim) for each in (share.heads, share.kv_heads))
    inner, vocab = _times(share.inner, 1), _times(share.vocab, 1)
    divided = {
        "embedding": Piece(rows=vocab),
        "head": Piece(rows=vocab),
        "q": Piece(rows=query),
        "k": Piece(rows=kv),
        "v": Piece(rows=kv),
        "o": Piece(columns=query),
        "gate": Piece(rows=inner),
        "up": Piece(rows=inner),
        "down": Piece(columns=inner),
    }

    def piece(name: str) -> Piece:
        *_, part, kind = name.split(".")
        if (part, kind) == ("o", "bias"):
            return Piece()
        return divided.get(part, Piece())

    return {name: piece(name) for name in parameter_shapes(spec)}


def shares_of(spec: ModelSpec, index: TensorIndex, size: int) -> tuple[Share, ...]:
    """The share of each of `size` ranks, with no block of an MLP separated if that can be."""
    return divide(spec, size, (math.lcm(_UNITS[0], _block_of_down(spec, index)), *_UNITS))


def _block_of_down(spec: ModelSpec, index: TensorIndex) -> int:
    """Columns that no piece of the MLP's last weights may separate; 1 where they are numbers."""
    names = {
        name_in_file(index.format, f"layers.{layer}.down.weight", spec.post_norms)
        for layer in range(spec.num_layers)
    }
    types: Sequence[str] = [each.type for each in index.tensors if each.name in names]
    return max((BLOCKS[each][0] for each in types if each in BLOCKS), default=1)


def _times(part: range, size: int) -> slice:
    return slice(part.start * size, part.stop * size)
