"""The Triton kernels of adapters: A x of some rows, and B (A x) added to the product.

Triton reads annotations and accepts only its own.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["entry", "num_rows"])
def reduce_block(  # type: ignore[no-untyped-def]
    x,
    rows,
    slots,
    firsts,
    ends,
    table,
    numbers,
    reduced,
    x_stride,
    table_stride,
    number_stride,
    entry,
    num_rows,
    width,
    inputs,
    block_rows: tl.constexpr,
    block_ranks: tl.constexpr,
    block_inputs: tl.constexpr,
    split_inputs: tl.constexpr,
    tiles: tl.constexpr,
):
    """Write the sums of a part of the inputs, for a block of rows and a tile of ranks.

    Grid: (blocks, splits, weights * tiles). x: [T, inputs], its rows x_stride apart. rows, slots,
    firsts, ends: as in StepRows. table, numbers: of all slots, which begin table_stride and
    number_stride apart. entry: of the product's first weight in the table. reduced: float32
    [splits, num_rows, width]; width: tiles * block_ranks for each weight. Nothing is written
    beyond the rank of a weight.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    weight = tl.program_id(2) // tiles
    first_rank = tl.program_id(2) % tiles * block_ranks
    first = tl.load(firsts + block)
    end = tl.load(ends + block)
    if first < end:
        slot = tl.load(slots + block).to(tl.int64)
        fields = table + slot * table_stride + 3 * (entry + weight)
        if first_rank < tl.load(fields):
            down = numbers + slot * number_stride + tl.multiple_of(tl.load(fields + 1), 16)
            place = first + tl.arange(0, block_rows)
            is_row = place < end
            row = tl.load(rows + place, mask=is_row, other=0).to(tl.int64)
            rank = first_rank + tl.arange(0, block_ranks)
            offset = tl.arange(0, block_inputs)
            x_begin = x + row[:, None] * x_stride
            begin = down + rank[None, :] * inputs
            total = tl.zeros((block_rows, block_ranks), dtype=tl.float32)
            for start in range(0, split_inputs, block_inputs):
                column = split * split_inputs + start + offset
                inside = column < inputs
                left = tl.load(
                    x_begin + column[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
                )
                right = tl.load(begin + column[:, None], mask=inside[:, None], other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
            to = (split * num_rows + place).to(tl.int64)[:, None] * width
            to += weight * tiles * block_ranks + rank[None, :]
            tl.store(reduced + to, total, mask=is_row[:, None])


@triton.jit(do_not_specialize=["entry", "factor_field", "num_rows", "splits"])
def expand_block(  # type: ignore[no-untyped-def]
    reduced,
    rows,
    scales,
    slots,
    firsts,
    ends,
    table,
    factors,
    numbers,
    tiles,
    product,
    y,
    product_stride,
    y_stride,
    table_stride,
    factor_stride,
    number_stride,
    entry,
    factor_field,
    num_rows,
    width,
    weight_width,
    splits,
    outputs,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_ranks: tl.constexpr,
):
    """Add what the adapters change to a tile [block_rows, block_outputs] of y.

    Grid: (blocks, tiles). tiles: int32 [tiles, 4], the weight of each, its first output, and the
    outputs of the weight. product: what an adapter's factors multiply; may be y. factor_field: of
    the product in the table. weight_width: columns of `reduced` for a weight. Others: as in
    reduce_block. A row keeps its bits if its adapter changes nothing of the tile.
    """
    block = tl.program_id(0)
    tile = tiles + 4 * tl.program_id(1)
    first = tl.load(firsts + block)
    end = tl.load(ends + block)
    if first < end:
        slot = tl.load(slots + block).to(tl.int64)
        weight = tl.load(tile)
        first_output = tl.load(tile + 2)
        end_output = tl.load(tile + 3)
        begin = table + slot * table_stride
        fields = begin + 3 * (entry + weight)
        rank = tl.load(fields)
        factor = tl.load(begin + factor_field)
        if rank + factor > 0:
            place = first + tl.arange(0, block_rows)
            is_row = place < end
            row = tl.load(rows + place, mask=is_row, other=0).to(tl.int64)
            scale = tl.load(scales + place, mask=is_row, other=0.0)
            column = tl.load(tile + 1) + tl.arange(0, block_outputs)
            is_column = column < end_output
            inside = is_row[:, None] & is_column[None, :]
            up = numbers + slot * number_stride + tl.multiple_of(tl.load(fields + 2), 16)
            up += (column - first_output)[None, :]
            lane = tl.arange(0, block_ranks)
            total = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
            for start in range(0, rank, block_ranks):
                left = tl.zeros((block_rows, block_ranks), dtype=tl.float32)
                for split in range(0, splits):
                    there = (split * num_rows + place).to(tl.int64)[:, None] * width
                    there += weight * weight_width + start + lane[None, :]
                    left += tl.load(reduced + there, mask=is_row[:, None], other=0.0)
                right = tl.load(
                    up + (start + lane)[:, None] * (end_output - first_output),
                    mask=is_column[None, :],
                    other=0.0,
                )
                total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
            if factor > 0:
                at = factors + slot * factor_stride + factor + column
                gain = tl.load(at, mask=is_column, other=0.0)
                shift = tl.load(at + outputs, mask=is_column, other=0.0)
                from_product = product + row[:, None] * product_stride + column[None, :]
                own = tl.load(from_product, mask=inside, other=0.0).to(tl.float32)
                total += own * gain[None, :] + shift[None, :]
            to = y + row[:, None] * y_stride + column[None, :]
            after = tl.load(to, mask=inside, other=0.0).to(tl.float32) + total * scale[:, None]
            tl.store(to, after.to(y.dtype.element_ty), mask=inside)
