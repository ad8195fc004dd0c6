"""Sampling backends, rows of sampling parameters and sampled positions for the tests."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.worker.kernel_variants import LOADABLE, load_variant, with_each
from worker.batch.input_batch import InputBatch
from worker.batch.step_inputs import SampledPositions
from worker.cpu.sampling import KernelBackend
from worker.reference.sampling import TorchBackend
from worker.sampling.backend import SamplingBackend
from worker.sampling.row_params import RowParams, neutral_params
from worker.sampling.sampler import SamplingBatch

each_backend = with_each(["reference", *LOADABLE])


def backend_of(variant) -> SamplingBackend:
    return TorchBackend() if variant == "reference" else KernelBackend(load_variant(variant))


def row_params(count: int, **columns) -> RowParams:
    """Parameters of `count` rows; a column is one value for all rows or a list."""
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


def last_positions(
    batch: InputBatch, rows: npt.NDArray[np.int64], seq_ids: Sequence[int]
) -> SampledPositions:
    """One sampled position of every row, after all its known tokens."""
    output_index = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
    return SampledPositions(np.arange(len(rows)), rows, list(seq_ids), output_index, {})
