"""Rows of sampling parameters and backends for the tests."""

import numpy as np

from tests.worker.kernel_variants import LOADABLE, load_variant, with_each
from worker.sampling.cpu_kernels import KernelBackend, SamplingBackend
from worker.sampling.row_params import RowParams, neutral_params
from worker.sampling.sampler import SamplingBatch
from worker.sampling.torch_backend import TorchBackend

each_backend = with_each(["reference", *LOADABLE])


def backend_of(variant) -> SamplingBackend:
    return TorchBackend() if variant == "reference" else KernelBackend(load_variant(variant))


def row_params(count: int, **columns) -> RowParams:
    """Records of `count` rows; a column is one value for all or a list of one each."""
    params = neutral_params(count)
    for name, value in {"seed": 1, **columns}.items():
        params[name] = value
    return params


def sampling_rows(
    count: int, suppressed=(), edits=(), named=(), num_logprobs=-1, **columns
) -> SamplingBatch:
    """`count` rows, greedy unless a temperature is given."""
    return SamplingBatch(
        row_params(count, **{"temperature": 0.0, **columns}),
        np.broadcast_to(np.array(num_logprobs, dtype=np.int32), count).copy(),
        suppressed=tuple(suppressed),
        edits=edits,
        named=named,
    )
