"""Log-probabilities of chosen and best tokens, from unmodified logits.

Packs them as LogprobsArrays: column 0 is the chosen token, then the best ones in
order; the rank of the chosen token counts from 1.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.engine_io import LogprobsArrays
from worker.sampling.torch_backend import best_tokens, token_ranks

CHUNK_BYTES: Final = 64 << 20
"""Most bytes of float32 log-probabilities that are in memory at once."""


def row_logprobs(
    logits: torch.Tensor,
    token_ids: npt.NDArray[np.int64],
    num_logprobs: npt.NDArray[np.int32],
    first_positions: npt.NDArray[np.uint32],
) -> list[LogprobsArrays]:
    """One LogprobsArrays of one row for each row of logits float32 [N, V].

    num_logprobs [N] may differ from row to row, each at least 0.
    """
    ids, values, ranks = _columns(logits, token_ids, int(num_logprobs.max()))
    return [
        _pack(ids[row : row + 1, :width], values[row : row + 1, :width], ranks[row : row + 1], at)
        for row, (width, at) in enumerate(
            zip((num_logprobs + 1).tolist(), first_positions.tolist(), strict=True)
        )
    ]


def named_logprobs(
    logits: torch.Tensor, token_id: int, named: npt.NDArray[np.int64], position: int
) -> LogprobsArrays:
    """The same for one row of logits float32 [V]: columns are the chosen token, then `named`."""
    chosen = torch.tensor([[token_id]])
    ids = torch.cat((chosen, torch.from_numpy(named)[None]), dim=1)
    values = logits[None].log_softmax(dim=1).gather(1, ids).numpy().astype("<f4")
    ranks = token_ranks(logits[None], chosen).numpy().astype("<i4")
    return _pack(ids.numpy().astype("<i4"), values, ranks, position)


def best_continuations(
    logits: torch.Tensor,
    counts: npt.NDArray[np.int32],
    first_positions: npt.NDArray[np.uint32],
    suppressed: Sequence[tuple[int, npt.NDArray[np.int64]]] = (),
) -> list[LogprobsArrays]:
    """The `counts` [N] best tokens of each row of logits float32 [N, V], without ranks.

    suppressed: (row, token ids) pairs; these come last, at minus infinity. The others
    keep their log-probabilities.
    """
    logprobs = logits.log_softmax(dim=1)
    for row, token_ids in suppressed:
        logprobs[row, torch.from_numpy(token_ids)] = float("-inf")
    best = best_tokens(logprobs, int(counts.max()))
    ids = best.numpy().astype("<i4")
    values = logprobs.gather(1, best).numpy().astype("<f4")
    return [
        LogprobsArrays(at, count, ids[row, :count].tobytes(), values[row, :count].tobytes(), b"")
        for row, (count, at) in enumerate(
            zip(counts.tolist(), first_positions.tolist(), strict=True)
        )
    ]


def prompt_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_logprobs: int, first_position: int
) -> LogprobsArrays:
    """Log-probabilities of the prompt tokens that follow P consecutive positions.

    logits: float32 [P, V]. token_ids: int64 [P], the actual next tokens.
    first_position: prompt position of token_ids[0].
    """
    rows_at_once = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
    chunks = [
        _columns(
            logits[start : start + rows_at_once],
            token_ids[start : start + rows_at_once],
            num_logprobs,
        )
        for start in range(0, logits.shape[0], rows_at_once)
    ]
    ids, values, ranks = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    return _pack(ids, values, ranks, first_position)


def _columns(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_best: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Token ids and log-probabilities [N, 1 + num_best], ranks [N]."""
    chosen = torch.from_numpy(token_ids)[:, None]
    ids = torch.cat((chosen, best_tokens(logits, num_best)), dim=1)
    logprobs = logits.log_softmax(dim=1).gather(1, ids)
    return (
        ids.numpy().astype("<i4"),
        logprobs.numpy().astype("<f4"),
        token_ranks(logits, chosen).numpy().astype("<i4"),
    )


def _pack(
    ids: npt.NDArray[np.int32],
    values: npt.NDArray[np.float32],
    ranks: npt.NDArray[np.int32],
    first_position: int,
) -> LogprobsArrays:
    return LogprobsArrays(
        first_position=first_position,
        width=ids.shape[1],
        token_ids=ids.tobytes(),
        logprobs=values.tobytes(),
        ranks=ranks.tobytes(),
    )
