"""The hot parts of sampling, the best token, changes, filters and draws: what they do, by whom.

The draw is Gumbel-max over one row of scores:

    token = argmax_i  logit_i / T − ln(−ln u_i)

u_i is a function of (seed, choice, position, token id i) alone, see philox.py: the
same request draws the same token in any row of any batch on any device. Compared
with inverting the cumulated distribution it also survives small differences of the
logits: only near ties of the perturbed scores can flip.

Filters keep a prefix of the tokens ordered by score, ties by lower id. Min-p goes
first, then top-k, then top-p; each sees the distribution that the one before left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import Kernels
from worker.sampling.draw import (
    Best,
    Change,
    apply_filters,
    best_by_kernel,
    best_by_torch,
    gumbel_noise,
)
from worker.sampling.logit_edits import EditsByRow, edit_logits

Arrays = list[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Filters of N rows: top_k int32 (0 keeps all), top_p float32 (1), min_p float32 (0)."""

    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DrawKeys:
    """Key of each of N draws: seed uint64, choice and position uint32."""

    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]


class SamplingBackend(Protocol):
    """Works on `rows` int64 [N] of logits float32 [M, V], temperatures float32 [N] above 0."""

    def best(self, logits: torch.Tensor, changes: Sequence[Change] = ()) -> Best:
        """The best token of each row of logits [M, V], in any floating dtype; they stay as is."""
        ...

    def edit(self, logits: torch.Tensor, edits: EditsByRow) -> None:
        """Change the scores of rows, see edits.py, in place."""
        ...

    def filter(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float32],
        filters: RowFilters,
    ) -> None:
        """Write −inf in place over the tokens that are out; the best one always stays."""
        ...

    def draw(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float32],
        keys: DrawKeys,
    ) -> npt.NDArray[np.int64]:
        """Token ids [N]; −inf is never drawn, equal scores give the lowest id."""
        ...


class ReferenceBackend:
    """Filters in torch, draws in numpy and float64, row by row."""

    def best(self, logits: torch.Tensor, changes: Sequence[Change] = ()) -> Best:
        return best_by_torch(logits, changes)

    def edit(self, logits: torch.Tensor, edits: EditsByRow) -> None:
        edit_logits(logits, edits)

    def filter(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float32],
        filters: RowFilters,
    ) -> None:
        index = torch.from_numpy(rows)
        some = logits[index]
        scores = some / torch.from_numpy(temperature)[:, None]
        apply_filters(
            scores,
            torch.from_numpy(filters.top_k).long(),
            torch.from_numpy(filters.top_p).double(),
            torch.from_numpy(filters.min_p).double(),
        )
        logits[index] = some.masked_fill_(scores == float("-inf"), float("-inf"))

    def draw(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float32],
        keys: DrawKeys,
    ) -> npt.NDArray[np.int64]:
        tokens = np.empty(len(rows), dtype=np.int64)
        for index, row in enumerate(rows):
            scores = logits[row].numpy().astype(np.float64) / np.float64(temperature[index])
            tokens[index] = np.argmax(scores + self._noise(keys, index, len(scores)))
        return tokens

    def _noise(self, keys: DrawKeys, index: int, vocab_size: int) -> npt.NDArray[np.float64]:
        return gumbel_noise(
            int(keys.seed[index]), int(keys.choice[index]), int(keys.position[index]), vocab_size
        )


class KernelBackend:
    """The kernels csrc/best.cpp, edits.cpp, filter.cpp, draw.cpp: the reference's answers."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def best(self, logits: torch.Tensor, changes: Sequence[Change] = ()) -> Best:
        return best_by_kernel(self._kernels, logits, changes)

    def edit(self, logits: torch.Tensor, edits: EditsByRow) -> None:
        rows = np.array([row for row, _ in edits], dtype=np.int64)
        addresses = np.array([each.address() for _, each in edits], dtype=np.uint64)
        self._call(self._kernels.edit, logits, [rows, addresses])

    def filter(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float32],
        filters: RowFilters,
    ) -> None:
        arrays: Arrays = [rows, temperature, filters.top_k, filters.top_p, filters.min_p]
        self._call(self._kernels.filter, logits, _contiguous(arrays, "i8 f4 i4 f4 f4"))

    def draw(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float32],
        keys: DrawKeys,
    ) -> npt.NDArray[np.int64]:
        arrays: Arrays = [rows, temperature, keys.seed, keys.choice, keys.position]
        token_ids = np.empty(len(rows), dtype=np.int64)
        self._call(self._kernels.draw, logits, [*_contiguous(arrays, "i8 f4 u8 u4 u4"), token_ids])
        return token_ids

    def _call(self, function: Callable[..., None], logits: torch.Tensor, arrays: Arrays) -> None:
        assert logits.dtype == torch.float32, "the kernels read float32"
        assert logits.stride(1) == 1, "a row of logits must be contiguous"
        function(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            len(arrays[0]),
            *(array.ctypes.data for array in arrays),
        )


def _contiguous(arrays: Arrays, dtypes: str) -> Arrays:
    """Arrays as the kernels read them, by dtype names; the caller keeps them alive meanwhile."""
    return [
        np.ascontiguousarray(array, dtype=dtype)
        for array, dtype in zip(arrays, dtypes.split(), strict=True)
    ]
