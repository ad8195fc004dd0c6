"""The device kernels in plain torch; the Triton kernels are tested against them."""

import torch

from worker.cuda.attention.kv_store import Pages
from worker.cuda.sampling.device_filters import RowFilters
from worker.cuda.sampling.device_kernels import ANY_TOKEN, NONE, SEEN, ListedEdits, RowEditArrays
from worker.reference.sampling import ROUNDS, STREAM_SAMPLE, filter_logits
from worker.sampling.logit_edits import WORD_BITS

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def store_by_index(
    slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pages: tuple[Pages, Pages]
) -> None:
    """`TritonStore` in plain torch; padding goes to slot 0 of the null block, which is not read."""
    places = slots.clamp_min(0)
    for part, tokens in zip(pages, (key, value), strict=True):
        part.write(places, tokens)


class TorchEdits:
    """`TritonEdits` in plain torch."""

    def add_listed(self, logits: torch.Tensor, listed: ListedEdits, last: torch.Tensor) -> None:
        applies = (listed.needed == ANY_TOKEN) | (
            listed.needed == last.index_select(0, listed.source)
        )
        logits.view(-1).index_add_(0, listed.index, torch.where(applies, listed.value, 0.0))

    def edit_rows(self, logits: torch.Tensor, edits: RowEditArrays, counts: torch.Tensor) -> None:
        some = logits.index_select(0, edits.rows)
        if len(counts):
            entries = counts.index_select(0, edits.slots.clamp(min=0))
            entries = entries * (edits.slots != NONE)[:, None]
            output_counts = (entries & (SEEN - 1)).float()
            repetition, frequency, presence = edits.rules[:, :, None].unbind(1)
            scaled = torch.where(some > 0, some / repetition, some * repetition)
            changed = scaled - frequency * output_counts - presence * (output_counts > 0)
            some = torch.where(entries != 0, changed, some)
        if len(edits.words):
            words = edits.words.index_select(0, edits.masks.clamp(min=0))
            bits = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
            allowed = (words[:, :, None] >> bits) & 1
            allowed = allowed.reshape(len(words), -1)[:, : logits.shape[1]] != 0
            some = some.masked_fill(~(allowed | (edits.masks == NONE)[:, None]), float("-inf"))
        logits.index_copy_(0, edits.rows, some)


def draw_by_torch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    filters: RowFilters | None = None,
    masks_dropped: bool = False,
) -> torch.Tensor:
    """`TritonDraw` in plain torch."""
    if filters is not None:
        some = logits.index_select(0, filters.rows)
        settings = filters.top_k, filters.top_p, filters.min_p
        kept = filter_logits(some, temperature.index_select(0, filters.rows), *settings)
        if masks_dropped:
            logits.index_copy_(0, filters.rows, kept)
        logits = logits.index_copy(0, filters.rows, kept)
    words = _words(logits.shape[1], seed, choice, position)
    noise = -torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))
    random = (temperature > 0)[:, None]
    divisor = torch.where(random, temperature.double()[:, None], 1.0)
    sums = logits.double() / divisor + torch.where(random, noise, 0.0)
    return sums.argmax(dim=1)


def _words(
    num_tokens: int, seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Return the random word of every token (worker/reference/sampling.py), int64 [N, tokens]."""
    num_counters = -(-num_tokens // 4)
    c0 = torch.arange(num_counters, device=seed.device)[None, :] + torch.zeros_like(seed)[:, None]
    c1 = (position & _LOW)[:, None] + torch.zeros_like(c0)
    c2 = (choice & _LOW)[:, None] + torch.zeros_like(c0)
    c3 = torch.full_like(c0, STREAM_SAMPLE)
    keys = [(seed & _LOW)[:, None], ((seed >> 32) & _LOW)[:, None]]
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(_MULTIPLIERS[0], c0), _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ keys[0], low1, high0 ^ c3 ^ keys[1], low0
        keys = [(key + weyl) & _LOW for key, weyl in zip(keys, _WEYL, strict=True)]
    return torch.stack((c0, c1, c2, c3), dim=2).reshape(len(seed), -1)[:, :num_tokens]


def _product(multiplier: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of 32-bit products; halves of a word keep each sum below 2^63."""
    low = multiplier * (words & 0xFFFF)
    high = multiplier * (words >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
