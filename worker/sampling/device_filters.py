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

    searches: whether a row has a top-k or a top-p. rows: int64 [F], of the logits. numbers: int64
    [N], the index in `rows` of each row of the logits, or −1. top_k: int64 [F], below V; 0 keeps
    all. top_p: float64 [F], 1 keeps all. min_p: float64 [F], 0 keeps all.
    """

    searches: bool
    rows: torch.Tensor
    numbers: torch.Tensor
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
        num_rows, num_chunks = len(filters.rows), -(-vocab_size // _CHUNK)
        padded = 1 << (num_chunks - 1).bit_length()
        ranges = logits.new_empty((num_rows, 2, num_chunks))
        sums = logits.new_empty((num_rows, 3, BINS), dtype=torch.int64)
        cuts = logits.new_empty((num_rows, 2), dtype=torch.int32)
        found = logits.new_empty(
            (2, num_rows, vocab_size if filters.searches else 0), dtype=torch.int32
        )
        row = (logits, temperature, filters.rows)
        settings = (filters.top_k, filters.top_p, filters.min_p)
        grid = num_rows, num_chunks
        self.range_kernel[grid](*row, ranges, sums, vocab_size, num_chunks, bins=BINS, chunk=_CHUNK)
        if filters.searches:
            self.bins_kernel[grid](
                *row,
                *settings,
                ranges,
                sums,
                vocab_size,
                num_chunks,
                padded=padded,
                bins=BINS,
                widest=WIDEST,
                unit=UNIT,
                chunk=_CHUNK,
            )
            self.collect_kernel[grid](
                *row,
                *settings,
                ranges,
                sums,
                *found,
                vocab_size,
                num_chunks,
                padded=padded,
                bins=BINS,
                widest=WIDEST,
                chunk=_CHUNK,
            )
        self.search_kernel[(num_rows,)](
            *settings,
            ranges,
            sums,
            *found,
            cuts,
            vocab_size,
            num_chunks,
            padded=padded,
            bins=BINS,
            unit=UNIT,
            block=_CANDIDATES,
            num_warps=_SEARCH_WARPS,
        )
        return cuts


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
    """Return the Triton kernels range, bins, collect and search.

    Keys are ordered bits of logit / temperature. Arrays of F rows: ranges, float32 [F, 2, chunks],
    best and worst logit; sums, int64 [F, 3, bins], tokens and weights up to the end of each bin,
    and the number of candidates; keys and ids of candidates, int32 [F, V].
    """
    import triton
    import triton.language as tl

    jit: Callable[[Any], Any] = triton.jit
    order_key = order_function()

    # Triton reads annotations and accepts only its own.
    @jit
    def scaled_chunk(logits, temperatures, rows, vocab_size, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the ids of this program's chunk and their logits, divided; −inf past the end."""
        row = tl.load(rows + tl.program_id(0))
        token = tl.program_id(1) * chunk + tl.arange(0, chunk)
        inside = token < vocab_size
        logit = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
        return token, tl.div_rn(logit.to(tl.float32), tl.load(temperatures + row))

    @jit
    def best_and_worst(ranges, num_chunks, padded: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the best logit of this program's row, and the worst above −inf."""
        index = tl.arange(0, padded)
        start = ranges + tl.program_id(0) * 2 * num_chunks
        inside = index < num_chunks
        best = tl.load(start + index, mask=inside, other=float("-inf"))
        worst = tl.load(start + num_chunks + index, mask=inside, other=float("inf"))
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
        """Return the first and last bin of candidates, and the tokens and weights before these.

        Top-k ends in the last one. What it keeps of this bin is not known yet, hence the bin in
        which top-p ends is one of the first to the last. The last result is whether top-k drops
        tokens.
        """
        index = tl.arange(0, bins)
        start = sums + tl.program_id(0) * 3 * bins
        counts, weights = tl.load(start + index), tl.load(start + bins + index)
        limited = (top_k > 0) & (tl.max(counts, 0) > top_k)
        at_k = tl.where(limited, tl.sum((counts < top_k).to(tl.int32), 0), bins)
        certain = tl.max(tl.where(index < at_k, weights, 0), 0)
        at_p = tl.sum((weights < least_sum(certain, top_p)).to(tl.int32), 0)
        first = tl.minimum(tl.where(top_p < 1, at_p, at_k), bins - 1)
        last = tl.where(limited, at_k, first)
        num_before = tl.max(tl.where(index < first, counts, 0), 0)
        weight_before = tl.max(tl.where(index < first, weights, 0), 0)
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
        chunk: tl.constexpr,
    ):
        number, index = tl.program_id(0), tl.program_id(1)
        _, scaled = scaled_chunk(logits, temperatures, rows, vocab_size, chunk)
        counted = scaled > float("-inf")
        start = ranges + number * 2 * num_chunks + index
        tl.store(start, tl.max(tl.where(counted, scaled, float("-inf")), 0))
        tl.store(start + num_chunks, tl.min(tl.where(counted, scaled, float("inf")), 0))
        # The next kernels add to the sums.
        entry = tl.arange(0, 4 * bins)
        nothing = tl.zeros_like(entry).to(tl.int64)
        tl.store(
            sums + number * 3 * bins + entry,
            nothing,
            mask=entry < tl.where(index == 0, 3 * bins, 0),
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
        padded: tl.constexpr,
        bins: tl.constexpr,
        widest: tl.constexpr,
        unit: tl.constexpr,
        chunk: tl.constexpr,
    ):
        number = tl.program_id(0)
        top_k, top_p = tl.load(top_ks + number), tl.load(top_ps + number)
        if (top_k > 0) | (top_p < 1):
            best, worst = best_and_worst(ranges, num_chunks, padded)
            _, scaled = scaled_chunk(logits, temperatures, rows, vocab_size, chunk)
            least = least_key(best, tl.load(min_ps + number))
            counted = (scaled > float("-inf")) & (order_key(scaled) >= least)
            distance = tl.where(counted, best - scaled, float("inf"))
            step = tl.minimum(best - worst, widest) / bins
            start = sums + number * 3 * bins
            if top_k > 0:
                for index in tl.static_range(bins - 1):
                    count = tl.sum((distance < step * (index + 1)).to(tl.int32), 0)
                    tl.atomic_add(start + index, count.to(tl.int64), sem="relaxed")
                count = tl.sum(counted.to(tl.int32), 0)
                tl.atomic_add(start + bins - 1, count.to(tl.int64), sem="relaxed")
            if top_p < 1:
                weight = tl.exp(-distance)
                for index in tl.static_range(bins - 1):
                    total = tl.sum(tl.where(distance < step * (index + 1), weight, 0.0), 0)
                    tl.atomic_add(start + bins + index, (total * unit).to(tl.int64), sem="relaxed")
                total = tl.sum(weight, 0)
                tl.atomic_add(start + 2 * bins - 1, (total * unit).to(tl.int64), sem="relaxed")

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
        padded: tl.constexpr,
        bins: tl.constexpr,
        widest: tl.constexpr,
        chunk: tl.constexpr,
    ):
        number = tl.program_id(0)
        top_k, top_p = tl.load(top_ks + number), tl.load(top_ps + number)
        first, last, _, _, _, limited = candidate_bins(sums, top_k, top_p, bins)
        if limited | (top_p < 1):
            best, worst = best_and_worst(ranges, num_chunks, padded)
            token, scaled = scaled_chunk(logits, temperatures, rows, vocab_size, chunk)
            key = order_key(scaled)
            least = least_key(best, tl.load(min_ps + number))
            counted = (scaled > float("-inf")) & (key >= least)
            distance = best - scaled
            step = tl.minimum(best - worst, widest) / bins
            # The same comparisons as above: a token is in one bin only.
            near = tl.where(first == 0, -1.0, step * first)
            far = tl.where(last == bins - 1, float("inf"), step * (last + 1))
            chosen = counted & (distance >= near) & (distance < far)
            count = tl.sum(chosen.to(tl.int32), 0)
            if count > 0:
                counter = sums + number * 3 * bins + 2 * bins
                place = tl.atomic_add(counter, count.to(tl.int64), sem="relaxed")
                at = number.to(tl.int64) * vocab_size + place - 1
                at += tl.cumsum(chosen.to(tl.int32), 0)
                tl.store(keys + at, key, mask=chosen)
                tl.store(ids + at, token, mask=chosen)

    @jit
    def count_from(keys, size, least, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the number of candidates with at least this key."""
        count = tl.full((), 0, tl.int32)
        for start in range(0, size, block):
            at = start + tl.arange(0, block)
            key = tl.load(keys + at, mask=at < size, other=0)
            count += tl.sum(((at < size) & (key >= least)).to(tl.int32), 0)
        return count

    @jit
    def weight_from(keys, size, least, best, unit: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the sum of weights of the candidates with at least this key."""
        total = tl.full((), 0, tl.int64)
        for start in range(0, size, block):
            at = start + tl.arange(0, block)
            key = tl.load(keys + at, mask=at < size, other=0)
            chosen = (at < size) & (key >= least)
            total += tl.sum(weight_of(key, chosen, best, unit), 0)
        return total

    @jit
    def key_range(keys, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the smallest and the largest key of the candidates, int64."""
        least = tl.full((), (1 << 31) - 1, tl.int64)
        most = tl.full((), -(1 << 31), tl.int64)
        for start in range(0, size, block):
            at = start + tl.arange(0, block)
            key = tl.load(keys + at, mask=at < size, other=0).to(tl.int64)
            least = tl.minimum(least, tl.min(tl.where(at < size, key, (1 << 31) - 1), 0))
            most = tl.maximum(most, tl.max(tl.where(at < size, key, -(1 << 31)), 0))
        return least, most

    @jit
    def count_equal(keys, ids, size, wanted, last_id, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the number of candidates with this key and at most this id."""
        count = tl.full((), 0, tl.int32)
        for start in range(0, size, block):
            at = start + tl.arange(0, block)
            key = tl.load(keys + at, mask=at < size, other=0)
            token = tl.load(ids + at, mask=at < size, other=0)
            chosen = (at < size) & (key == wanted) & (token <= last_id)
            count += tl.sum(chosen.to(tl.int32), 0)
        return count

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
        padded: tl.constexpr,
        bins: tl.constexpr,
        unit: tl.constexpr,
        block: tl.constexpr,
    ):
        number = tl.program_id(0)
        top_k, top_p = tl.load(top_ks + number), tl.load(top_ps + number)
        best, _ = best_and_worst(ranges, num_chunks, padded)
        bounds = candidate_bins(sums, top_k, top_p, bins)
        _, _, num_before, weight_before, total, limited = bounds
        last_key = least_key(best, tl.load(min_ps + number))
        last_id = vocab_size - 1
        size = tl.load(sums + number * 3 * bins + 2 * bins).to(tl.int32)
        if size > 0:
            keys += number.to(tl.int64) * vocab_size
            ids += number.to(tl.int64) * vocab_size
            least, most = key_range(keys, size, block)
            # Candidates above `key` are kept, and of those with this very key the `num_equal`
            # lowest ids. Keys are int64 here, so that sums of two have room.
            key = least
            num_equal = size - count_from(keys, size, key + 1, block)
            if limited:
                wanted = (top_k - num_before).to(tl.int32)
                high = most
                while key < high:
                    middle = (key + high + 1) >> 1
                    reached = count_from(keys, size, middle, block) >= wanted
                    key = tl.where(reached, middle, key)
                    high = tl.where(reached, high, middle - 1)
                num_equal = wanted - count_from(keys, size, key + 1, block)
            if top_p < 1:
                if limited:
                    above = weight_from(keys, size, key + 1, best, unit, block)
                    equal = weight_of(key.to(tl.int32), True, best, unit) * num_equal
                    total = weight_before + above + equal
                wanted_weight = least_sum(total, top_p) - weight_before
                low, high = key, most
                while low < high:
                    middle = (low + high + 1) >> 1
                    reached = weight_from(keys, size, middle, best, unit, block) >= wanted_weight
                    low = tl.where(reached, middle, low)
                    high = tl.where(reached, high, middle - 1)
                count_above = count_from(keys, size, low + 1, block)
                all_equal = count_from(keys, size, low, block) - count_above
                num_equal = tl.where(low > key, all_equal, num_equal)
                key = low
                above = weight_from(keys, size, key + 1, best, unit, block)
                weight = tl.maximum(weight_of(key.to(tl.int32), True, best, unit), 1)
                needed = (tl.maximum(wanted_weight - above, 1) + weight - 1) // weight
                num_equal = tl.minimum(needed, num_equal.to(tl.int64)).to(tl.int32)
            last_key = key.to(tl.int32)
            if num_equal < count_equal(keys, ids, size, last_key, last_id, block):
                first_id = tl.full((), 0, tl.int32)
                while first_id < last_id:
                    middle = (first_id + last_id) >> 1
                    reached = count_equal(keys, ids, size, last_key, middle, block) >= num_equal
                    first_id = tl.where(reached, first_id, middle + 1)
                    last_id = tl.where(reached, middle, last_id)
        tl.store(cuts + 2 * number, last_key)
        tl.store(cuts + 2 * number + 1, last_id)

    publish(globals(), order_key, scaled_chunk, best_and_worst, least_key, weight_of, least_sum)
    publish(globals(), candidate_bins, count_from, weight_from, key_range, count_equal)
    return range_chunk, bins_chunk, collect_chunk, search_row
