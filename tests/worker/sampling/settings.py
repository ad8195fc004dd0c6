"""Rows of sampling settings and backends for the tests."""

import numpy as np

from tests.worker.kernel_variants import LOADABLE, load_variant, with_each
from worker.sampling.cpu_kernels import KernelBackend, ReferenceBackend, SamplingBackend
from worker.sampling.sampler import SamplingBatch

each_backend = with_each(["reference", *LOADABLE])


def backend_of(variant) -> SamplingBackend:
    return ReferenceBackend() if variant == "reference" else KernelBackend(load_variant(variant))


def sampling_rows(count: int, suppressed=(), edits=(), named=(), **settings) -> SamplingBatch:
    """`count` rows; a setting is one value for all or a list of one each. Default: greedy."""
    defaults = {
        "temperature": (0.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "seed": (1, np.uint64),
        "choice": (0, np.uint32),
        "position": (0, np.uint32),
        "num_logprobs": (-1, np.int32),
    }
    arrays = {
        name: np.ascontiguousarray(
            np.broadcast_to(np.array(settings.pop(name, default), dtype=dtype), count)
        )
        for name, (default, dtype) in defaults.items()
    }
    assert not settings, f"unknown settings {settings}"
    return SamplingBatch(**arrays, suppressed=tuple(suppressed), edits=edits, named=named)
