"""The Triton kernels of sampling: filters, edits of logits, and the keyed draw.

Those of filters run in this order: range_chunk, bins_chunk, collect_chunk, search_row
(worker/cuda/sampling/device_filters.py). A program handles one filter, or one chunk of its row.
Arrays that only these kernels use, F filters:

    ranges      float32 [F, 2, chunks]   best and worst scaled logit of each chunk
    sums        int64 [F, 3, bins]       [f, 0, b]: tokens of bins 0 to b
                                         [f, 1, b]: their weights, in multiples of 1 / unit
                                         [f, 2, 0]: number of candidates; the others are unused
    keys, ids   int32 [F, V]             candidates, in any order

A scaled logit is logit / temperature, and a key its ordered bits. Bins count no token that min-p
drops, nor −inf. Of `sums`, only what the filter of a row needs is written: tokens if it has a
top-k, weights if it has a top-p; the rest is 0.

Triton reads annotations and accepts only its own.
"""

import triton
import triton.language as tl


@triton.jit
def order_key(value):  # type: ignore[no-untyped-def]
    """Return an int32 in the order of float32 values; −0 and +0 become equal."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def scaled_chunk(logits, temperatures, rows, vocab_size, chunk_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the ids of the tokens of this program's chunk, and their scaled logits.

    A scaled logit is −inf behind the end of the row.
    """
    row = tl.load(rows + tl.program_id(0))
    token = tl.program_id(1) * chunk_size + tl.arange(0, chunk_size)
    inside = token < vocab_size
    logit = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
    return token, tl.div_rn(logit.to(tl.float32), tl.load(temperatures + row))


@triton.jit
def best_and_worst(ranges, num_chunks, padded_chunks: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the best scaled logit of this program's row, and the worst above −inf."""
    chunk_index = tl.arange(0, padded_chunks)
    start = ranges + tl.program_id(0) * 2 * num_chunks
    inside = chunk_index < num_chunks
    best = tl.load(start + chunk_index, mask=inside, other=float("-inf"))
    worst = tl.load(start + num_chunks + chunk_index, mask=inside, other=float("inf"))
    return tl.max(best, 0), tl.min(worst, 0)


@triton.jit
def least_key(best, min_p):  # type: ignore[no-untyped-def]
    """Return the key of the smallest float that min-p keeps."""
    log = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
    limit = best.to(tl.float64) + log
    rounded = limit.to(tl.float32)
    return order_key(rounded) + (rounded.to(tl.float64) < limit).to(tl.int32)


@triton.jit
def weight_of(key, chosen, best, unit: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return e^(logit − best) in multiples of 1 / unit, int64; 0 for those not chosen."""
    logit = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    distance = tl.where(chosen, logit - best, float("-inf"))
    return (tl.exp(distance) * unit + 0.5).to(tl.int64)


@triton.jit
def least_sum(total, top_p):  # type: ignore[no-untyped-def]
    """Return the smallest sum of weights that reaches the share top_p of a total."""
    return tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)


@triton.jit
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


@triton.jit
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


@triton.jit
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


@triton.jit
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


# The functions below examine the candidates of one row, `block_size` at a time. keys, ids: int32
# [size]. A `key` is int64 where it is bisected, so that the sum of two has room.


@triton.jit
def count_from(keys, size, least, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of candidates with at least this key, int32."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, size, block_size):
        slot = start + tl.arange(0, block_size)
        key = tl.load(keys + slot, mask=slot < size, other=0)
        count += tl.sum(((slot < size) & (key >= least)).to(tl.int32), 0)
    return count


@triton.jit
def weight_from(keys, size, least, best, unit: tl.constexpr, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of weights of the candidates with at least this key, int64."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, size, block_size):
        slot = start + tl.arange(0, block_size)
        key = tl.load(keys + slot, mask=slot < size, other=0)
        chosen = (slot < size) & (key >= least)
        total += tl.sum(weight_of(key, chosen, best, unit), 0)
    return total


@triton.jit
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


@triton.jit
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


@triton.jit
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


@triton.jit
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


@triton.jit
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


@triton.jit
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


@triton.jit
def add_listed(  # type: ignore[no-untyped-def]
    logits,
    indices,
    values,
    sources,
    needed,
    last,
    count,
    any_token: tl.constexpr,
    block_size: tl.constexpr,
):
    """Add the values of a block of edits to their logits, unless another token is needed.

    Grid: (blocks,). logits: float32 [N, V]. indices, values, sources, needed: [count], as in
    ListedEdits. last: int64, by row of the batch. Additions are atomic, because a logit may
    have several edits.
    """
    edit_index = tl.program_id(0) * block_size + tl.arange(0, block_size)
    inside = edit_index < count
    wanted = tl.load(needed + edit_index, mask=inside, other=any_token)
    source = tl.load(sources + edit_index, mask=inside, other=0)
    found = tl.load(last + source, mask=inside, other=0)
    applies = inside & ((wanted == any_token) | (wanted == found))
    value = tl.load(values + edit_index, mask=inside, other=0.0)
    target = tl.load(indices + edit_index, mask=inside, other=0)
    tl.atomic_add(logits + target, value, mask=applies)


@triton.jit
def edit_chunk(  # type: ignore[no-untyped-def]
    logits,
    counts,
    words,
    rows,
    slots,
    masks,
    rules,
    vocab_size,
    num_words,
    seen: tl.constexpr,
    chunk_size: tl.constexpr,
):
    """Penalise the logits of a chunk, then write −inf over tokens that the mask rules out.

    Grid: (R, chunks). logits: float32 [N, V]. counts: int32 [S, V]. words: int32 [M,
    num_words]. rows, slots, masks, rules: as in RowEditArrays.
    """
    edit_index, chunk_index = tl.program_id(0), tl.program_id(1)
    token = chunk_index * chunk_size + tl.arange(0, chunk_size)
    inside = token < vocab_size
    zeros = tl.zeros_like(token).to(tl.int64)
    slot, word_row = zeros + tl.load(slots + edit_index), zeros + tl.load(masks + edit_index)
    address = logits + tl.load(rows + edit_index) * vocab_size + token
    logit = tl.load(address, mask=inside, other=0.0)
    entry = tl.load(counts + slot * vocab_size + token, mask=inside & (slot >= 0), other=0)
    num_outputs = (entry & (seen - 1)).to(tl.float32)
    repetition = tl.load(rules + 3 * edit_index)
    frequency = tl.load(rules + 3 * edit_index + 1)
    presence = tl.load(rules + 3 * edit_index + 2)
    scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    changed = scaled - frequency * num_outputs - tl.where(num_outputs > 0, presence, 0.0)
    logit = tl.where(entry != 0, changed, logit)
    word = tl.load(
        words + word_row * num_words + token // 32, mask=inside & (word_row >= 0), other=0
    )
    allowed = (word_row < 0) | (((word >> (token % 32)) & 1) != 0)
    tl.store(address, tl.where(allowed, logit, float("-inf")), mask=inside)


@triton.jit
def sums_of(  # type: ignore[no-untyped-def]
    logit,
    temperature,
    seed,
    choice,
    position,
    sample_stream: tl.constexpr,
    rounds: tl.constexpr,
    counters: tl.constexpr,
):
    """Return logit / temperature plus noise of this program's chunk, float64.

    logit: [4 counters]. At a temperature of 0 the logit itself, without noise.
    """
    counter = tl.program_id(1) * counters + tl.arange(0, counters)
    zeros = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(
        seed,
        counter.to(tl.uint32),
        (zeros + position).to(tl.uint32),
        (zeros + choice).to(tl.uint32),
        (zeros + sample_stream).to(tl.uint32),
        rounds,
    )
    # Tokens 4 c to 4 c + 3 have the words of counter c.
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    random = temperature > 0
    divisor = tl.where(random, temperature, 1.0).to(tl.float64)
    noise = tl.where(random, -tl.log(-tl.log(uniform)), 0.0)
    return logit.to(tl.float64) / divisor + noise


@triton.jit
def draw_chunk(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    seeds,
    choices,
    positions,
    filter_of_row,
    cuts,
    sums,
    tokens,
    vocab_size,
    stride,
    num_chunks,
    filtered: tl.constexpr,
    sample_stream: tl.constexpr,
    rounds: tl.constexpr,
    counters: tl.constexpr,
):
    """Write the best sum of logit / temperature and noise in a chunk, and its token.

    Grid: (N, chunks). logits: float32, rows `stride` apart. temperatures: float32 [N]. seeds,
    choices, positions: int64 [N]. filter_of_row: int64 [N], and cuts: int32 [F, 2], of
    TritonFilters; None if not `filtered`. sums: float64 [N, chunks], −inf if the filter keeps
    nothing of the chunk. tokens: int64 [N, chunks], the lowest of those with the best sum. A
    chunk has 4 tokens for each of its `counters`.
    """
    row, chunk_index = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    token = chunk_index * counters * 4 + tl.arange(0, counters * 4)
    inside = token < vocab_size
    logit = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    most = tl.full((), float("-inf"), tl.float64)
    first = chunk_index * counters * 4
    drawn = True
    if filtered:
        filter_index = tl.load(filter_of_row + row)
        if filter_index >= 0:
            last_key = tl.load(cuts + 2 * filter_index)
            last_id = tl.load(cuts + 2 * filter_index + 1)
            key = order_key(tl.div_rn(logit, temperature))
            kept = (key > last_key) | ((key == last_key) & (token <= last_id))
            logit = tl.where(kept, logit, float("-inf"))
            drawn = tl.max((inside & kept).to(tl.int32), 0) > 0
    if drawn:
        total = sums_of(
            logit,
            temperature,
            tl.load(seeds + row),
            tl.load(choices + row),
            tl.load(positions + row),
            sample_stream,
            rounds,
            counters,
        )
        most = tl.max(total, 0)
        first = tl.min(tl.where(total == most, token, vocab_size - 1), 0)
    tl.store(sums + row * num_chunks + chunk_index, most)
    tl.store(tokens + row * num_chunks + chunk_index, first.to(tl.int64))
