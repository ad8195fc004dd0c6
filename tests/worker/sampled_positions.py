"""Sampled positions for tests that have no step: the last token of each row."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker.input_batch import InputBatch
from worker.step_inputs import SampledPositions


def last_positions(
    batch: InputBatch, rows: npt.NDArray[np.int64], seq_ids: Sequence[int]
) -> SampledPositions:
    """One position for each of these rows, after all their known tokens."""
    output_index = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
    return SampledPositions(np.arange(len(rows)), rows, list(seq_ids), output_index, {})
