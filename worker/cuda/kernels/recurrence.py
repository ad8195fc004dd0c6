"""The Triton kernels of recurrent layers: convolutions, scans, gates with norms, and slots.

A program of a scan computes the tokens of one sequence one after the other, in float32, with a few
columns of a state in registers. Prompts, decodes and drafts run the same program, so a token has
the same bits however its sequence is cut into steps.

A sequence computes its logged tokens again before those of the step. Its tokens are numbered from
the first of both on:

    number      0 … again - 1 | again … again + count - 1        negative: tokens in the window
    inputs      log           | rows of the step
    `mixed`     tokens + sequence * max_logged + number | the row of the token

Arrays of a step are those of StateStep (worker/cuda/states.py). states: of the layer in slot 0;
slots are slot_stride floats apart. In a slot, at `inputs_at`, are the inputs of the convolution, a
row of `channels` for each token of the window and then of the log, and after these `numbers` of the
gates for each token of the log.

Triton reads annotations and accepts only its own.
"""

import triton
import triton.language as tl


@triton.jit
def begin_sequence(  # type: ignore[no-untyped-def]
    slot_positions,
    slot_stride,
    sources,
    computed,
    again,
    write_start,
    write_slots,
    positions,
):
    """Write how many logged tokens a sequence computes again, and the positions of its slots.

    Grid: (sequences,). slot_positions: int32, of slot 0.
    """
    sequence = tl.program_id(0)
    source = tl.load(sources + sequence).to(tl.int64)
    position = tl.load(slot_positions + source * slot_stride, mask=source >= 0, other=0)
    count = tl.where(source >= 0, tl.load(computed + sequence) - position, 0)
    tl.store(again + sequence, count)
    # One of the slots may be the source.
    tl.debug_barrier()
    for write in range(tl.load(write_start + sequence), tl.load(write_start + sequence + 1)):
        slot = tl.load(write_slots + write).to(tl.int64)
        tl.store(slot_positions + slot * slot_stride, tl.load(positions + write))


@triton.jit
def input_of(  # type: ignore[no-untyped-def]
    number,
    again,
    first,
    old,
    is_old,
    rows,
    row_stride,
    column,
    factor_column,
    channel,
    channels,
    taps: tl.constexpr,
    multiplied: tl.constexpr,
):
    """Return the inputs of a convolution of a token of a sequence, float32.

    first: its first token of the step. old: the inputs in its source, if `is_old`, else zeros.
    column: of the first channel in `rows`; those at factor_column multiply them if `multiplied`.
    """
    is_new = number >= again
    is_row = channel < tl.where(is_new, channels, 0)
    row = rows + (first + number - again).to(tl.int64) * row_stride + channel
    new = tl.load(row + column, mask=is_row, other=0.0).to(tl.float32)
    if multiplied:
        new *= tl.load(row + factor_column, mask=is_row, other=0.0).to(tl.float32)
    logged = old + (number + taps - 1).to(tl.int64) * channels + channel
    is_logged = channel < tl.where(is_new, 0, tl.where(is_old, channels, 0))
    return tl.where(is_new, new, tl.load(logged, mask=is_logged, other=0.0))


@triton.jit(do_not_specialize=["num_tokens"])
def convolve(  # type: ignore[no-untyped-def]
    rows,
    states,
    weights,
    bias,
    mixed,
    query_start,
    sources,
    again,
    owners,
    row_stride,
    slot_stride,
    inputs_at,
    column,
    factor_column,
    gate_column,
    channels,
    num_tokens,
    max_logged,
    taps: tl.constexpr,
    biased: tl.constexpr,
    activated: tl.constexpr,
    multiplied: tl.constexpr,
    block: tl.constexpr,
):
    """Write the causal convolution of tokens to `mixed`, for a block of channels.

    Grid: (tokens + sequences, blocks of channels); (tokens, blocks of channels) for those of the
    step alone. weights: float32 [taps, channels], the oldest token first. With `activated` the
    result is silu(total); else it is multiplied by the columns of `rows` from gate_column on.
    Tokens without a sequence get zeros.
    """
    program = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    is_token = program < num_tokens
    sequence = program - num_tokens
    if is_token:
        sequence = tl.load(owners + program)
    if sequence < 0:
        to = mixed + program.to(tl.int64) * channels + channel
        tl.store(to, tl.zeros((block,), tl.float32).to(mixed.dtype.element_ty), mask=inside)
    else:
        first = tl.load(query_start + sequence)
        count = tl.load(again + sequence)
        source = tl.load(sources + sequence).to(tl.int64)
        old = states + source * slot_stride + inputs_at
        begin = tl.where(is_token, count + program - first, 0)
        for passed in range(0, tl.where(is_token, 1, count)):
            number = begin + passed
            total = tl.zeros((block,), tl.float32)
            for tap in tl.static_range(taps):
                value = input_of(
                    number + tap - (taps - 1),
                    count,
                    first,
                    old,
                    source >= 0,
                    rows,
                    row_stride,
                    column,
                    factor_column,
                    channel,
                    channels,
                    taps,
                    multiplied,
                )
                total += value * tl.load(weights + tap * channels + channel, mask=inside, other=0.0)
            if biased:
                total += tl.load(bias + channel, mask=inside, other=0.0)
            if activated:
                total *= tl.sigmoid(total)
            else:
                gate = rows + program.to(tl.int64) * row_stride + gate_column + channel
                total *= tl.load(gate, mask=inside, other=0.0).to(tl.float32)
            row = tl.where(is_token, program, num_tokens + sequence * max_logged + number)
            to = mixed + row.to(tl.int64) * channels + channel
            tl.store(to, total.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """Return log(1 + exp(x)), with a small relative error also where it is small."""
    power = tl.exp(-tl.abs(x))
    one_more = 1.0 + power
    # log(1 + p) for a p that loses bits in 1 + p (Kahan)
    rest = one_more - 1.0
    is_lost = rest == 0.0
    ratio = power / tl.where(is_lost, 1.0, rest)
    log = tl.where(is_lost, power, tl.log(one_more) * ratio)
    return tl.maximum(x, 0.0) + log


@triton.jit
def gate_of(  # type: ignore[no-untyped-def]
    number, again, first, old, rows, row_stride, index, numbers
):
    """Return a number of the gates of a token, float32. old: those of the log in the source."""
    is_new = number >= again
    row = rows + (first + number - again).to(tl.int64) * row_stride
    new = tl.load(row + index, mask=is_new, other=0.0).to(tl.float32)
    logged = tl.load(old + number * numbers + index, mask=number < again, other=0.0)
    return tl.where(is_new, new, logged)


@triton.jit(do_not_specialize=["num_tokens"])
def scan_mamba2(  # type: ignore[no-untyped-def]
    mixed,
    gates,
    states,
    decays,
    time_bias,
    skip,
    output,
    query_start,
    sources,
    again,
    write_start,
    write_bases,
    write_slots,
    gate_stride,
    slot_stride,
    gates_at,
    heads,
    head_size,
    parts,
    heads_of_group,
    groups,
    channels,
    time_factor,
    num_tokens,
    max_logged,
    state_size: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute the tokens of a sequence in a part of the columns of a head of a Mamba-2 layer.

    Grid: (sequences, heads * parts); the columns of all parts are whole tiles. mixed: float32
    [rows, channels], x ‖ B ‖ C. gates: dt of head 0 of each token. gates_at: of the log in a slot.
    output: float32 [T, heads * head_size], with the skip, before gate and norm.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1) // parts
    part = tl.program_id(1) % parts
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    repeated = tl.load(again + sequence)
    source = tl.load(sources + sequence).to(tl.int64)
    place = tl.arange(0, block_rows)
    column = part * block_columns + tl.arange(0, block_columns)
    is_column = column < head_size
    tile = tl.program_id(1) * block_columns // tile_columns
    element = (tile * state_size + place[:, None]) * tile_columns
    element += (column % tile_columns)[None, :]
    is_read = (place < tl.where(source >= 0, state_size, 0))[:, None]
    state = tl.load(states + source * slot_stride + element, mask=is_read, other=0.0)
    old = states + source * slot_stride + gates_at
    decay = tl.load(decays + head)
    bias = tl.load(time_bias + head)
    factor = tl.load(skip + head)
    inner = heads * head_size
    to_read = inner + head // heads_of_group * state_size + place
    first_write = tl.load(write_start + sequence)
    num_writes = tl.load(write_start + sequence + 1) - first_write
    done = repeated * 0
    for write in range(0, num_writes + 1):
        is_write = write < num_writes
        base = tl.load(write_bases + first_write + write, mask=is_write, other=0) - first
        until = repeated + tl.where(is_write, base, count)
        for number in range(done, until):
            is_new = number >= repeated
            token = first + number - repeated
            row = tl.where(is_new, token, num_tokens + sequence * max_logged + number)
            begin = mixed + row.to(tl.int64) * channels
            x = tl.load(begin + head * head_size + column, mask=is_column, other=0.0)
            into = tl.load(begin + to_read, mask=place < state_size, other=0.0)
            out = tl.load(begin + groups * state_size + to_read, mask=place < state_size, other=0.0)
            time = gate_of(number, repeated, first, old, gates, gate_stride, head, heads)
            time = softplus(time * time_factor + bias)
            state = state * tl.exp(decay * time) + into[:, None] * (x * time)[None, :]
            y = tl.sum(state * out[:, None], 0) + factor * x
            to = output + token.to(tl.int64) * inner + head * head_size + column
            tl.store(to, y, mask=column < tl.where(is_new, head_size, 0))
        done = until
        slot = tl.load(write_slots + first_write + write, mask=is_write, other=0).to(tl.int64)
        is_written = (place < tl.where(is_write, state_size, 0))[:, None]
        tl.store(states + slot * slot_stride + element, state, mask=is_written)


@triton.jit(do_not_specialize=["num_tokens"])
def scan_delta_rule(  # type: ignore[no-untyped-def]
    mixed,
    gates,
    states,
    decays,
    time_bias,
    output,
    query_start,
    sources,
    again,
    write_start,
    write_bases,
    write_slots,
    gate_stride,
    slot_stride,
    gates_at,
    heads,
    value_size,
    parts,
    key_heads,
    channels,
    query_scale,
    num_tokens,
    max_logged,
    tiled: tl.constexpr,
    key_size: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute the tokens of a sequence in a part of the columns of a value head, by the delta rule.

    Grid: (sequences, value heads * parts); the columns of all parts are whole tiles. mixed: float32
    [rows, channels], q ‖ k ‖ v. gates: b ‖ a of each token. gates_at: of the log in a slot.
    query_scale: key_size ** -0.5. output: float32 [T, value heads * value_size], before norm and
    gate.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1) // parts
    part = tl.program_id(1) % parts
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    repeated = tl.load(again + sequence)
    source = tl.load(sources + sequence).to(tl.int64)
    place = tl.arange(0, block_rows)
    is_place = place < key_size
    column = part * block_columns + tl.arange(0, block_columns)
    is_column = column < value_size
    tile = tl.program_id(1) * block_columns // tile_columns
    element = (tile * key_size + place[:, None]) * tile_columns
    element += (column % tile_columns)[None, :]
    is_read = (place < tl.where(source >= 0, key_size, 0))[:, None]
    state = tl.load(states + source * slot_stride + element, mask=is_read, other=0.0)
    old = states + source * slot_stride + gates_at
    decay = tl.load(decays + head)
    bias = tl.load(time_bias + head)
    key_head = head % key_heads if tiled else head // (heads // key_heads)
    to_query = key_head * key_size + place
    keys = key_heads * key_size
    first_write = tl.load(write_start + sequence)
    num_writes = tl.load(write_start + sequence + 1) - first_write
    done = repeated * 0
    for write in range(0, num_writes + 1):
        is_write = write < num_writes
        base = tl.load(write_bases + first_write + write, mask=is_write, other=0) - first
        until = repeated + tl.where(is_write, base, count)
        for number in range(done, until):
            is_new = number >= repeated
            token = first + number - repeated
            row = tl.where(is_new, token, num_tokens + sequence * max_logged + number)
            begin = mixed + row.to(tl.int64) * channels
            query = tl.load(begin + to_query, mask=is_place, other=0.0)
            key = tl.load(begin + keys + to_query, mask=is_place, other=0.0)
            value = tl.load(
                begin + 2 * keys + head * value_size + column, mask=is_column, other=0.0
            )
            query *= query_scale / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
            key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
            strength = gate_of(number, repeated, first, old, gates, gate_stride, head, 2 * heads)
            time = gate_of(
                number, repeated, first, old, gates, gate_stride, heads + head, 2 * heads
            )
            state *= tl.exp(decay * softplus(time + bias))
            seen = tl.sum(state * key[:, None], 0)
            correction = (value - seen) * tl.sigmoid(strength)
            state += key[:, None] * correction[None, :]
            y = tl.sum(state * query[:, None], 0)
            to = output + token.to(tl.int64) * heads * value_size + head * value_size + column
            tl.store(to, y, mask=column < tl.where(is_new, value_size, 0))
        done = until
        slot = tl.load(write_slots + first_write + write, mask=is_write, other=0).to(tl.int64)
        is_written = (place < tl.where(is_write, key_size, 0))[:, None]
        tl.store(states + slot * slot_stride + element, state, mask=is_written)


@triton.jit
def gate_and_norm(  # type: ignore[no-untyped-def]
    output,
    rows,
    weight,
    owners,
    out,
    row_stride,
    gate_column,
    gate_factor,
    width,
    weight_step,
    eps,
    norm_first: tl.constexpr,
    normed: tl.constexpr,
    block: tl.constexpr,
):
    """Write the output of a scan with its gate, silu, and the RMSNorm of a group, for a token.

    Grid: (T, groups). output: float32 [T, groups * width]. The gate is in `rows` from gate_column
    on. weight: float32, of group 0; those of groups are weight_step apart. norm_first: the norm
    comes before the gate. block: width or the next power of two above. Tokens without a sequence
    get zeros.
    """
    token = tl.program_id(0)
    group = tl.program_id(1)
    place = tl.arange(0, block)
    inside = place < width
    begin = token.to(tl.int64) * tl.num_programs(1) * width + group * width
    is_token = place < tl.where(tl.load(owners + token) >= 0, width, 0)
    value = tl.load(output + begin + place, mask=is_token, other=0.0)
    gate = rows + token.to(tl.int64) * row_stride + gate_column + group * width + place
    gate = gate_factor * tl.load(gate, mask=is_token, other=0.0).to(tl.float32)
    gate *= tl.sigmoid(gate)
    if not norm_first:
        value *= gate
    if normed:
        factor = tl.load(weight + group * weight_step + place, mask=inside, other=0.0)
        value *= 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
        value *= factor
    if norm_first:
        value *= gate
    tl.store(out + begin + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def keep_inputs(  # type: ignore[no-untyped-def]
    rows,
    gates,
    states,
    query_start,
    sources,
    again,
    write_start,
    write_bases,
    write_ends,
    write_slots,
    row_stride,
    gate_stride,
    slot_stride,
    inputs_at,
    gates_at,
    column,
    factor_column,
    channels,
    numbers,
    taps: tl.constexpr,
    multiplied: tl.constexpr,
    block: tl.constexpr,
):
    """Write windows and logs of a sequence to its slots, for a block of channels or gates.

    Grid: (sequences, blocks). After the kernels that read the source, which is the first slot that
    is written, or none of them: it comes last, and of its window the oldest token first.
    """
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    first = tl.load(query_start + sequence)
    repeated = tl.load(again + sequence)
    source = tl.load(sources + sequence).to(tl.int64)
    old = states + source * slot_stride + inputs_at
    first_write = tl.load(write_start + sequence)
    num_writes = tl.load(write_start + sequence + 1) - first_write
    for passed in range(0, num_writes):
        write = first_write + num_writes - 1 - passed
        base = tl.load(write_bases + write)
        slot = states + tl.load(write_slots + write).to(tl.int64) * slot_stride
        for age in range(0, taps - 1):
            value = input_of(
                repeated + base - first + age - (taps - 1),
                repeated,
                first,
                old,
                source >= 0,
                rows,
                row_stride,
                column,
                factor_column,
                channel,
                channels,
                taps,
                multiplied,
            )
            tl.debug_barrier()
            tl.store(slot + inputs_at + age * channels + channel, value, mask=inside)
        for logged in range(0, tl.load(write_ends + write) - base):
            token = base + logged
            value = input_of(
                repeated + token - first,
                repeated,
                first,
                old,
                source >= 0,
                rows,
                row_stride,
                column,
                factor_column,
                channel,
                channels,
                taps,
                multiplied,
            )
            tl.debug_barrier()
            to = slot + inputs_at + (taps - 1 + logged) * channels + channel
            tl.store(to, value, mask=inside)
            is_gate = channel < numbers
            gate = tl.load(
                gates + token.to(tl.int64) * gate_stride + channel, mask=is_gate, other=0.0
            )
            to = slot + gates_at + logged * numbers + channel
            tl.store(to, gate.to(tl.float32), mask=is_gate)
