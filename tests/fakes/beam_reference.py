"""A simple reference for beam search: all tokens of all hypotheses, sorted.

It shares no code with the engine. Scores are float32 as in transformers.
"""

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

Logprobs = Callable[[list[int]], NDArray[np.float32]]
"""Maps all token ids so far to the log-probabilities of the next token."""


def beam_search(
    prompt: list[int],
    logprobs: Logprobs,
    *,
    width: int,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[list[int]]:
    """Return the outputs, best first."""
    active: list[tuple[np.float32, list[int]]] = [(np.float32(0), [])]
    finished: list[tuple[np.float32, list[int]]] = []
    for length in range(1, max_tokens + 1):
        sums = np.stack([score + logprobs(prompt + output) for score, output in active])
        order = np.argsort(-sums, axis=None, kind="stable")[: width * (1 + len(stop_ids))]
        candidates = [
            (sums[slot, token_id], [*active[slot][1], int(token_id)])
            for slot, token_id in zip(*np.unravel_index(order, sums.shape), strict=True)
        ]
        weight = np.float32(length**length_penalty)
        ended = [each[1][-1] in stop_ids or length == max_tokens for each in candidates]
        finished += [
            (score / weight, output)
            for (score, output), over in zip(candidates[:width], ended[:width], strict=True)
            if over
        ]
        finished = sorted(finished, key=lambda each: -each[0])[:width]
        active = [each for each, over in zip(candidates, ended, strict=True) if not over][:width]
        if not active:
            break
        if len(finished) == width:
            if early_stopping is True:
                break
            if early_stopping == "never" and length_penalty > 0:
                weight = np.float32(max_tokens**length_penalty)
            if active[0][0] / weight <= finished[-1][0]:
                break
    return [output for _, output in finished]
