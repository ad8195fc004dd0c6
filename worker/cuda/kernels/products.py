"""The Triton kernels of products with codes, and of the experts of a mixture.

Triton reads annotations and accepts only its own.
"""

import triton
import triton.language as tl


@triton.jit
def multiply_tile(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    zeros,
    table,
    bias,
    out,
    pair_rows,
    experts,
    firsts,
    ends,
    rows,
    outputs,
    row_bytes,
    groups,
    x_stride,
    out_stride,
    bits: tl.constexpr,
    group: tl.constexpr,
    has_zeros: tl.constexpr,
    has_table: tl.constexpr,
    is_float: tl.constexpr,
    biased: tl.constexpr,
    is_grouped: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_bytes: tl.constexpr,
):
    """Write a tile [block_rows, block_outputs] of x times the numbers of the codes to `out`.

    Grid: (blocks, tiles of outputs). x: [rows, in], its rows x_stride apart. codes: uint8
    [outputs, row_bytes]. scales, zeros: [groups, outputs]. table: float32 [16]. bias:
    [outputs]. out: [rows, outputs], its rows out_stride apart. is_grouped: codes, scales, zeros
    and bias are stacks; block i is of the pairs from firsts[i] to ends[i], of expert
    experts[i]; pair p multiplies row pair_rows[p] of x and is row p of `out`.
    """
    first = tl.program_id(0) * block_rows
    end = rows
    if is_grouped:
        # A block of pairs: nothing is multiplied for one without any.
        first = tl.load(firsts + tl.program_id(0))
        end = tl.load(ends + tl.program_id(0))
    row = first + tl.arange(0, block_rows)
    is_row = row < end
    column = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    is_column = column < outputs
    x_row = row.to(tl.int64)
    end_byte = row_bytes
    if is_grouped:
        x_row = tl.load(pair_rows + row, mask=is_row, other=0)
        expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
        codes += expert * outputs * row_bytes
        scales += expert * groups * outputs
        zeros += expert * groups * outputs
        bias += expert * outputs
        end_byte = tl.where(first < end, row_bytes, 0)
    x_begin = x + x_row[:, None] * x_stride
    begin = codes + column.to(tl.int64)[None, :] * row_bytes
    total = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
    for first_byte in range(0, end_byte, block_bytes):
        byte = first_byte + tl.arange(0, block_bytes)
        inside = byte < row_bytes
        of_tile = inside[:, None] & is_column[None, :]
        stored = tl.load(begin + byte[:, None], mask=of_tile, other=0)
        # The column of x that a byte's code, or its lower one, is multiplied with.
        x_column = byte if bits == 8 else byte // 16 * 32 + byte % 16
        scale_index = (x_column // group)[:, None] * outputs + column[None, :]
        scale = tl.load(scales + scale_index, mask=of_tile, other=0.0).to(tl.float32)
        zero = 1 << (bits - 1)
        if has_zeros:
            zero = tl.load(zeros + scale_index, mask=of_tile, other=0).to(tl.float32)
        for half in tl.static_range(8 // bits):
            code = stored
            if bits == 4:
                code = stored >> 4 if half else stored & 15
            if is_float:
                # E4M3 has the leading bits of a float16 that is 2^-8 of it
                wide = code.to(tl.uint16)
                halves = (wide & 0x80) << 8 | (wide & 0x7F) << 7
                number = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            elif has_table:
                number = tl.load(table + code.to(tl.int32))
            else:
                number = code.to(tl.float32) - zero
            left = tl.load(
                x_begin + x_column[None, :] + 16 * half,
                mask=is_row[:, None] & inside[None, :],
                other=0.0,
            )
            right = (number * scale).to(left.dtype)
            total = tl.dot(left, right, total, input_precision="ieee")
    if biased:
        added = tl.load(bias + column, mask=is_column, other=0.0)
        total += added.to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def multiply_block(  # type: ignore[no-untyped-def]
    x,
    rows,
    experts,
    firsts,
    ends,
    weight,
    bias,
    out,
    x_stride,
    outputs,
    inputs,
    biased: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
):
    """Write a tile [block_rows, block_outputs] of the grouped product to `out`.

    Grid: (blocks, tiles of outputs). x: [T, inputs], its rows x_stride apart. rows: int64
    [pairs]. experts, firsts, ends: int32 [blocks], as in PairBlocks. weight: [experts, outputs,
    inputs]. bias: [experts, outputs]. out: [pairs, outputs].
    """
    block = tl.program_id(0)
    first = tl.load(firsts + block)
    end = tl.load(ends + block)
    if first < end:
        expert = tl.load(experts + block).to(tl.int64)
        pair = first + tl.arange(0, block_rows)
        is_pair = pair < end
        row = tl.load(rows + pair, mask=is_pair, other=0)
        column = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
        is_column = column < outputs
        offset = tl.arange(0, block_inputs)
        x_begin = x + row[:, None] * x_stride + offset[None, :]
        begin = weight + (expert * outputs + column[None, :]) * inputs + offset[:, None]
        total = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
        for start in range(0, inputs, block_inputs):
            inside = offset < inputs - start
            left = tl.load(x_begin + start, mask=is_pair[:, None] & inside[None, :], other=0.0)
            right = tl.load(begin + start, mask=inside[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        if biased:
            added = tl.load(bias + expert * outputs + column, mask=is_column, other=0.0)
            total += added.to(tl.float32)[None, :]
        to = out + pair.to(tl.int64)[:, None] * outputs + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def sort_pairs(  # type: ignore[no-untyped-def]
    chosen,
    rows,
    identity,
    sorted_index,
    experts,
    firsts,
    ends,
    num_pairs,
    top_k,
    first_expert,
    num_experts,
    num_blocks,
    bins: tl.constexpr,
    block_size: tl.constexpr,
    chunk_size: tl.constexpr,
):
    """Write the sorted pairs and the blocks of this program's expert, as in PairBlocks.

    Grid: (num_experts + 1,). chosen: int64 [T, top_k], the experts of all ranks, of which this
    one has num_experts from first_expert on. Counts have a bin for each of these, one for
    other ranks' experts and one for what is behind the last pair; bins: this number, or the
    next power of two above. block_size: pairs of a block. chunk_size: pairs read at a time.
    """
    own = tl.program_id(0)
    bin_index = tl.arange(0, bins)
    counts = tl.zeros((bins,), dtype=tl.int32)
    for first_pair in range(0, num_pairs, chunk_size):
        pair = first_pair + tl.arange(0, chunk_size)
        expert = tl.load(chosen + pair, mask=pair < num_pairs, other=0).to(tl.int32)
        expert -= first_expert
        expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)
        expert = tl.where(pair < num_pairs, expert, num_experts + 1)
        counts += tl.histogram(expert, bins)
    start = tl.sum(tl.where(bin_index < own, counts, 0), axis=0)
    count = tl.sum(tl.where(bin_index == own, counts, 0), axis=0)
    needed = tl.where(bin_index < num_experts, (counts + block_size - 1) // block_size, 0)
    first_block = tl.sum(tl.where(bin_index < own, needed, 0), axis=0)
    next_index = start
    for first_pair in range(0, num_pairs, chunk_size):
        pair = first_pair + tl.arange(0, chunk_size)
        expert = tl.load(chosen + pair, mask=pair < num_pairs, other=0).to(tl.int32)
        expert -= first_expert
        expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)
        is_own = (expert == own) & (pair < num_pairs)
        index = next_index + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(rows + index, (pair // top_k).to(tl.int64), mask=is_own)
        tl.store(identity + index, index.to(tl.int64), mask=is_own)
        tl.store(sorted_index + pair, tl.where(own < num_experts, index, -1), mask=is_own)
        next_index += tl.sum(is_own.to(tl.int32), axis=0)
    if own < num_experts:
        for own_block in range(0, (count + block_size - 1) // block_size):
            block = first_block + own_block
            first = start + own_block * block_size
            tl.store(experts + block, own)
            tl.store(firsts + block, first)
            tl.store(ends + block, tl.minimum(first + block_size, start + count))
    else:
        for first_unused in range(first_block, num_blocks, chunk_size):
            unused = first_unused + tl.arange(0, chunk_size)
            is_block = unused < num_blocks
            tl.store(experts + unused, tl.zeros((chunk_size,), tl.int32), mask=is_block)
            tl.store(firsts + unused, tl.zeros((chunk_size,), tl.int32), mask=is_block)
            tl.store(ends + unused, tl.zeros((chunk_size,), tl.int32), mask=is_block)


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    output,
    weights,
    sorted_index,
    total,
    hidden,
    top_k,
    block_size: tl.constexpr,
):
    """Write the weighted sum of a row's experts to `total`, for a block of columns.

    Grid: (T, blocks of columns). Arrays are those of `TritonExperts._combine`; sorted_index:
    int32 [T, top_k]. Experts of other ranks add nothing.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * block_size + tl.arange(0, block_size)
    is_column = column < hidden
    result = tl.zeros((block_size,), dtype=tl.float32)
    for choice in range(0, top_k):
        pair = row * top_k + choice
        index = tl.load(sorted_index + pair).to(tl.int64) + tl.zeros_like(column)
        weight = tl.load(weights + pair).to(tl.float32)
        found = tl.load(
            output + index.to(tl.int64) * hidden + column,
            mask=is_column & (index >= 0),
            other=0.0,
        )
        result += weight * found
    tl.store(total + row.to(tl.int64) * hidden + column, result, mask=is_column)
