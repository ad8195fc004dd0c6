"""The interface of sampling backends, and the one that calls the C++ kernels for CPUs.

A backend finds best tokens, edits logits, filters and draws; torch_backend.py is the other one.

The draw is Gumbel-max over one row of logits:

    token = argmax_i  logit_i / T − ln(−ln u_i)

u_i is a function of (seed, choice, position, token id i) alone, so a request with a seed draws
the same token in any row of any batch on any device. Small differences of the logits change the
token only at near ties; a draw by the cumulated distribution would not have this property.
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
    """Logit edits of one greedy row. suppressed: stop tokens before min_tokens."""

    row: int
    edits: RowEdits
    suppressed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Best:
    """The best token of each row.

    logits: float32 [N], the largest logit before edits, NaN if the row has a NaN.
    token_ids: int64 [N], the best token after edits, lowest id among equals.
    """

    logits: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int64]

    @property
    def nonfinite(self) -> npt.NDArray[np.bool_]:
        """Rows, bool [N], with a NaN or +inf, or with nothing but −inf; other −inf are valid."""
        return ~np.isfinite(self.logits)


class SamplingBackend(Protocol):
    """The operations of sampling on logits float32 [M, V].

    rows: int64 [N], the rows to work on. params: their records [N], with temperatures above 0.
    """

    def best(self, logits: torch.Tensor, changes: Sequence[RowChange] = ()) -> Best:
        """Return the best token of each row [M, V], in any floating dtype; leave the logits."""
        ...

    def edit(self, logits: torch.Tensor, edits: EditsByRow) -> None:
        """Apply logit edits to some rows in place, see logit_edits.py."""
        ...

    def filter(self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams) -> None:
        """Write −inf over the tokens that the filters remove; the best token always stays."""
        ...

    def draw(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams
    ) -> npt.NDArray[np.int64]:
        """Draw a token for each row; return token ids [N]. A logit of −inf is never drawn."""
        ...


class KernelBackend:
    """SamplingBackend on the compiled C++ kernels; TorchBackend defines the results."""

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
