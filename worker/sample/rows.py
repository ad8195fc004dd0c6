"""What the sampler is told and what it answers, as arrays over the rows of a step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proto.engine_io import LogprobsArrays
from worker.sample.row_edits import RowEdits


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings of N rows, numpy, each array [N].

    temperature: float32, below GREEDY_TEMPERATURE the row is greedy.
    top_k: int32, 0 keeps all. top_p: float32, 1 keeps all. min_p: float32, 0 keeps all.
    seed: uint64, choice: uint32, position: uint32: key of the draw; position is the
        index of the output token, 0 for the first.
    num_logprobs: int32, alternatives beside the chosen token, -1 for no logprobs.
    suppressed: (row, int64 token ids) pairs; those ids cannot be chosen.
    edits: (row, what changes its scores) pairs, of the rows that have some.
    named: (row, int64 token ids) pairs; log-probabilities of these in place of the best ones.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]
    num_logprobs: npt.NDArray[np.int32]
    suppressed: tuple[tuple[int, npt.NDArray[np.int64]], ...] = ()
    edits: tuple[tuple[int, RowEdits], ...] = ()
    named: tuple[tuple[int, npt.NDArray[np.int64]], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: int64 [N]. logprobs: one entry a row, None for rows that did not ask."""

    token_ids: npt.NDArray[np.int64]
    logprobs: tuple[LogprobsArrays | None, ...]
