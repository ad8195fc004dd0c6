"""Sampling on the host by the C++ kernels, csrc/sampling."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.cpu.kernels import DTYPE_CODES, Kernels, KernelsUnavailableError, load_kernels
from worker.reference.sampling import TorchBackend
from worker.sampling.backend import Best, RowChange
from worker.sampling.logit_edits import EditsByRow
from worker.sampling.row_params import ROW_PARAMS, RowParams
from worker.sampling.sampler import Sampler

logger = logging.getLogger("tokend.sample")


def create_sampler() -> Sampler:
    """Return a sampler on the compiled kernels, or on torch if they are not available."""
    try:
        return Sampler(KernelBackend(load_kernels()))
    except KernelsUnavailableError as reason:
        logger.warning("sampling runs in torch, which is slow: %s", reason)
        return Sampler(TorchBackend())


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
