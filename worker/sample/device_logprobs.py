"""Log-probabilities on a device: what logprobs.py defines, queued with the tokens they are of.

Only rows that ask are looked at, in chunks. Nothing is waited for: which of several equal
scores comes first is decided by keys over the whole row.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from proto.engine_io import LogprobsArrays
from worker.sample.order import order_keys, token_ids_of, token_ranks

CHUNK_BYTES: Final = 64 << 20
"""Most bytes of float32 scores that are looked at at once."""


def queue_logprobs(
    scores: torch.Tensor,
    at: torch.Tensor,
    token_ids: torch.Tensor,
    num_best: int,
    named: torch.Tensor,
) -> list[torch.Tensor]:
    """Ids int32 and log-probabilities float32 [W, 1 + num_best + M], ranks int32 [W].

    scores: [N, V] of any floating dtype, as they come from the model. at: int64 [W], the rows
    that ask. token_ids: int64 [N], chosen. named: int64 [W, M], looked up as well. Columns
    are the chosen token, the best ones in order, the named ones.
    """
    rows_at_once = max(1, CHUNK_BYTES // (4 * scores.shape[1]))
    parts = [
        _columns(scores, each, token_ids, num_best, ids)
        for each, ids in zip(
            torch.split(at, rows_at_once), torch.split(named, rows_at_once), strict=True
        )
    ]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def pack_logprobs(
    found: Sequence[npt.NDArray[Any]],
    num_logprobs: npt.NDArray[np.int32],
    positions: npt.NDArray[np.uint32],
    named: Sequence[Sequence[int]],
) -> list[LogprobsArrays]:
    """What `queue_logprobs` has found, flat and on the host, for each of W rows by itself."""
    num_rows = len(num_logprobs)
    ids, values = (each.reshape(num_rows, -1) for each in found[:2])
    num_best = ids.shape[1] - 1 - max(map(len, named))
    packed = []
    for row, (count, at, names) in enumerate(
        zip(num_logprobs.tolist(), positions.tolist(), named, strict=True)
    ):
        columns = [*range(count + 1)]
        if names:
            columns = [0, *range(1 + num_best, 1 + num_best + len(names))]
        packed.append(
            LogprobsArrays(
                first_position=at,
                width=len(columns),
                token_ids=ids[row, columns].astype("<i4").tobytes(),
                logprobs=values[row, columns].astype("<f4").tobytes(),
                ranks=found[2][row : row + 1].astype("<i4").tobytes(),
            )
        )
    return packed


def _columns(
    scores: torch.Tensor,
    at: torch.Tensor,
    token_ids: torch.Tensor,
    num_best: int,
    named: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raw = scores.index_select(0, at).float()
    chosen = token_ids.index_select(0, at)[:, None]
    columns = [chosen]
    if num_best:
        columns.append(token_ids_of(order_keys(raw).topk(num_best, dim=1).values))
    ids = torch.cat((*columns, named), dim=1)
    values = raw.log_softmax(dim=1).gather(1, ids)
    return ids.to(torch.int32), values, token_ranks(raw, chosen).to(torch.int32)
