"""The forward kernel: one program owns a row block of one user and one head (`triton_kernels`)."""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import triton
import triton.language as tl

from ops.hstu_attention.triton_kernels import (
    _dot,
    _dot0,
    _half_scores,
    _inverse_scale,
    _keys_of_rows,
    _load_tile,
    _masked_tile,
    _store_tile,
    _tanh,
    _user_shape,
    _visible,
    _zero_past_the_end,
)
from ops.hstu_attention.triton_schedule import HEADER


@triton.jit
def _load_inside(
    base,
    desc,
    start,
    first,
    end,
    stride,
    column,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile; one that lies wholly inside the user may come through a descriptor."""
    if (desc is None) or MASKED:
        return _load_tile(base, first, end, stride, WIDTH, ROWS, COLS, MASKED)
    else:
        return desc.load([(start + first).to(tl.int32), column])


@triton.jit
def _times(timestamps_ptr, start, index, end, HAS_TIMES: tl.constexpr):
    if HAS_TIMES:
        return tl.load(timestamps_ptr + start + index, mask=index < end, other=0).to(tl.int64)
    else:
        return index


@triton.jit(do_not_specialize=["num_rows", "num_users", "group_size", "window"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    out_ptr,
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
    group_size,
    window,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    out_stride,
    out_head_stride,
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
    """O of one row block; programs after the last block write the zeros past the last offset."""
    item = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    out_base = out_ptr + head * out_head_stride
    num_blocks = tl.load(table_ptr)
    if item >= num_blocks:
        first = tl.load(offsets_ptr + num_users).to(tl.int64)
        first += (item - num_blocks).to(tl.int64) * ROWS
        _zero_past_the_end(out_base, first, num_rows, out_stride, V, ROWS, BLOCK_V)
        return
    user = tl.load(table_ptr + HEADER + 2 * item)
    row0 = tl.load(table_ptr + HEADER + 1 + 2 * item) * ROWS
    start, n, c, m = _user_shape(offsets_ptr, contextuals_ptr, candidates_ptr, user, RULE)
    q_base = q_ptr + start * q_stride + head * q_head_stride
    k_base = k_ptr + start * k_stride + head * k_head_stride
    v_base = v_ptr + start * v_stride + head * v_head_stride
    k_column = (head * k_head_stride).to(tl.int32)
    v_column = (head * v_head_stride).to(tl.int32)
    if RULE.has_position_bias:
        position_bias_ptr += head * NUM_POSITIONS
    if RULE.has_time_bias:
        time_bias_ptr += head * NUM_TIMES

    q = _load_tile(q_base, row0, n, q_stride, A, ROWS, BLOCK_A, True)
    row = row0 + tl.arange(0, ROWS)
    row_time = _times(timestamps_ptr, start, row, n, RULE.has_time_bias)[:, None]
    row = row[:, None]
    num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
        row0, n, c, m, group_size, window, ROWS, KEYS, RULE
    )
    acc = tl.full([ROWS, BLOCK_V], 0.0, tl.float32)
    half_alpha = 0.5 * alpha
    for tile in range(num_full):
        key0 = tile * KEYS
        k = _load_inside(
            k_base, k_desc, start, key0, m, k_stride, k_column, A, KEYS, BLOCK_A, False
        )
        scores = _dot0(q, tl.trans(k), NUMERICS)
        col = key0 + tl.arange(0, KEYS)
        col_time = _times(timestamps_ptr, start, col, n, RULE.has_time_bias)[None, :]
        h = _half_scores(
            scores, half_alpha, row, col[None, :], row_time, col_time, m, group_size,
            position_bias_ptr, time_bias_ptr, boundaries_ptr, NUM_POSITIONS, NUM_TIMES, RULE,
        )  # fmt: skip
        p = h + h * _tanh(h, NUMERICS.tanh_approx)
        v = _load_inside(
            v_base, v_desc, start, key0, m, v_stride, v_column, V, KEYS, BLOCK_V, False
        )
        acc = _dot(p.to(v.dtype), v, acc, NUMERICS)
    for tile in range(num_front + num_main + num_candidate):
        key0, end = _masked_tile(
            tile, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
        )
        k = _load_tile(k_base, key0, end, k_stride, A, KEYS, BLOCK_A, True)
        scores = _dot0(q, tl.trans(k), NUMERICS)
        col = key0 + tl.arange(0, KEYS)
        col_time = _times(timestamps_ptr, start, col, n, RULE.has_time_bias)[None, :]
        h = _half_scores(
            scores, half_alpha, row, col[None, :], row_time, col_time, m, group_size,
            position_bias_ptr, time_bias_ptr, boundaries_ptr, NUM_POSITIONS, NUM_TIMES, RULE,
        )  # fmt: skip
        p = h + h * _tanh(h, NUMERICS.tanh_approx)
        p = tl.where(_visible(row, col[None, :], c, m, group_size, window, RULE), p, 0.0)
        v = _load_tile(v_base, key0, end, v_stride, V, KEYS, BLOCK_V, True)
        acc = _dot(p.to(v.dtype), v, acc, NUMERICS)
    acc *= _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    _store_tile(out_base + start * out_stride, row0, n, out_stride, acc, V, ROWS, BLOCK_V)
