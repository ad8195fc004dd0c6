"""Log-probabilities of an answer as lists."""

import numpy as np

from proto.messages.engine_io import LogprobsArrays


def unpack(arrays: LogprobsArrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.frombuffer(arrays.token_ids, dtype="<i4").reshape(-1, arrays.width).copy()
    values = np.frombuffer(arrays.logprobs, dtype="<f4").reshape(-1, arrays.width)
    return ids, values, np.frombuffer(arrays.ranks, dtype="<i4")
