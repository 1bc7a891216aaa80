"""The backward kernels (`triton_kernels` has the notation).

    keys_kernel   one program owns a key block of one user and one head: dK and dV in registers,
                  and, when not deterministic, its share of dQ added to an FP32 buffer; bias
                  gradients
    rows_kernel   one program owns a row block: dQ in registers, for the deterministic backward
    cast_kernel   dQ from the FP32 buffer

The scores are recomputed transposed (keys x rows), so that P^T and dS^T are left operands straight
from registers.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import triton
import triton.language as tl

from ops.hstu_attention.triton_forward import _load_inside, _times
from ops.hstu_attention.triton_kernels import (
    _dot,
    _dot0,
    _half_scores,
    _inverse_scale,
    _keys_of_rows,
    _load_tile,
    _masked_tile,
    _position_bucket,
    _rows_of_keys,
    _store_tile,
    _tanh,
    _time_bucket,
    _user_shape,
    _visible,
    _zero_past_the_end,
)
from ops.hstu_attention.triton_schedule import HEADER


@triton.jit
def _weights_and_slope(h, APPROX: tl.constexpr):
    """silu(2 h) and 2 silu'(2 h)."""
    t = _tanh(h, APPROX)
    slope = 1.0 + t + h * (1.0 - t * t)
    return h + h * t, slope


@triton.jit
def _add_bias_gradients(
    score_grads,
    row,
    col,
    row_time,
    col_time,
    seen,
    m,
    group_size,
    position_grad_ptr,
    time_grad_ptr,
    boundaries_ptr,
    NUM_POSITIONS: tl.constexpr,
    NUM_TIMES: tl.constexpr,
    RULE: tl.constexpr,
):
    """Add the tile's score gradients to the tables; integers make the sum free of any order."""
    if RULE.has_position_bias:
        bucket = _position_bucket(row, col, m, group_size, NUM_POSITIONS, RULE)
        grads = score_grads.to(position_grad_ptr.dtype.element_ty)
        tl.atomic_add(position_grad_ptr + bucket, grads, mask=seen, sem="relaxed")
    if RULE.has_time_bias:
        bucket = _time_bucket(tl.abs(row_time - col_time), boundaries_ptr, NUM_TIMES)
        grads = score_grads.to(time_grad_ptr.dtype.element_ty)
        tl.atomic_add(time_grad_ptr + bucket, grads, mask=seen, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows", "num_users", "group_size", "window"])
def keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    q_desc,
    do_desc,
    dq_desc,
    dq_acc_ptr,
    dk_ptr,
    dv_ptr,
    offsets_ptr,
    contextuals_ptr,
    candidates_ptr,
    table_ptr,
    timestamps_ptr,
    position_bias_ptr,
    time_bias_ptr,
    boundaries_ptr,
    position_grad_ptr,
    time_grad_ptr,
    bias_grad_factor_ptr,
    scaling_seqlen,
    alpha,
    num_rows,
    num_users,
    num_heads,
    group_size,
    window,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    do_stride,
    do_head_stride,
    A: tl.constexpr,
    V: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    NUM_TIMES: tl.constexpr,
    SCALE_IS_POINTER: tl.constexpr,
    ADD_DQ: tl.constexpr,
    RULE: tl.constexpr,
    NUMERICS: tl.constexpr,
):
    """dK and dV of one key block; programs after the last one write the zeros past the end.

    dk (T, H, A), dv (T, H, V) and dq_acc (T, H, A) are contiguous. dq_acc receives dQ without its
    constant factor (`cast_kernel` applies it). bias_grad_factor_ptr holds what a table's gradient
    is multiplied by on the way into its buffer.
    """
    item = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    dk_stride = num_heads * A
    dv_stride = num_heads * V
    dk_base = dk_ptr + head * A
    dv_base = dv_ptr + head * V
    num_blocks = tl.load(table_ptr)
    if item >= num_blocks:
        first = tl.load(offsets_ptr + num_users).to(tl.int64)
        first += (item - num_blocks).to(tl.int64) * KEYS
        _zero_past_the_end(dk_base, first, num_rows, dk_stride, A, KEYS, BLOCK_A)
        _zero_past_the_end(dv_base, first, num_rows, dv_stride, V, KEYS, BLOCK_V)
        return
    user = tl.load(table_ptr + HEADER + 2 * item)
    level = tl.load(table_ptr + HEADER + 1 + 2 * item)
    start, n, c, m = _user_shape(offsets_ptr, contextuals_ptr, candidates_ptr, user, RULE)
    key0 = ((n + KEYS - 1) // KEYS - 1 - level) * KEYS
    q_base = q_ptr + start * q_stride + head * q_head_stride
    do_base = do_ptr + start * do_stride + head * do_head_stride
    k_base = k_ptr + start * k_stride + head * k_head_stride
    v_base = v_ptr + start * v_stride + head * v_head_stride
    q_column = (head * q_head_stride).to(tl.int32)
    do_column = (head * do_head_stride).to(tl.int32)
    dq_column = (head * A).to(tl.int32)
    if ADD_DQ:
        dq_base = dq_acc_ptr + start * dk_stride + head * A
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    bias_grad_factor = 0.5 * inverse_scale
    if RULE.has_position_bias or RULE.has_time_bias:
        bias_grad_factor *= tl.load(bias_grad_factor_ptr)
    if RULE.has_position_bias:
        position_bias_ptr += head * NUM_POSITIONS
        position_grad_ptr += head * NUM_POSITIONS
    if RULE.has_time_bias:
        time_bias_ptr += head * NUM_TIMES
        time_grad_ptr += head * NUM_TIMES

    k = _load_tile(k_base, key0, n, k_stride, A, KEYS, BLOCK_A, True)
    v = _load_tile(v_base, key0, n, v_stride, V, KEYS, BLOCK_V, True)
    col = key0 + tl.arange(0, KEYS)
    col_time = _times(timestamps_ptr, start, col, n, RULE.has_time_bias)[:, None]
    col = col[:, None]
    num_front, masked_start, num_masked, full_start, num_full, last_start, num_last = _rows_of_keys(
        key0, n, c, m, group_size, window, ROWS, KEYS, RULE
    )
    dk = tl.full([KEYS, BLOCK_A], 0.0, tl.float32)
    dv = tl.full([KEYS, BLOCK_V], 0.0, tl.float32)
    half_alpha = 0.5 * alpha
    for tile in range(num_front + num_masked + num_last):
        row0 = masked_start + (tile - num_front) * ROWS
        row0 = tl.where(tile < num_front, tile * ROWS, row0)
        row0 = tl.where(tile >= num_front + num_masked, last_start, row0)
        q = _load_tile(q_base, row0, n, q_stride, A, ROWS, BLOCK_A, True)
        do = _load_tile(do_base, row0, n, do_stride, V, ROWS, BLOCK_V, True)
        row = row0 + tl.arange(0, ROWS)
        row_time = _times(timestamps_ptr, start, row, n, RULE.has_time_bias)[None, :]
        row = row[None, :]
        h = _half_scores(
            _dot0(k, tl.trans(q), NUMERICS), half_alpha, row, col, row_time, col_time, m,
            group_size, position_bias_ptr, time_bias_ptr, boundaries_ptr, NUM_POSITIONS, NUM_TIMES,
            RULE,
        )  # fmt: skip
        seen = _visible(row, col, c, m, group_size, window, RULE)
        p, slope = _weights_and_slope(h, NUMERICS.tanh_approx)
        p = tl.where(seen, p, 0.0)
        dv = _dot(p.to(do.dtype), do, dv, NUMERICS)
        ds = tl.where(seen, _dot0(v, tl.trans(do), NUMERICS) * slope, 0.0)
        _add_bias_gradients(
            ds * bias_grad_factor, row, col, row_time, col_time, seen & (row < n) & (col < n), m,
            group_size, position_grad_ptr, time_grad_ptr, boundaries_ptr, NUM_POSITIONS, NUM_TIMES,
            RULE,
        )  # fmt: skip
        ds = ds.to(q.dtype)
        dk = _dot(ds, q, dk, NUMERICS)
        if ADD_DQ:
            dq = _dot0(tl.trans(ds), k, NUMERICS)
            _add_rows(dq_base, row0, n, dk_stride, dq, A, ROWS, BLOCK_A)
    for tile in range(num_full):
        row0 = full_start + tile * ROWS
        q = _load_inside(
            q_base, q_desc, start, row0, n, q_stride, q_column, A, ROWS, BLOCK_A, False
        )
        do = _load_inside(
            do_base, do_desc, start, row0, n, do_stride, do_column, V, ROWS, BLOCK_V, False
        )
        row = row0 + tl.arange(0, ROWS)
        row_time = _times(timestamps_ptr, start, row, n, RULE.has_time_bias)[None, :]
        row = row[None, :]
        h = _half_scores(
            _dot0(k, tl.trans(q), NUMERICS), half_alpha, row, col, row_time, col_time, m,
            group_size, position_bias_ptr, time_bias_ptr, boundaries_ptr, NUM_POSITIONS, NUM_TIMES,
            RULE,
        )  # fmt: skip
        p, slope = _weights_and_slope(h, NUMERICS.tanh_approx)
        dv = _dot(p.to(do.dtype), do, dv, NUMERICS)
        ds = _dot0(v, tl.trans(do), NUMERICS) * slope
        if RULE.has_position_bias or RULE.has_time_bias:
            _add_bias_gradients(
                ds * bias_grad_factor, row, col, row_time, col_time, (row < n) & (col < n), m,
                group_size, position_grad_ptr, time_grad_ptr, boundaries_ptr, NUM_POSITIONS,
                NUM_TIMES, RULE,
            )  # fmt: skip
        ds = ds.to(q.dtype)
        dk = _dot(ds, q, dk, NUMERICS)
        if ADD_DQ:
            dq = _dot0(tl.trans(ds), k, NUMERICS)
            if dq_desc is None:
                _add_rows(dq_base, row0, n, dk_stride, dq, A, ROWS, BLOCK_A)
            else:
                dq_desc.atomic_add([(start + row0).to(tl.int32), dq_column], dq)
    dk *= half_alpha * inverse_scale
    dv *= inverse_scale
    _store_tile(dk_base + start * dk_stride, key0, n, dk_stride, dk, A, KEYS, BLOCK_A)
    _store_tile(dv_base + start * dv_stride, key0, n, dv_stride, dv, V, KEYS, BLOCK_V)


@triton.jit
def _add_rows(
    base, first, end, stride, tile, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    ptrs = base + first.to(tl.int64) * stride + row * stride + col
    tl.atomic_add(ptrs, tile, mask=(first + row < end) & (col < WIDTH), sem="relaxed")


@triton.jit
def cast_kernel(
    dq_acc_ptr,
    dq_ptr,
    scaling_seqlen,
    alpha,
    num_elements,
    SCALE_IS_POINTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dQ in its dtype from the FP32 sums, with the constant factor."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = 0.5 * alpha * _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    values = tl.load(dq_acc_ptr + index, mask=index < num_elements, other=0.0) * factor
    tl.store(dq_ptr + index, values.to(dq_ptr.dtype.element_ty), mask=index < num_elements)


@triton.jit(do_not_specialize=["num_rows", "num_users", "group_size", "window"])
def rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    dq_ptr,
    offsets_ptr,
    contextuals_ptr,
    candidates_ptr,
    table_ptr,
    timestamps_ptr,
    position_bias_ptr,
    time_bias_ptr,
    boundaries_ptr,
    scaling_seqlen,
    alpha,
    num_rows,
    num_users,
    num_heads,
    group_size,
    window,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    do_stride,
    do_head_stride,
    A: tl.constexpr,
    V: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    NUM_TIMES: tl.constexpr,
    SCALE_IS_POINTER: tl.constexpr,
    RULE: tl.constexpr,
    NUMERICS: tl.constexpr,
):
    """dQ (T, H, A), contiguous, of one row block; programs after the last one write zeros."""
    item = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    dq_stride = num_heads * A
    dq_base = dq_ptr + head * A
    num_blocks = tl.load(table_ptr)
    if item >= num_blocks:
        first = tl.load(offsets_ptr + num_users).to(tl.int64)
        first += (item - num_blocks).to(tl.int64) * ROWS
        _zero_past_the_end(dq_base, first, num_rows, dq_stride, A, ROWS, BLOCK_A)
        return
    user = tl.load(table_ptr + HEADER + 2 * item)
    row0 = tl.load(table_ptr + HEADER + 1 + 2 * item) * ROWS
    start, n, c, m = _user_shape(offsets_ptr, contextuals_ptr, candidates_ptr, user, RULE)
    q_base = q_ptr + start * q_stride + head * q_head_stride
    do_base = do_ptr + start * do_stride + head * do_head_stride
    k_base = k_ptr + start * k_stride + head * k_head_stride
    v_base = v_ptr + start * v_stride + head * v_head_stride
    if RULE.has_position_bias:
        position_bias_ptr += head * NUM_POSITIONS
    if RULE.has_time_bias:
        time_bias_ptr += head * NUM_TIMES

    q = _load_tile(q_base, row0, n, q_stride, A, ROWS, BLOCK_A, True)
    do = _load_tile(do_base, row0, n, do_stride, V, ROWS, BLOCK_V, True)
    row = row0 + tl.arange(0, ROWS)
    row_time = _times(timestamps_ptr, start, row, n, RULE.has_time_bias)[:, None]
    row = row[:, None]
    num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
        row0, n, c, m, group_size, window, ROWS, KEYS, RULE
    )
    dq = tl.full([ROWS, BLOCK_A], 0.0, tl.float32)
    half_alpha = 0.5 * alpha
    for tile in range(num_full):
        key0 = tile * KEYS
        k = _load_tile(k_base, key0, m, k_stride, A, KEYS, BLOCK_A, False)
        v = _load_tile(v_base, key0, m, v_stride, V, KEYS, BLOCK_V, False)
        col = key0 + tl.arange(0, KEYS)
        col_time = _times(timestamps_ptr, start, col, n, RULE.has_time_bias)[None, :]
        h = _half_scores(
            _dot0(q, tl.trans(k), NUMERICS), half_alpha, row, col[None, :], row_time, col_time, m,
            group_size, position_bias_ptr, time_bias_ptr, boundaries_ptr, NUM_POSITIONS, NUM_TIMES,
            RULE,
        )  # fmt: skip
        _, slope = _weights_and_slope(h, NUMERICS.tanh_approx)
        ds = _dot0(do, tl.trans(v), NUMERICS) * slope
        dq = _dot(ds.to(k.dtype), k, dq, NUMERICS)
    for tile in range(num_front + num_main + num_candidate):
        key0, end = _masked_tile(
            tile, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
        )
        k = _load_tile(k_base, key0, end, k_stride, A, KEYS, BLOCK_A, True)
        v = _load_tile(v_base, key0, end, v_stride, V, KEYS, BLOCK_V, True)
        col = key0 + tl.arange(0, KEYS)
        col_time = _times(timestamps_ptr, start, col, n, RULE.has_time_bias)[None, :]
        h = _half_scores(
            _dot0(q, tl.trans(k), NUMERICS), half_alpha, row, col[None, :], row_time, col_time, m,
            group_size, position_bias_ptr, time_bias_ptr, boundaries_ptr, NUM_POSITIONS, NUM_TIMES,
            RULE,
        )  # fmt: skip
        _, slope = _weights_and_slope(h, NUMERICS.tanh_approx)
        seen = _visible(row, col[None, :], c, m, group_size, window, RULE)
        ds = tl.where(seen, _dot0(do, tl.trans(v), NUMERICS) * slope, 0.0)
        dq = _dot(ds.to(k.dtype), k, dq, NUMERICS)
    dq *= half_alpha * _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    _store_tile(dq_base + start * dq_stride, row0, n, dq_stride, dq, A, ROWS, BLOCK_A)
