"""Log-probabilities of sampled, named and best tokens, from unmodified logits.

Packs them as LogprobsArrays: column 0 is the sampled token, then the best ones in order, or the
named ones; the rank of the sampled token counts from 1. On the host start with `row_logprobs` or
`prompt_logprobs`, on a device with `queue_logprobs`, which `pack_logprobs` completes on the host.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from proto.messages.engine_io import LogprobsArrays
from proto.messages.model_runner_output import RowLogprobs
from worker.sampling.token_order import best_tokens, order_keys, token_ids_of, token_ranks

NO_LOGPROBS: Final = -1
"""In arrays of logprob counts: the row requests none."""
CHUNK_BYTES: Final = 64 << 20
"""Most bytes of float32 logits that are converted to log-probabilities at once."""


def row_logprobs(
    logits: torch.Tensor,
    token_ids: npt.NDArray[np.int64],
    num_logprobs: npt.NDArray[np.int32],
    positions: npt.NDArray[np.uint32],
) -> list[LogprobsArrays]:
    """Return the log-probabilities of each row of logits float32 [N, V].

    token_ids: [N], sampled. num_logprobs: [N], each at least 0. positions: [N], output indices.
    """
    ids, values, ranks = _columns(logits, token_ids, int(num_logprobs.max()))
    return [
        _pack(
            ids[row : row + 1, :width],
            values[row : row + 1, :width],
            ranks[row : row + 1],
            position,
        )
        for row, (width, position) in enumerate(
            zip((num_logprobs + 1).tolist(), positions.tolist(), strict=True)
        )
    ]


def named_logprobs(
    logits: torch.Tensor, token_id: int, named: npt.NDArray[np.int64], position: int
) -> LogprobsArrays:
    """Return the log-probabilities of the sampled token and the named ones; logits float32 [V]."""
    sampled = torch.tensor([[token_id]])
    ids = torch.cat((sampled, torch.from_numpy(named)[None]), dim=1)
    values = logits[None].log_softmax(dim=1).gather(1, ids).numpy().astype("<f4")
    ranks = token_ranks(logits[None], sampled).numpy().astype("<i4")
    return _pack(ids.numpy().astype("<i4"), values, ranks, position)


def best_continuations(
    logits: torch.Tensor,
    counts: npt.NDArray[np.int32],
    positions: npt.NDArray[np.uint32],
    suppressed: Sequence[tuple[int, npt.NDArray[np.int64]]] = (),
) -> list[LogprobsArrays]:
    """Return the `counts` [N] best tokens of each row of logits float32 [N, V], without ranks.

    suppressed: (row, token ids) pairs; these tokens come last, with −inf. The other tokens keep
    their log-probabilities.
    """
    logprobs = logits.log_softmax(dim=1)
    for row, token_ids in suppressed:
        logprobs[row, torch.from_numpy(token_ids)] = float("-inf")
    best = best_tokens(logprobs, int(counts.max()))
    ids = best.numpy().astype("<i4")
    values = logprobs.gather(1, best).numpy().astype("<f4")
    return [
        LogprobsArrays(
            position, count, ids[row, :count].tobytes(), values[row, :count].tobytes(), b""
        )
        for row, (count, position) in enumerate(
            zip(counts.tolist(), positions.tolist(), strict=True)
        )
    ]


def prompt_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_logprobs: int, first_position: int
) -> LogprobsArrays:
    """Return the log-probabilities of P consecutive prompt tokens.

    logits: float32 [P, V]. token_ids: int64 [P], the tokens that follow.
    first_position: index of token_ids[0] in the prompt.
    """
    rows_per_chunk = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
    chunks = [
        _columns(
            logits[start : start + rows_per_chunk],
            token_ids[start : start + rows_per_chunk],
            num_logprobs,
        )
        for start in range(0, logits.shape[0], rows_per_chunk)
    ]
    ids, values, ranks = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    return _pack(ids, values, ranks, first_position)


def logprobs_of_sequences(
    rows: Iterable[tuple[int, LogprobsArrays]],
) -> list[RowLogprobs]:
    """Join the log-probabilities of sampled positions to one entry for each sequence.

    rows: (seq_id, arrays of one position); positions of a sequence are consecutive.
    """
    joined: dict[int, LogprobsArrays] = {}
    for seq_id, arrays in rows:
        before = joined.get(seq_id)
        joined[seq_id] = arrays if before is None else concatenate([before, arrays])
    return [RowLogprobs(seq_id, arrays) for seq_id, arrays in joined.items()]


def concatenate(parts: Sequence[LogprobsArrays]) -> LogprobsArrays:
    """Join arrays of consecutive positions and equal width."""
    return LogprobsArrays(
        parts[0].first_position,
        parts[0].width,
        b"".join(part.token_ids for part in parts),
        b"".join(part.logprobs for part in parts),
        b"".join(part.ranks for part in parts),
    )


def queue_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_best: int,
    named: torch.Tensor,
) -> list[torch.Tensor]:
    """Queue the computation of log-probabilities on a device; return the tensors at once.

    Ids int32 and log-probabilities float32 [W, 1 + num_best + M], ranks int32 [W]. Columns are
    the sampled token, the best ones in order, the named ones.
    logits: [N, V] of any floating dtype, unmodified. rows: int64 [W], the rows that request
    log-probabilities. token_ids: int64 [N], sampled. named: int64 [W, M].
    """
    rows_per_chunk = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
    chunks = [
        _queue_columns(logits, some_rows, token_ids, num_best, some_named)
        for some_rows, some_named in zip(
            torch.split(rows, rows_per_chunk), torch.split(named, rows_per_chunk), strict=True
        )
    ]
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def pack_logprobs(
    arrays: Sequence[npt.NDArray[Any]],
    num_logprobs: npt.NDArray[np.int32],
    positions: npt.NDArray[np.uint32],
    named: Sequence[Sequence[int]],
) -> list[LogprobsArrays]:
    """Return the log-probabilities of each row.

    arrays: the tensors of `queue_logprobs`, flat and on the host. The others: [W], of the rows.
    """
    num_rows = len(num_logprobs)
    ids, values = (array.reshape(num_rows, -1) for array in arrays[:2])
    num_best = ids.shape[1] - 1 - max(map(len, named))
    packed = []
    for row, (count, position, names) in enumerate(
        zip(num_logprobs.tolist(), positions.tolist(), named, strict=True)
    ):
        columns = [*range(count + 1)]
        if names:
            columns = [0, *range(1 + num_best, 1 + num_best + len(names))]
        packed.append(
            _pack(
                ids[row : row + 1, columns].astype("<i4"),
                values[row : row + 1, columns].astype("<f4"),
                arrays[2][row : row + 1].astype("<i4"),
                position,
            )
        )
    return packed


def _columns(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_best: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return token ids and log-probabilities [N, 1 + num_best], ranks [N]."""
    sampled = torch.from_numpy(token_ids)[:, None]
    ids = torch.cat((sampled, best_tokens(logits, num_best)), dim=1)
    logprobs = logits.log_softmax(dim=1).gather(1, ids)
    return (
        ids.numpy().astype("<i4"),
        logprobs.numpy().astype("<f4"),
        token_ranks(logits, sampled).numpy().astype("<i4"),
    )


def _queue_columns(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_best: int,
    named: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raw = logits.index_select(0, rows).float()
    sampled = token_ids.index_select(0, rows)[:, None]
    columns = [sampled]
    if num_best:
        columns.append(token_ids_of(order_keys(raw).topk(num_best, dim=1).values))
    ids = torch.cat((*columns, named), dim=1)
    values = raw.log_softmax(dim=1).gather(1, ids)
    return ids.to(torch.int32), values, token_ranks(raw, sampled).to(torch.int32)


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
