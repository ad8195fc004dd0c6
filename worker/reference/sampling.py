"""Sampling in torch and numpy.

noise      Philox-4x32-10 words, a function of (seed, choice, position, token id) alone
filters    see FILTERS in row_params.py
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from worker.sampling.backend import Best, RowChange
from worker.sampling.logit_edits import NEVER, EditsByRow, edit_logits
from worker.sampling.row_params import FILTERS, RowParams, torch_columns
from worker.sampling.token_order import order_keys, token_ids_of

ROUNDS: Final = 10
"""Rounds of Philox. Algorithm and constants: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers:
As Easy as 1, 2, 3" (SC 2011), section 3.4."""
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD: Final = np.uint64(0xFFFFFFFF)
_WORD_BITS: Final = np.uint64(32)

STREAM_SAMPLE: Final = 0
"""Last counter word of the draws that choose an output token."""


def philox_4x32_10(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Return the four output words [4, n] of counters [4, n]: 32-bit words held in uint64."""
    c0, c1, c2, c3 = counter
    for round_number in range(ROUNDS):
        keys = [
            np.uint64((word + round_number * weyl) & 0xFFFFFFFF)
            for word, weyl in zip(key, _WEYL, strict=True)
        ]
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ keys[0],
            product1 & _LOW_WORD,
            (product0 >> _WORD_BITS) ^ c3 ^ keys[1],
            product0 & _LOW_WORD,
        )
    return np.stack((c0, c1, c2, c3))


def token_words(seed: int, choice: int, position: int, num_tokens: int) -> npt.NDArray[np.uint64]:
    """Return the random word x_i of every token id i, uint64 [num_tokens], below 2^32."""
    num_counters = -(-num_tokens // 4)
    counter = np.empty((4, num_counters), dtype=np.uint64)
    counter[0] = np.arange(num_counters, dtype=np.uint64)
    counter[1], counter[2], counter[3] = position, choice, STREAM_SAMPLE
    words = philox_4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return words.T.reshape(-1)[:num_tokens]


def gumbel_noise(seed: int, choice: int, position: int, num_tokens: int) -> npt.NDArray[np.float64]:
    """Return Gumbel noise −ln(−ln u_i) with u_i = (x_i + ½)·2⁻³², float64 [num_tokens]."""
    words = token_words(seed, choice, position, num_tokens).astype(np.float64)
    uniform = (words + 0.5) * 2.0**-32
    return -np.log(-np.log(uniform))


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Return logits float32 [N, V] with −inf over the tokens that a row's filters remove.

    They are applied in the order of `FILTERS`' docstring. The best token always stays. Sorts the
    rows; the kernels for CPUs and GPUs do not.
    temperature: float32 [N], above 0. The others: DRAW_PARAMETERS as `torch_columns` gives them,
    top_k int64 [N], top_p and min_p float64 [N].
    """
    scaled = logits / temperature[:, None]
    limit = scaled.amax(dim=1) + min_p.log()
    scaled = scaled.masked_fill(scaled < limit[:, None], float("-inf"))
    order = token_ids_of(order_keys(scaled).sort(dim=1, descending=True).values)
    ranked = scaled.gather(1, order)
    rank = torch.arange(logits.shape[1], device=logits.device)
    beyond_k = (top_k > 0)[:, None] & (rank >= top_k[:, None])
    shares = ranked.masked_fill(beyond_k, float("-inf")).softmax(dim=1)
    before = shares.cumsum(dim=1, dtype=torch.float64) - shares
    # The token at which the sum reaches p is the last one kept.
    beyond_p = (top_p < 1)[:, None] & (before >= top_p[:, None]) & (rank > 0)
    dropped = torch.zeros_like(beyond_k).scatter(1, order, beyond_k | beyond_p)
    return logits.masked_fill(dropped | (scaled == float("-inf")), float("-inf"))


class TorchBackend:
    """SamplingBackend in torch and numpy; draws in float64, row by row."""

    def best(self, logits: torch.Tensor, changes: Sequence[RowChange] = ()) -> Best:
        largest: npt.NDArray[np.float32] = logits.amax(dim=1).float().numpy()
        best = Best(largest, logits.argmax(dim=1).numpy())
        for change in changes:
            changed = logits[change.row : change.row + 1].float().clone()
            edit_logits(changed, [(0, change.edits)])
            changed[0, list(change.suppressed)] = float(NEVER)
            best.token_ids[change.row] = changed.argmax()
        return best

    def edit(self, logits: torch.Tensor, edits: EditsByRow) -> None:
        edit_logits(logits, edits)

    def filter(self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams) -> None:
        index = torch.from_numpy(rows)
        columns = [params["temperature"].copy(), *torch_columns(params, FILTERS)]
        logits[index] = filter_logits(logits[index], *map(torch.from_numpy, columns))

    def draw(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams
    ) -> npt.NDArray[np.int64]:
        tokens = np.empty(len(rows), dtype=np.int64)
        for index, (row, record) in enumerate(zip(rows, params, strict=True)):
            scaled = logits[row].numpy().astype(np.float64) / np.float64(record["temperature"])
            key = int(record["seed"]), int(record["choice"]), int(record["position"])
            tokens[index] = np.argmax(scaled + gumbel_noise(*key, len(scaled)))
        return tokens
