"""The Triton kernels that find which tokens min-p, top-k and top-p keep, without sorting.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from worker.sampling.torch_backend import ordered_bits

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

    searches: whether a row has a top-k or a top-p. rows: int64 [F], the row of the logits that each
    filter belongs to. filter_of_row: int64 [N], the reverse: the index in `rows` of each row of the
    logits, or −1. top_k: int64 [F], below V; 0 keeps all. top_p: float64 [F], 1 keeps all. min_p:
    float64 [F], 0 keeps all.
    """

    searches: bool
    rows: torch.Tensor
    filter_of_row: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class TritonFilters:
    """Finds the cuts of rows with filters; the kernels are only queued.

    The filters keep what tests/worker/reference/filters.py defines: min-p, top-k, top-p, each
    applied to the result of the one before; of equal tokens those with the lowest ids; always the
    best token. Min-p and top-k are exact. Top-p is exact up to the rounding of probabilities: where
    the sum of the kept tokens comes within about 1e-6 of p, the cut may be a token before or behind
    that of the host, or as many tokens as are needed for a difference of 1e-6. It differs by
    nothing from one step to the next: sums over chunks and candidates are of integers, whose order
    does not matter, and those within a chunk always have the same order.

    A NaN is not counted, −inf is never kept, and a row with +inf has any cut.
    """

    def __init__(self) -> None:
        self.range_kernel, self.bins_kernel, self.collect_kernel, self.search_kernel = _kernels()

    def cuts(
        self, logits: torch.Tensor, temperature: torch.Tensor, filters: RowFilters
    ) -> torch.Tensor:
        """Return the last token kept of each row with filters: int32 [F, 2], order key and id.

        A row keeps the tokens with a larger key, see `ordered_bits` of torch_backend.py, and those
        with this key up to this id. logits: float32 [N, V], contiguous. temperature: float32 [N],
        above 0 in the rows with filters.
        """
        vocab_size = logits.shape[1]
        num_filters, num_chunks = len(filters.rows), -(-vocab_size // _CHUNK)
        padded_chunks = 1 << (num_chunks - 1).bit_length()
        ranges = logits.new_empty((num_filters, 2, num_chunks))
        sums = logits.new_empty((num_filters, 3, BINS), dtype=torch.int64)
        cuts = logits.new_empty((num_filters, 2), dtype=torch.int32)
        candidates = logits.new_empty(
            (2, num_filters, vocab_size if filters.searches else 0), dtype=torch.int32
        )
        rows = (logits, temperature, filters.rows)
        settings = (filters.top_k, filters.top_p, filters.min_p)
        grid = num_filters, num_chunks
        self.range_kernel[grid](
            *rows, ranges, sums, vocab_size, num_chunks, bins=BINS, chunk_size=_CHUNK
        )
        if filters.searches:
            self.bins_kernel[grid](
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
            self.collect_kernel[grid](
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
        self.search_kernel[(num_filters,)](
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


def order_function() -> Any:
    """Return a Triton function, float32 → int32, that keeps the order; −0 and +0 become equal."""
    import triton
    import triton.language as tl

    def order_key(value):  # type: ignore[no-untyped-def]
        bits = (value + 0.0).to(tl.int32, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    return triton.jit(order_key)


def publish(module: dict[str, Any], *functions: Any) -> None:
    """Name the functions that kernels call in their module.

    Triton's interpreter looks for them only there; its compiler finds them in the closures.
    """
    for function in functions:
        module[function.__name__] = function


def _kernels() -> tuple[Any, Any, Any, Any]:
    """Return the Triton kernels range, bins, collect and search, which run in this order.

    A program handles one filter, or one chunk of its row. Arrays that only the kernels use, F
    filters:

        ranges      float32 [F, 2, chunks]   best and worst scaled logit of each chunk
        sums        int64 [F, 3, bins]       [f, 0, b]: tokens of bins 0 to b
                                             [f, 1, b]: their weights, in multiples of 1 / unit
                                             [f, 2, 0]: number of candidates; the others are unused
        keys, ids   int32 [F, V]             candidates, in any order

    A scaled logit is logit / temperature, and a key its ordered bits. Bins count no token that
    min-p drops, nor −inf. Of `sums`, only what the filter of a row needs is written: tokens if it
    has a top-k, weights if it has a top-p; the rest is 0.
    """
    import triton
    import triton.language as tl

    jit: Callable[[Any], Any] = triton.jit
    order_key = order_function()

    # Triton reads annotations and accepts only its own.
    @jit
    def scaled_chunk(logits, temperatures, rows, vocab_size, chunk_size: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the ids of the tokens of this program's chunk, and their scaled logits.

        A scaled logit is −inf behind the end of the row.
        """
        row = tl.load(rows + tl.program_id(0))
        token = tl.program_id(1) * chunk_size + tl.arange(0, chunk_size)
        inside = token < vocab_size
        logit = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
        return token, tl.div_rn(logit.to(tl.float32), tl.load(temperatures + row))

    @jit
    def best_and_worst(ranges, num_chunks, padded_chunks: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the best scaled logit of this program's row, and the worst above −inf."""
        chunk_index = tl.arange(0, padded_chunks)
        start = ranges + tl.program_id(0) * 2 * num_chunks
        inside = chunk_index < num_chunks
        best = tl.load(start + chunk_index, mask=inside, other=float("-inf"))
        worst = tl.load(start + num_chunks + chunk_index, mask=inside, other=float("inf"))
        return tl.max(best, 0), tl.min(worst, 0)

    @jit
    def least_key(best, min_p):  # type: ignore[no-untyped-def]
        """Return the key of the smallest float that min-p keeps."""
        log = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
        limit = best.to(tl.float64) + log
        rounded = limit.to(tl.float32)
        return order_key(rounded) + (rounded.to(tl.float64) < limit).to(tl.int32)

    @jit
    def weight_of(key, chosen, best, unit: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return e^(logit − best) in multiples of 1 / unit, int64; 0 for those not chosen."""
        logit = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
        distance = tl.where(chosen, logit - best, float("-inf"))
        return (tl.exp(distance) * unit + 0.5).to(tl.int64)

    @jit
    def least_sum(total, top_p):  # type: ignore[no-untyped-def]
        """Return the smallest sum of weights that reaches the share top_p of a total."""
        return tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)

    @jit
    def candidate_bins(sums, top_k, top_p, bins: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return which bins have the candidates of this program's row, and what is before them.

        Six scalars: the first and the last bin of candidates; the tokens and the weights of the
        bins before the first; the weights of the bins that top-k keeps whole; whether top-k drops
        tokens. Top-k ends in the last bin. What it keeps of this bin is not known yet, hence the
        bin in which top-p ends is one of the first to the last.
        """
        bin_index = tl.arange(0, bins)
        start = sums + tl.program_id(0) * 3 * bins
        counts, weights = tl.load(start + bin_index), tl.load(start + bins + bin_index)
        limited = (top_k > 0) & (tl.max(counts, 0) > top_k)
        end_of_k = tl.where(limited, tl.sum((counts < top_k).to(tl.int32), 0), bins)
        certain = tl.max(tl.where(bin_index < end_of_k, weights, 0), 0)
        end_of_p = tl.sum((weights < least_sum(certain, top_p)).to(tl.int32), 0)
        first = tl.minimum(tl.where(top_p < 1, end_of_p, end_of_k), bins - 1)
        last = tl.where(limited, end_of_k, first)
        num_before = tl.max(tl.where(bin_index < first, counts, 0), 0)
        weight_before = tl.max(tl.where(bin_index < first, weights, 0), 0)
        return first, last, num_before, weight_before, certain, limited

    @jit
    def range_chunk(  # type: ignore[no-untyped-def]
        logits,
        temperatures,
        rows,
        ranges,
        sums,
        vocab_size,
        num_chunks,
        bins: tl.constexpr,
        chunk_size: tl.constexpr,
    ):
        """Write the best and worst scaled logit above −inf of a chunk to `ranges`.

        Grid: (filters, chunks). The program of the first chunk also sets the sums of its filter to
        zero, because the next kernels add to them. logits: float32 [N, V]. temperatures: float32
        [N]. rows: int64 [F], of the logits.
        """
        filter_index, chunk_index = tl.program_id(0), tl.program_id(1)
        _, scaled = scaled_chunk(logits, temperatures, rows, vocab_size, chunk_size)
        counted = scaled > float("-inf")
        start = ranges + filter_index * 2 * num_chunks + chunk_index
        tl.store(start, tl.max(tl.where(counted, scaled, float("-inf")), 0))
        tl.store(start + num_chunks, tl.min(tl.where(counted, scaled, float("inf")), 0))
        # The length of a range is a power of two, so it is the next one above 3 bins.
        entry = tl.arange(0, 4 * bins)
        zeros = tl.zeros_like(entry).to(tl.int64)
        tl.store(
            sums + filter_index * 3 * bins + entry,
            zeros,
            mask=entry < tl.where(chunk_index == 0, 3 * bins, 0),
        )

    @jit
    def bins_chunk(  # type: ignore[no-untyped-def]
        logits,
        temperatures,
        rows,
        top_ks,
        top_ps,
        min_ps,
        ranges,
        sums,
        vocab_size,
        num_chunks,
        padded_chunks: tl.constexpr,
        bins: tl.constexpr,
        widest: tl.constexpr,
        unit: tl.constexpr,
        chunk_size: tl.constexpr,
    ):
        """Add the tokens and weights of a chunk, up to the end of each bin, to `sums`.

        Grid: (filters, chunks). A bin is as wide as a share 1 / bins of the distance from the best
        to the worst scaled logit, or of `widest`, whichever is smaller. logits, temperatures, rows:
        as in range_chunk. top_ks: int64 [F]. top_ps, min_ps: float64 [F]. padded_chunks: num_chunks
        or the next power of two above.
        """
        filter_index = tl.program_id(0)
        top_k, top_p = tl.load(top_ks + filter_index), tl.load(top_ps + filter_index)
        if (top_k > 0) | (top_p < 1):
            best, worst = best_and_worst(ranges, num_chunks, padded_chunks)
            _, scaled = scaled_chunk(logits, temperatures, rows, vocab_size, chunk_size)
            least = least_key(best, tl.load(min_ps + filter_index))
            counted = (scaled > float("-inf")) & (order_key(scaled) >= least)
            distance = tl.where(counted, best - scaled, float("inf"))
            step = tl.minimum(best - worst, widest) / bins
            counts = sums + filter_index * 3 * bins
            weights = counts + bins
            if top_k > 0:
                for bin_index in tl.static_range(bins - 1):
                    count = tl.sum((distance < step * (bin_index + 1)).to(tl.int32), 0)
                    tl.atomic_add(counts + bin_index, count.to(tl.int64), sem="relaxed")
                count = tl.sum(counted.to(tl.int32), 0)
                tl.atomic_add(counts + bins - 1, count.to(tl.int64), sem="relaxed")
            if top_p < 1:
                weight = tl.exp(-distance)
                for bin_index in tl.static_range(bins - 1):
                    total = tl.sum(tl.where(distance < step * (bin_index + 1), weight, 0.0), 0)
                    tl.atomic_add(weights + bin_index, (total * unit).to(tl.int64), sem="relaxed")
                total = tl.sum(weight, 0)
                tl.atomic_add(weights + bins - 1, (total * unit).to(tl.int64), sem="relaxed")

    @jit
    def collect_chunk(  # type: ignore[no-untyped-def]
        logits,
        temperatures,
        rows,
        top_ks,
        top_ps,
        min_ps,
        ranges,
        sums,
        keys,
        ids,
        vocab_size,
        num_chunks,
        padded_chunks: tl.constexpr,
        bins: tl.constexpr,
        widest: tl.constexpr,
        chunk_size: tl.constexpr,
    ):
        """Append the candidates of a chunk to `keys` and `ids`, and their number to `sums`.

        Grid: (filters, chunks). Arguments are those of bins_chunk. Chunks are appended in any
        order, which the search does not depend on.
        """
        filter_index = tl.program_id(0)
        top_k, top_p = tl.load(top_ks + filter_index), tl.load(top_ps + filter_index)
        first, last, _, _, _, limited = candidate_bins(sums, top_k, top_p, bins)
        if limited | (top_p < 1):
            best, worst = best_and_worst(ranges, num_chunks, padded_chunks)
            token, scaled = scaled_chunk(logits, temperatures, rows, vocab_size, chunk_size)
            key = order_key(scaled)
            least = least_key(best, tl.load(min_ps + filter_index))
            counted = (scaled > float("-inf")) & (key >= least)
            distance = best - scaled
            step = tl.minimum(best - worst, widest) / bins
            # The same comparisons as in bins_chunk: a token is in one bin only.
            near = tl.where(first == 0, -1.0, step * first)
            far = tl.where(last == bins - 1, float("inf"), step * (last + 1))
            chosen = counted & (distance >= near) & (distance < far)
            count = tl.sum(chosen.to(tl.int32), 0)
            if count > 0:
                num_candidates = sums + filter_index * 3 * bins + 2 * bins
                first_slot = tl.atomic_add(num_candidates, count.to(tl.int64), sem="relaxed")
                slot = filter_index.to(tl.int64) * vocab_size + first_slot - 1
                slot += tl.cumsum(chosen.to(tl.int32), 0)
                tl.store(keys + slot, key, mask=chosen)
                tl.store(ids + slot, token, mask=chosen)

    # The functions below examine the candidates of one row, `block_size` at a time. keys, ids:
    # int32 [size]. A `key` is int64 where it is bisected, so that the sum of two has room.

    @jit
    def count_from(keys, size, least, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the number of candidates with at least this key, int32."""
        count = tl.full((), 0, tl.int32)
        for start in range(0, size, block_size):
            slot = start + tl.arange(0, block_size)
            key = tl.load(keys + slot, mask=slot < size, other=0)
            count += tl.sum(((slot < size) & (key >= least)).to(tl.int32), 0)
        return count

    @jit
    def weight_from(keys, size, least, best, unit: tl.constexpr, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the sum of weights of the candidates with at least this key, int64."""
        total = tl.full((), 0, tl.int64)
        for start in range(0, size, block_size):
            slot = start + tl.arange(0, block_size)
            key = tl.load(keys + slot, mask=slot < size, other=0)
            chosen = (slot < size) & (key >= least)
            total += tl.sum(weight_of(key, chosen, best, unit), 0)
        return total

    @jit
    def key_range(keys, size, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the smallest and the largest key of the candidates, int64."""
        least = tl.full((), (1 << 31) - 1, tl.int64)
        most = tl.full((), -(1 << 31), tl.int64)
        for start in range(0, size, block_size):
            slot = start + tl.arange(0, block_size)
            key = tl.load(keys + slot, mask=slot < size, other=0).to(tl.int64)
            least = tl.minimum(least, tl.min(tl.where(slot < size, key, (1 << 31) - 1), 0))
            most = tl.maximum(most, tl.max(tl.where(slot < size, key, -(1 << 31)), 0))
        return least, most

    @jit
    def count_equal(keys, ids, size, wanted, last_id, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the number of candidates with this key and at most this id, int32."""
        count = tl.full((), 0, tl.int32)
        for start in range(0, size, block_size):
            slot = start + tl.arange(0, block_size)
            key = tl.load(keys + slot, mask=slot < size, other=0)
            token = tl.load(ids + slot, mask=slot < size, other=0)
            chosen = (slot < size) & (key == wanted) & (token <= last_id)
            count += tl.sum(chosen.to(tl.int32), 0)
        return count

    @jit
    def cut_by_count(keys, size, num_kept, least, most, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the key of candidate number `num_kept` from the best, and the ties to keep there.

        The largest key in [least, most] that `num_kept` candidates reach, int64, and how many of
        the candidates with this very key are among the best `num_kept`, int32.
        """
        low, high = least, most
        while low < high:
            middle = (low + high + 1) >> 1
            reached = count_from(keys, size, middle, block_size) >= num_kept
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
        return low, num_kept - count_from(keys, size, low + 1, block_size)

    @jit
    def cut_by_weight(  # type: ignore[no-untyped-def]
        keys,
        size,
        wanted,
        least,
        num_equal,
        most,
        best,
        unit: tl.constexpr,
        block_size: tl.constexpr,
    ):
        """Return the key at which the best candidates weigh `wanted`, and the ties to keep there.

        Only candidates above the key `least`, and `num_equal` of those with this key, may be kept.
        The key is the largest in [least, most] from which on the weights of candidates sum up to
        `wanted`, int64; the ties are the fewest that are needed for that, at least one, int32.
        """
        low, high = least, most
        while low < high:
            middle = (low + high + 1) >> 1
            reached = weight_from(keys, size, middle, best, unit, block_size) >= wanted
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
        num_above = count_from(keys, size, low + 1, block_size)
        all_equal = count_from(keys, size, low, block_size) - num_above
        available = tl.where(low > least, all_equal, num_equal)
        above = weight_from(keys, size, low + 1, best, unit, block_size)
        weight = tl.maximum(weight_of(low.to(tl.int32), True, best, unit), 1)
        needed = (tl.maximum(wanted - above, 1) + weight - 1) // weight
        return low, tl.minimum(needed, available.to(tl.int64)).to(tl.int32)

    @jit
    def cut_ties(keys, ids, size, key, num_kept, last_id, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the last id of the `num_kept` lowest with this key, int32; `last_id` for all."""
        if num_kept < count_equal(keys, ids, size, key, last_id, block_size):
            first_id = tl.full((), 0, tl.int32)
            while first_id < last_id:
                middle = (first_id + last_id) >> 1
                reached = count_equal(keys, ids, size, key, middle, block_size) >= num_kept
                first_id = tl.where(reached, first_id, middle + 1)
                last_id = tl.where(reached, middle, last_id)
        return last_id

    @jit
    def search_row(  # type: ignore[no-untyped-def]
        top_ks,
        top_ps,
        min_ps,
        ranges,
        sums,
        keys,
        ids,
        cuts,
        vocab_size,
        num_chunks,
        padded_chunks: tl.constexpr,
        bins: tl.constexpr,
        unit: tl.constexpr,
        block_size: tl.constexpr,
    ):
        """Write the cut of a row, the key and id of the last token kept, to cuts int32 [F, 2].

        Grid: (filters,). Other arguments are those of bins_chunk and collect_chunk. A row without
        candidates is cut by min-p alone.
        """
        filter_index = tl.program_id(0)
        top_k, top_p = tl.load(top_ks + filter_index), tl.load(top_ps + filter_index)
        best, _ = best_and_worst(ranges, num_chunks, padded_chunks)
        bounds = candidate_bins(sums, top_k, top_p, bins)
        _, _, num_before, weight_before, total, limited = bounds
        last_key = least_key(best, tl.load(min_ps + filter_index))
        last_id = vocab_size - 1
        size = tl.load(sums + filter_index * 3 * bins + 2 * bins).to(tl.int32)
        if size > 0:
            keys += filter_index.to(tl.int64) * vocab_size
            ids += filter_index.to(tl.int64) * vocab_size
            # Candidates above `key` are kept, and the `num_equal` lowest ids with this very key.
            key, most = key_range(keys, size, block_size)
            num_equal = size - count_from(keys, size, key + 1, block_size)
            if limited:
                num_kept = (top_k - num_before).to(tl.int32)
                key, num_equal = cut_by_count(keys, size, num_kept, key, most, block_size)
            if top_p < 1:
                if limited:
                    above = weight_from(keys, size, key + 1, best, unit, block_size)
                    equal = weight_of(key.to(tl.int32), True, best, unit) * num_equal
                    total = weight_before + above + equal
                wanted = least_sum(total, top_p) - weight_before
                key, num_equal = cut_by_weight(
                    keys, size, wanted, key, num_equal, most, best, unit, block_size
                )
            last_key = key.to(tl.int32)
            last_id = cut_ties(keys, ids, size, last_key, num_equal, last_id, block_size)
        tl.store(cuts + 2 * filter_index, last_key)
        tl.store(cuts + 2 * filter_index + 1, last_id)

    publish(globals(), order_key, scaled_chunk, best_and_worst, least_key, weight_of, least_sum)
    publish(globals(), candidate_bins, count_from, weight_from, key_range, count_equal)
    publish(globals(), cut_by_count, cut_by_weight, cut_ties)
    return range_chunk, bins_chunk, collect_chunk, search_row
