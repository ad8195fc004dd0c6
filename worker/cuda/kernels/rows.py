"""The Triton kernels of rows: norms, activations, rounding to FP8, and writing K and V.

Triton reads annotations and accepts only its own.
"""

import triton
import triton.language as tl


@triton.jit
def norm_row(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    residual,
    out,
    x_stride,
    heads,
    size,
    eps,
    adds: tl.constexpr,
    centered: tl.constexpr,
    biased: tl.constexpr,
    block: tl.constexpr,
):
    """Write the norm of a row to `out`, or its sum with the row of `residual` if `adds`.

    Grid: (rows,). x: [T, size], or [T, heads, size] with a row for each head; x_stride: between
    tokens. weight, bias: [size]. residual, out: [rows, size]. centered: the mean of the row is
    subtracted first. block: size or the next power of two above.
    """
    row = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < size
    begin = (row // heads).to(tl.int64) * x_stride + (row % heads) * size
    value = tl.load(x + begin + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if centered:
        value = tl.where(inside, value - tl.sum(value, 0) / size, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
    normed = value * scale * factor
    if biased:
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    to = row.to(tl.int64) * size + column
    if adds:
        normed += tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + to, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_row(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    size,
    activation: tl.constexpr,
    gated: tl.constexpr,
    block: tl.constexpr,
):
    """Write the activation of a block of a row's columns to `out`.

    Grid: (rows, blocks). gate_up: [rows, 2 size], a row's gate and then its up half; [rows,
    size] if not `gated`. out: [rows, size]. activation: its name.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    begin = gate_up + row * (2 if gated else 1) * size + column
    gate = tl.load(begin, mask=inside, other=0.0).to(tl.float32)
    if activation == "swiglu_oai":
        gate = tl.where(gate > 7.0, 7.0, gate)
        inner = gate * tl.sigmoid(1.702 * gate)
    elif activation == "gelu_tanh":
        # (1 + tanh z) / 2 is the sigmoid of 2 z
        inner = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif activation == "gelu":
        inner = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif activation == "sigmoid":
        inner = tl.sigmoid(gate)
    elif activation == "relu2":
        # NaN stays NaN
        inner = tl.where(gate < 0.0, 0.0, gate * gate)
    else:
        inner = gate * tl.sigmoid(gate)
    if gated:
        up = tl.load(begin + size, mask=inside, other=0.0).to(tl.float32)
        if activation == "swiglu_oai":
            up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        inner *= up
    tl.store(out + row * size + column, inner.to(out.dtype.element_ty), mask=inside)


@triton.jit
def round_row(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    x_stride,
    size,
    given,
    fixed: tl.constexpr,
    largest: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, block)
    inside = place < size
    values = tl.load(x + row * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    scale = given
    if not fixed:
        # A row of zeros may have any scale.
        scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / largest
    rounded = tl.maximum(values / scale, -largest, propagate_nan=tl.PropagateNan.ALL)
    rounded = tl.minimum(rounded, largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes + row * size + place, rounded.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def store_head(  # type: ignore[no-untyped-def]
    slots,
    key,
    value,
    key_pages,
    value_pages,
    key_stride,
    value_stride,
    block_stride,
    head_stride,
    row_stride,
    block_size: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    most: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        key_dims, value_dims = tl.arange(0, key_dim), tl.arange(0, value_dim)
        k = tl.load(key + token * key_stride + head * key_dim + key_dims)
        v = tl.load(value + token * value_stride + head * value_dim + value_dims)
        block, offset = slot // block_size, slot % block_size
        to = block * block_stride + head * head_stride + offset * row_stride
        if most != 0.0:
            k = tl.clamp(k.to(tl.float32), -most, most, propagate_nan=tl.PropagateNan.ALL)
            v = tl.clamp(v.to(tl.float32), -most, most, propagate_nan=tl.PropagateNan.ALL)
        tl.store(key_pages + to + key_dims, k.to(key_pages.dtype.element_ty))
        tl.store(value_pages + to + value_dims, v.to(value_pages.dtype.element_ty))
