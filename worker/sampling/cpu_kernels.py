"""The parts of sampling that cost time on a CPU, as kernels: best token, edits, filters, draw.

The draw is Gumbel-max over one row of logits:

    token = argmax_i  logit_i / T − ln(−ln u_i)

u_i is a function of (seed, choice, position, token id i) alone, so a request with a seed draws
the same token in any row of any batch on any device. Only near ties of the perturbed logits can
be changed by small differences of the logits, which inverting the cumulated distribution does not
promise.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import DTYPE_CODES, Kernels
from worker.sampling.logit_edits import EditsByRow, RowEdits
from worker.sampling.row_params import ROW_PARAMS, RowParams


class RowChange(NamedTuple):
    """Edits of the logits of one greedy row. suppressed: token ids that cannot be chosen yet."""

    row: int
    edits: RowEdits
    suppressed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Best:
    """The best token of each row.

    logits: float32 [N], the largest before edits, NaN where a row has a NaN.
    token_ids: int64 [N], the best after edits, lowest id among equals.
    """

    logits: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int64]

    @property
    def nonfinite(self) -> npt.NDArray[np.bool_]:
        """Bool [N]: rows with a NaN or +inf, or with nothing but −inf.

        Single −inf are valid: masks put them there.
        """
        return ~np.isfinite(self.logits)


class SamplingBackend(Protocol):
    """Works on the rows `rows` int64 [N] of logits float32 [M, V].

    params: records [N] of these rows, with temperatures above 0.
    """

    def best(self, logits: torch.Tensor, changes: Sequence[RowChange] = ()) -> Best:
        """Return the best token of each row [M, V], in any floating dtype; leave the logits."""
        ...

    def edit(self, logits: torch.Tensor, edits: EditsByRow) -> None:
        """Make the edits of some rows in place, see logit_edits.py."""
        ...

    def filter(self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams) -> None:
        """Write −inf in place over the tokens that the filters drop; never over the best one."""
        ...

    def draw(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams
    ) -> npt.NDArray[np.int64]:
        """Return token ids [N]; −inf is never drawn, equal sums give the lowest id."""
        ...


class KernelBackend:
    """SamplingBackend by the compiled kernels; reference.py defines what they give."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def best(self, logits: torch.Tensor, changes: Sequence[RowChange] = ()) -> Best:
        num_rows, vocab_size = logits.shape
        logits = logits.contiguous()
        largest = np.empty(num_rows, dtype=np.float32)
        token_ids = np.empty(num_rows, dtype=np.int64)
        edits = None
        if changes:
            edits = (c_void_p * num_rows)()
            for change in changes:
                edits[change.row] = change.edits.address(change.suppressed)
        self._kernels.find_best(
            DTYPE_CODES[logits.dtype],
            num_rows,
            vocab_size,
            logits.data_ptr(),
            largest.ctypes.data,
            token_ids.ctypes.data,
            ctypes.addressof(edits) if edits is not None else None,
        )
        return Best(largest, token_ids)

    def edit(self, logits: torch.Tensor, edits: EditsByRow) -> None:
        rows = np.array([row for row, _ in edits], dtype=np.int64)
        addresses = np.array([edit.address() for _, edit in edits], dtype=np.uint64)
        self._call(self._kernels.edit, logits, rows, addresses)

    def filter(self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams) -> None:
        self._call(self._kernels.filter, logits, rows, _records(params))

    def draw(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams
    ) -> npt.NDArray[np.int64]:
        token_ids = np.empty(len(rows), dtype=np.int64)
        self._call(self._kernels.draw, logits, rows, _records(params), token_ids)
        return token_ids

    def _call(
        self,
        function: Callable[..., None],
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        *arrays: npt.NDArray[Any],
    ) -> None:
        assert logits.dtype == torch.float32, "the kernels read float32"
        assert logits.stride(1) == 1, "a row of logits must be contiguous"
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        addresses = [array.ctypes.data for array in (rows, *arrays)]
        function(logits.data_ptr(), logits.stride(0), logits.shape[1], len(rows), *addresses)


def _records(params: RowParams) -> RowParams:
    assert params.dtype == ROW_PARAMS
    return np.ascontiguousarray(params)
