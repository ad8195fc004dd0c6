"""Weights as a GGUF file stores them: rows of blocks, each some numbers with their scales.

Owns the sizes of the blocks and the joining of rows. What is in a block is known to
gguf.py, which takes it apart, and to the kernels, which multiply with it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from proto.errors import ModelError
from proto.prepared_model import TensorEntry
from worker.loader.plain import check_size

BLOCKS: Final = {
    "Q8_0": (32, 34),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Numbers and bytes of a block of each type."""


@dataclass(frozen=True)
class StoredBlocks:
    """A weight [rows, columns] in blocks.

    data: uint8 [rows × bytes of a row], in the file's order; may be the mapped file itself.
    row_order: int64 [rows]; row i of the weight is row row_order[i] of `data`.
    """

    type: str
    rows: int
    columns: int
    data: npt.NDArray[np.uint8]
    row_order: npt.NDArray[np.int64]


def check_blocks(entry: TensorEntry) -> tuple[int, int]:
    """Numbers and bytes of a block of this tensor.

    Raises ModelError unless its rows consist of whole blocks, all of which are there.
    """
    block_size, block_bytes = BLOCKS[entry.type]
    if not entry.shape or entry.shape[-1] % block_size:
        raise ModelError(
            f"tensor {entry.name} of shape {list(entry.shape)}: rows of type {entry.type} "
            f"consist of blocks of {block_size}"
        )
    check_size(entry, math.prod(entry.shape) // block_size * block_bytes)
    return block_size, block_bytes


def joined(parts: Sequence[StoredBlocks]) -> list[StoredBlocks]:
    """The parts, one below the other, with neighbours of one type made one.

    Copies what is joined; a part between others stays the view that it was.
    """
    return [_join(list(alike)) for _, alike in groupby(parts, lambda part: part.type)]


def _join(parts: list[StoredBlocks]) -> StoredBlocks:
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    return StoredBlocks(
        first.type,
        sum(part.rows for part in parts),
        first.columns,
        np.concatenate([part.data for part in parts]),
        np.concatenate(list(_orders(parts))),
    )


def _orders(parts: list[StoredBlocks]) -> Iterator[npt.NDArray[np.int64]]:
    above = 0
    for part in parts:
        yield part.row_order + above
        above += part.rows
