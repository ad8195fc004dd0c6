"""Which tokens min-p, top-k and top-p keep, found by Triton kernels without sorting.

Tokens are ranked by logit / temperature, ties by lower id. Each filter keeps a prefix of the order,
so the result for a row is a cut: the last token kept.

    range      best and worst logit of each chunk of a row
    bins       how many tokens, and how much probability, lie within 1, 2, … 16 steps of the best
    collect    the tokens of the bins in which top-k and top-p end: the candidates
    search     the cut among the candidates of a row, by bisection over the bits of a float

    best        step                                                          worst
     |    bin 0   |    bin 1   |    bin 2   |  …                     | bin 15  |
     kept, counted in bins      ^candidates^   dropped, counted in bins

Rows are split over programs in chunks that depend on the vocabulary alone, and a row reads nothing
of another one, so that its cut is the same in every batch.
"""

from dataclasses import dataclass
from typing import Final

import torch

from worker.sampling.token_order import ordered_bits

BINS: Final = 16
"""Bins of equal width, but for the last one, which has all the tokens that are farther away."""
WIDEST: Final = 32.0
"""Distance to the best logit that the bins divide, at most; e^−32 of its probability is nothing."""
UNIT: Final = float(1 << 40)
"""Weights, e^(logit − best logit), are summed as multiples of 2^−40."""
_CHUNK: Final = 4096
_CANDIDATES: Final = 2048
"""Candidates that a program of `search` examines at a time."""
_SEARCH_WARPS: Final = 8


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Filters of F of the N rows of a step, on one device or on the host.

    needs_search: whether a row has a top-k or a top-p. rows: int64 [F], the row of the logits of
    each filter. filter_of_row: int64 [N], the reverse: the index in `rows` of each row of the
    logits, or −1. top_k: int64 [F], below V; 0 keeps all. top_p: float64 [F], 1 keeps all. min_p:
    float64 [F], 0 keeps all.
    """

    needs_search: bool
    rows: torch.Tensor
    filter_of_row: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class TritonFilters:
    """Finds the cuts of rows with filters; the kernels are only queued.

    The filters keep what tests/worker/reference/filters.py defines: of equal tokens those with the
    lowest ids; always the best token. Min-p and top-k are exact. Top-p is exact up to the rounding
    of probabilities: where the sum of the kept tokens comes within about 1e-6 of p, the cut may be
    a token before or after that of the host, or as many tokens as are needed for a difference of
    1e-6. It differs by nothing from one step to the next: sums over chunks and candidates are of
    integers, whose order does not matter, and those within a chunk always have the same order.

    A NaN is not counted, −inf is never kept, and a row with +inf has any cut.
    """

    def cuts(
        self, logits: torch.Tensor, temperature: torch.Tensor, filters: RowFilters
    ) -> torch.Tensor:
        """Return the last token kept of each row with filters: int32 [F, 2], order key and id.

        A row keeps the tokens with a larger key, see `ordered_bits` of token_order.py, and those
        with this key up to this id. logits: float32 [N, V], contiguous. temperature: float32 [N],
        above 0 in the rows with filters.
        """
        from worker.cuda.kernels.sampling import bins_chunk, collect_chunk, range_chunk, search_row

        vocab_size = logits.shape[1]
        num_filters, num_chunks = len(filters.rows), -(-vocab_size // _CHUNK)
        padded_chunks = 1 << (num_chunks - 1).bit_length()
        ranges = logits.new_empty((num_filters, 2, num_chunks))
        sums = logits.new_empty((num_filters, 3, BINS), dtype=torch.int64)
        cuts = logits.new_empty((num_filters, 2), dtype=torch.int32)
        candidates = logits.new_empty(
            (2, num_filters, vocab_size if filters.needs_search else 0), dtype=torch.int32
        )
        rows = (logits, temperature, filters.rows)
        settings = (filters.top_k, filters.top_p, filters.min_p)
        grid = num_filters, num_chunks
        range_chunk[grid](*rows, ranges, sums, vocab_size, num_chunks, bins=BINS, chunk_size=_CHUNK)
        if filters.needs_search:
            bins_chunk[grid](
                *rows,
                *settings,
                ranges,
                sums,
                vocab_size,
                num_chunks,
                padded_chunks=padded_chunks,
                bins=BINS,
                widest=WIDEST,
                unit=UNIT,
                chunk_size=_CHUNK,
            )
            collect_chunk[grid](
                *rows,
                *settings,
                ranges,
                sums,
                *candidates,
                vocab_size,
                num_chunks,
                padded_chunks=padded_chunks,
                bins=BINS,
                widest=WIDEST,
                chunk_size=_CHUNK,
            )
        search_row[(num_filters,)](
            *settings,
            ranges,
            sums,
            *candidates,
            cuts,
            vocab_size,
            num_chunks,
            padded_chunks=padded_chunks,
            bins=BINS,
            unit=UNIT,
            block_size=_CANDIDATES,
            num_warps=_SEARCH_WARPS,
        )
        return cuts


def mask_dropped(
    logits: torch.Tensor, temperature: torch.Tensor, filters: RowFilters, cuts: torch.Tensor
) -> None:
    """Set logits that filters drop to −inf; parameters and cuts as in `TritonFilters.cuts`."""
    some = logits.index_select(0, filters.rows)
    keys = ordered_bits(some / temperature.index_select(0, filters.rows)[:, None])
    last_key, last_id = cuts[:, :1], cuts[:, 1:]
    ids = torch.arange(logits.shape[1], device=logits.device)
    dropped = (keys < last_key) | ((keys == last_key) & (ids > last_id))
    logits.index_copy_(0, filters.rows, some.masked_fill(dropped, float("-inf")))
