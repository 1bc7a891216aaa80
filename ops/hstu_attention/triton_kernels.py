"""The Triton kernels of HSTU attention: forward, and both shapes of the backward.

Notation: one program owns one block of one user and one head. Indices of rows and columns count
inside the user. With h = x / 2 for a score x = A**-0.5 <q, k> + bias and t = tanh(h):

    silu(x)  = h + h t                        one tanh, no division
    silu'(x) = (1 + w) / 2    with w = t + h (1 - t t)

Constant factors (A**-0.5 / 2 of a score, 1 / scaling_seqlen, the 1/2 of silu') are not applied to
the n * n weights but to the accumulators at the end.

Rows and columns past the end of a user are loaded as zeros, never read from memory: a zero row of v
adds nothing to the output, a zero row of dO adds nothing to any gradient. So only the mask of the
rule itself costs work, and only on tiles that it cuts; tiles that every row sees in full take a
loop of their own without mask.

`RULE` bundles the compile-time switches of the mask and bias (`Rule`); `shape` of a user is
(n, c, m): its length, contextual tokens, and contextual plus history tokens.
"""

# ruff: noqa: ANN001  a kernel's arguments are device values without a Python type

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Rule:
    """Compile-time switches of one call; the branches they close cost nothing."""

    causal: bool
    has_contextuals: bool
    contextual_rows_see_all: bool
    has_candidates: bool
    has_window: bool
    has_position_bias: bool
    has_time_bias: bool


@dataclass(frozen=True)
class Numerics:
    """Compile-time choices of the arithmetic."""

    tanh_approx: bool
    """One tanh.approx instruction (relative error 2**-11); False: through exp, to FP32 accuracy."""
    upcast: bool
    """Multiply in FP32: the interpreter cannot multiply bf16."""
    precision: str
    """input_precision of tl.dot; matters for FP32 only."""


# ---- arithmetic ----------------------------------------------------------------------------


@triton.jit
def _cdiv(x, y: tl.constexpr):
    return (x + y - 1) // y


@triton.jit
def _tanh(x, APPROX: tl.constexpr):
    if APPROX:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def _dot(a, b, acc, NUMERICS: tl.constexpr):
    if NUMERICS.upcast:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=NUMERICS.precision)


@triton.jit
def _dot0(a, b, NUMERICS: tl.constexpr):
    if NUMERICS.upcast:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=NUMERICS.precision)


# ---- loads ---------------------------------------------------------------------------------


@triton.jit
def _load_tile(
    base,
    first,
    end,
    stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows [first, first + ROWS) of a user's (n, WIDTH) matrix; zeros past `end` when MASKED."""
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    ptrs = base + first.to(tl.int64) * stride + row * stride + col
    if MASKED:
        if COLS == WIDTH:
            return tl.load(ptrs, mask=first + row < end, other=0.0)
        else:
            return tl.load(ptrs, mask=(first + row < end) & (col < WIDTH), other=0.0)
    else:
        if COLS == WIDTH:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=col < WIDTH, other=0.0)


@triton.jit
def _store_tile(
    base, first, end, stride, tile, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    ptrs = base + first.to(tl.int64) * stride + row * stride + col
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=(first + row < end) & (col < WIDTH))


@triton.jit
def _zero_past_the_end(
    base, first, num_rows, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Write zeros to rows [first, first + ROWS) below num_rows; first is 64 bit."""
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    ptrs = base + first * stride + row * stride + col
    zeros = tl.full([ROWS, COLS], 0.0, base.dtype.element_ty)
    tl.store(ptrs, zeros, mask=(first + row < num_rows) & (col < WIDTH))


@triton.jit
def _user_shape(offsets_ptr, contextuals_ptr, candidates_ptr, user, RULE: tl.constexpr):
    """First packed row (int64), then n, c and m of a user."""
    start = tl.load(offsets_ptr + user).to(tl.int64)
    n = (tl.load(offsets_ptr + user + 1).to(tl.int64) - start).to(tl.int32)
    c = n * 0
    m = n
    if RULE.has_contextuals:
        c = tl.load(contextuals_ptr + user).to(tl.int32)
    if RULE.has_candidates:
        m = n - tl.load(candidates_ptr + user).to(tl.int32)
    return start, n, c, m


@triton.jit
def _inverse_scale(scaling_seqlen, IS_POINTER: tl.constexpr):
    if IS_POINTER:
        return 1.0 / tl.load(scaling_seqlen).to(tl.float32)
    else:
        return 1.0 / scaling_seqlen


# ---- mask and bias -------------------------------------------------------------------------


@triton.jit
def _position(index, m, group_size, RULE: tl.constexpr):
    if RULE.has_candidates:
        return tl.where(index < m, index, m + (index - m) % group_size)
    else:
        return index


@triton.jit
def _visible(row, col, c, m, group_size, window, RULE: tl.constexpr):
    """Whether row sees col (broadcast); the rule of `ops.hstu_attention`."""
    if RULE.causal:
        seen = col <= row
        if RULE.contextual_rows_see_all:
            seen = seen | (row < c)
    else:
        seen = (col < m) & (row >= 0)
    if RULE.has_window:
        apart = tl.abs(_position(row, m, group_size, RULE) - _position(col, m, group_size, RULE))
        near = apart < window
        if RULE.has_contextuals:
            near = near | (col < c) | (row < c)
        seen = seen & near
    if RULE.has_candidates:
        same_group = (row - m) // group_size == (col - m) // group_size
        own = (row >= m) & (col <= row) & same_group
        seen = tl.where(col < m, seen, own)
    return seen


@triton.jit
def _time_bucket(apart, boundaries_ptr, NUM_BUCKETS: tl.constexpr):
    """Bucket of a time difference, exact: a float guess, put right by the integer boundaries.

    boundaries[b] is the smallest difference of bucket b + 1.
    """
    guess = (tl.log(tl.maximum(apart, 1).to(tl.float32)) / 0.301).to(tl.int32)
    guess = tl.minimum(guess, NUM_BUCKETS - 1)
    if NUM_BUCKETS == 1:
        return guess
    else:
        below = tl.load(boundaries_ptr + tl.maximum(guess - 1, 0))
        above = tl.load(boundaries_ptr + tl.minimum(guess, NUM_BUCKETS - 2))
        too_high = (guess > 0) & (apart < below)
        too_low = (guess < NUM_BUCKETS - 1) & (apart >= above)
        return guess - too_high.to(tl.int32) + too_low.to(tl.int32)


@triton.jit
def _position_bucket(row, col, m, group_size, NUM_BUCKETS: tl.constexpr, RULE: tl.constexpr):
    apart = tl.abs(_position(row, m, group_size, RULE) - _position(col, m, group_size, RULE))
    return tl.minimum(apart, NUM_BUCKETS - 1)


@triton.jit
def _half_scores(
    scores,
    half_alpha,
    row,
    col,
    row_time,
    col_time,
    m,
    group_size,
    position_bias_ptr,
    time_bias_ptr,
    boundaries_ptr,
    NUM_POSITIONS: tl.constexpr,
    NUM_TIMES: tl.constexpr,
    RULE: tl.constexpr,
):
    """h = (alpha <q, k> + bias) / 2; the bias pointers are those of the head."""
    h = scores * half_alpha
    if RULE.has_position_bias:
        bucket = _position_bucket(row, col, m, group_size, NUM_POSITIONS, RULE)
        h += 0.5 * tl.load(position_bias_ptr + bucket).to(tl.float32)
    if RULE.has_time_bias:
        bucket = _time_bucket(tl.abs(row_time - col_time), boundaries_ptr, NUM_TIMES)
        h += 0.5 * tl.load(time_bias_ptr + bucket).to(tl.float32)
    return h


# ---- which tiles a block meets -------------------------------------------------------------


@triton.jit
def _keys_of_rows(
    row0,
    n,
    c,
    m,
    group_size,
    window,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Key tiles that rows [row0, row0 + ROWS) meet, as four runs.

    Returns the number of tiles from key 0 that all rows see in full; the number of masked tiles
    from key 0 (contextual columns in front of a window); start and number of the masked tiles of
    main columns; start and number of those of candidate columns.
    """
    row_end = tl.minimum(row0 + ROWS, n)
    main_end = m
    if RULE.causal:
        main_end = tl.minimum(m, row_end)
        if RULE.contextual_rows_see_all:
            main_end = tl.where(row0 < c, m, main_end)
    num_full = row0 * 0
    num_front = row0 * 0
    if RULE.has_window:
        main_start = tl.minimum(row0, m) - window + 1
        if RULE.has_contextuals:
            num_front = _cdiv(tl.minimum(c, main_end), KEYS)
            main_start = tl.where(row0 < c, 0, main_start)
        main_start = tl.maximum(main_start, num_front * KEYS)
    else:
        if RULE.causal:
            num_full = tl.minimum(m, row0 + 1) // KEYS
        else:
            num_full = m // KEYS
        main_start = num_full * KEYS
    num_main = _cdiv(tl.maximum(main_end - main_start, 0), KEYS)
    candidate_start = row0 * 0
    num_candidate = row0 * 0
    if RULE.has_candidates:
        first = tl.maximum(row0 - m, 0)
        candidate_start = m + first // group_size * group_size
        num_candidate = _cdiv(tl.maximum(row_end - candidate_start, 0), KEYS)
    return num_full, num_front, main_start, num_main, candidate_start, num_candidate


@triton.jit
def _masked_tile(
    index,
    num_front,
    main_start,
    num_main,
    candidate_start,
    m,
    n,
    KEYS: tl.constexpr,
    RULE: tl.constexpr,
):
    """First key, and end of the valid keys, of a masked tile counted over its three runs."""
    first = main_start + (index - num_front) * KEYS
    end = m
    if RULE.has_window:
        first = tl.where(index < num_front, index * KEYS, first)
    if RULE.has_candidates:
        is_candidate = index >= num_front + num_main
        after = candidate_start + (index - num_front - num_main) * KEYS
        first = tl.where(is_candidate, after, first)
        end = tl.where(is_candidate, n, m)
    return first, end


@triton.jit
def _rows_of_keys(
    key0,
    n,
    c,
    m,
    group_size,
    window,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Row tiles that meet keys [key0, key0 + KEYS).

    Returns the number of masked tiles from row 0 (contextual rows); start and number of the masked
    tiles around the diagonal; start and number of the tiles whose rows all exist and see all the
    keys; start and number (0 or 1) of the last, partial tile.
    """
    key_end = tl.minimum(key0 + KEYS, n)
    row_end = n
    num_front = key0 * 0
    if RULE.causal:
        row_start = key0
        if RULE.contextual_rows_see_all:
            num_front = tl.where(key0 < m, _cdiv(tl.minimum(c, n), ROWS), 0)
    else:
        row_start = key0 * 0
        if RULE.has_window:
            if RULE.has_contextuals:
                num_front = tl.where(key0 < m, _cdiv(tl.minimum(c, n), ROWS), 0)
                row_start = tl.where(key0 < c, 0, tl.maximum(key0 - window + 1, 0))
            else:
                row_start = tl.maximum(key0 - window + 1, 0)
    row_start = tl.maximum(row_start, num_front * ROWS)
    if RULE.has_window:
        last = key_end - 1 + window
        if RULE.has_contextuals:
            last = tl.where(key0 < c, n, last)
        row_end = tl.where(last > m, n, tl.minimum(last, n))
    if RULE.has_candidates:
        group_end = m + ((key_end - 1 - m) // group_size + 1) * group_size
        row_end = tl.where(key0 >= m, tl.minimum(n, group_end), row_end)
    full_start = row_end
    if not RULE.has_window:
        if RULE.causal:
            all_see = tl.maximum(row_start, key0 + KEYS - 1)
            full_start = row_start + _cdiv(all_see - row_start, ROWS) * ROWS
        else:
            full_start = row_start
        if RULE.has_candidates:
            full_start = tl.where(key0 + KEYS > m, row_end, full_start)
    full_start = tl.maximum(row_start, tl.minimum(full_start, row_end))
    num_masked = _cdiv(full_start - row_start, ROWS)
    num_full = tl.maximum(row_end - full_start, 0) // ROWS
    last_start = full_start + num_full * ROWS
    num_last = (last_start < row_end).to(tl.int32)
    return num_front, row_start, num_masked, full_start, num_full, last_start, num_last
