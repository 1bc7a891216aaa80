"""What the FP8 kernels for Hopper share beyond `hopper_kernels`: blocks with their user, aligned
tiles, scales, codes of weights as left operands, tails of transposed tiles.

Operands, their layouts and scales: `fp8_operands`; numerics: `emulated_impl`. Every tile starts at
a multiple of its size, so that it has one scale and starts at a multiple of 16 columns of the
transposed codes; masks hide what that adds at its front.

A weight is multiplied by a power of two w before its cast, so that it uses E4M3's range and cannot
leave it (`weight_unit`). A thread holds pairs of columns 8 apart of an accumulator, and four
neighbours of a left operand: transposed codes are permuted inside each 16, so that the one is the
other (`as_left_operand`).
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import math

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ops.hstu_attention.triton_kernels import _cdiv, _rows_of_keys, _visible
from ops.hstu_attention.triton_schedule import HEADER

SCALE_ROWS = gl.constexpr(128)
"""Rows of a user that share a scale."""
_LARGEST_UNIT = gl.constexpr(2.0**30)


# ---- blocks --------------------------------------------------------------------------------


@gluon.jit
def draw_block(counter_ptr, structure, RULE: gl.constexpr):
    """`hopper_kernels.draw_block` with the user: index, head, level, start, n, c, m, user."""
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    index = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    exists = index < total
    item = index // num_heads
    user = gl.load(table_ptr + HEADER + 2 * item, mask=exists, other=0)
    level = gl.load(table_ptr + HEADER + 2 * item + 1, mask=exists, other=0)
    start = gl.load(offsets_ptr + user, mask=exists, other=0).to(gl.int32)
    n = gl.load(offsets_ptr + user + 1, mask=exists, other=0).to(gl.int32) - start
    c = n * 0
    m = n
    if RULE.has_contextuals:
        c = gl.load(contextuals_ptr + user, mask=exists, other=0).to(gl.int32)
    if RULE.has_candidates:
        m = n - gl.load(candidates_ptr + user, mask=exists, other=0).to(gl.int32)
    return index, index % num_heads, level, start, gl.where(exists, n, -1), c, m, user


@gluon.jit
def tell(step, board, head, level, start, n, c, m, user):
    """`hopper_kernels.tell` with the user; the board is that of `hopper_kernels.new_board`."""
    words, told, heard = board
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    slot = step % 2
    mbarrier.wait(heard.index(slot), (step // 2 & 1) ^ 1)
    i = gl.arange(0, 8, layout=layout)
    word = gl.where(i == 0, head, gl.where(i == 1, level, gl.where(i == 2, start, n)))
    word = gl.where(i == 4, c, gl.where(i == 5, m, gl.where(i == 6, user, word)))
    words.index(slot).store(word)
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def hear(step, board):
    """A consumer's side of `tell`: head, level, start, n, c, m, user, all int32."""
    words, told, heard = board
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    slot = step % 2
    mbarrier.wait(told.index(slot), step // 2 & 1)
    word = words.index(slot).load(layout)
    mbarrier.arrive(heard.index(slot), count=1)
    i = gl.arange(0, 8, layout=layout)
    head = pick(word, i, 0)
    level = pick(word, i, 1)
    start = pick(word, i, 2)
    n = pick(word, i, 3)
    c = pick(word, i, 4)
    m = pick(word, i, 5)
    user = pick(word, i, 6)
    return head, level, start, n, c, m, user


@gluon.jit
def pick(words, i, INDEX: gl.constexpr):
    """One of some words that every thread holds all of: a sum that costs nothing."""
    return gl.sum(gl.where(i == INDEX, words, gl.zeros_like(words)), 0)


@gluon.jit
def first_column(start, user):
    """Where a user's transposed codes start."""
    return 16 * (start // 16 + user)


@gluon.jit
def first_slot(start, user):
    """The slot of the scales of a user's first block."""
    return start // SCALE_ROWS + user


# ---- tiles ---------------------------------------------------------------------------------


@gluon.jit
def keys_of_rows(
    row0, n, c, m, group_size, window, ROWS: gl.constexpr, KEYS: gl.constexpr, RULE: gl.constexpr
):  # fmt: skip
    """`triton_kernels._keys_of_rows` with tiles that start at multiples of KEYS."""
    row_end = gl.minimum(row0 + ROWS, n)
    main_end = m
    if RULE.causal:
        main_end = gl.minimum(m, row_end)
        if RULE.contextual_rows_see_all:
            main_end = gl.where(row0 < c, m, main_end)
    num_full = row0 * 0
    num_front = row0 * 0
    if RULE.has_window:
        main_start = gl.minimum(row0, m) - window + 1
        if RULE.has_contextuals:
            num_front = _cdiv(gl.minimum(c, main_end), KEYS)
            main_start = gl.where(row0 < c, 0, main_start)
        main_start = gl.maximum(main_start, num_front * KEYS) // KEYS * KEYS
    else:
        if RULE.causal:
            num_full = gl.minimum(m, row0 + 1) // KEYS
        else:
            num_full = m // KEYS
        main_start = num_full * KEYS
    num_main = _cdiv(gl.maximum(main_end - main_start, 0), KEYS)
    candidate_start = row0 * 0
    num_candidate = row0 * 0
    if RULE.has_candidates:
        first = gl.maximum(row0 - m, 0)
        candidate_start = m + first // group_size * group_size
        has_any = candidate_start < row_end
        candidate_start = candidate_start // KEYS * KEYS
        num_candidate = gl.where(has_any, _cdiv(row_end - candidate_start, KEYS), 0)
    return num_full, num_front, main_start, num_main, candidate_start, num_candidate


@gluon.jit
def rows_of_keys(
    key0, n, c, m, group_size, window, ROWS: gl.constexpr, KEYS: gl.constexpr, RULE: gl.constexpr
):  # fmt: skip
    """`triton_kernels._rows_of_keys` with tiles that start at multiples of ROWS."""
    num_front, around_start, num_around, full_start, num_full, last_start, num_last = _rows_of_keys(
        key0, n, c, m, group_size, window, ROWS, KEYS, RULE
    )
    if RULE.has_window:  # without one the start is a multiple; and here no tile is full
        around_start = around_start // ROWS * ROWS
        num_around = _cdiv(full_start - around_start, ROWS)
    return num_front, around_start, num_around, full_start, num_full, last_start, num_last


@gluon.jit
def seen_by_rows(row, col, end, c, m, group_size, window, RULE: gl.constexpr):
    """`hopper_kernels.seen_by_rows` where a tile of candidates may start before they do."""
    if RULE.causal and not RULE.has_window:
        last = row
        if RULE.contextual_rows_see_all:
            last = gl.where(row < c, m - 1, row)
        last = gl.minimum(last, end - 1)
        if RULE.has_candidates:
            own = gl.maximum(m + (row - m) // group_size * group_size, m)
            first = gl.where(end > m, own, 0)
            return (col >= first) & (col <= last)
        else:
            return col <= last
    else:
        seen = _visible(row, col, c, m, group_size, window, RULE) & (col < end)
        if RULE.has_candidates:
            seen = seen & (col >= gl.where(end > m, m, 0))
        return seen


# ---- scales --------------------------------------------------------------------------------


@triton.constexpr_function
def _largest_factor(A):
    """2**floor(log2(1 / (A**0.5 448))): under it no weight of unscaled codes passes 448."""
    return 2.0 ** math.floor(-math.log2(A**0.5 * 448.0))


@gluon.jit
def inverse_of_power(x):
    """1 / x, exactly, of a power of two between 2**-126 and 2**126."""
    return (0x7F000000 - x.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def weight_unit(q_scale, k_scale, weight_factor, A: gl.constexpr, SCALED: gl.constexpr):
    """w: what silu(S) is multiplied by before its cast; its inverse comes off after the product."""
    if SCALED:
        unit = _largest_factor(A) * inverse_of_power(q_scale) * inverse_of_power(k_scale)
        return gl.minimum(gl.maximum(unit, 1.0), _LARGEST_UNIT)
    else:
        return weight_factor


# ---- left operands -------------------------------------------------------------------------


@gluon.jit
def in_fours(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    """The numbers of an accumulator (ROWS, COLS) that make a word of four codes: four (ROWS,
    COLS / 4), in the order of a word's bytes. No instruction: a thread has all four.
    """
    x = x.reshape(ROWS, COLS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
    even, odd = gl.split(x)
    even0, even8 = gl.split(even)
    odd0, odd8 = gl.split(odd)
    WORDS: gl.constexpr = COLS // 4
    return (
        even0.reshape(ROWS, WORDS), odd0.reshape(ROWS, WORDS), even8.reshape(ROWS, WORDS),
        odd8.reshape(ROWS, WORDS),
    )  # fmt: skip


@gluon.jit
def as_left_operand(words, ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of codes (ROWS, COLS / 4) as E4M3 (ROWS, COLS), a left operand; no instruction.

    Codes live in words between their making and this: a loop would carry every code in a register
    of its own, and no wait takes codes. LAYOUT: DotOperandLayout(0, ..., 4).
    """
    twice = gl.join(words, words)
    words = gl.join(twice, twice).reshape(ROWS, COLS)
    words = gl.convert_layout(words, LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r,r,r,r",
        [words],
        dtype=gl.float8e4nv,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def weight_words(h, unit, ROWS: gl.constexpr, COLS: gl.constexpr):
    """E4M3 codes, saturated, of unit silu(2 h), as words; h is an accumulator.

    Volatile, as `hopper_kernels.weights_and_slopes` is.
    """
    h0, h1, h2, h3 = in_fours(h, ROWS, COLS)
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 t0, t1, t2, t3, u0, u1, u2, u3;
            .reg .b16 low, high;
            tanh.approx.f32 t0, $1;
            tanh.approx.f32 t1, $2;
            tanh.approx.f32 t2, $3;
            tanh.approx.f32 t3, $4;
            mul.f32 u0, $1, $5;
            mul.f32 u1, $2, $5;
            mul.f32 u2, $3, $5;
            mul.f32 u3, $4, $5;
            fma.rn.f32 u0, u0, t0, u0;
            fma.rn.f32 u1, u1, t1, u1;
            fma.rn.f32 u2, u2, t2, u2;
            fma.rn.f32 u3, u3, t3, u3;
            cvt.rn.satfinite.e4m3x2.f32 low, u1, u0;
            cvt.rn.satfinite.e4m3x2.f32 high, u3, u2;
            mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f,f",
        [h0, h1, h2, h3, unit],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


# ---- tails ---------------------------------------------------------------------------------


@gluon.jit
def zero_columns_past(tile, num_valid, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Zero the columns of a transposed tile (ROWS, COLS) whose positions are from num_valid on.

    Visibly to the tensor cores; both warpgroups may do it to the same tile, as in
    `hopper_kernels.zero_rows_past`. Codes go four at a time, whose positions are two neighbours
    and the two that stand 8 after them.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [512 // COLS, COLS // 16], [4, 1], [1, 0])
    word_layout: gl.constexpr = gl.NVMMASharedLayout(COLS, 32, 2)
    step: gl.constexpr = 2048 // COLS
    words = tile._reinterpret(gl.int32, [ROWS, COLS // 4], word_layout)
    word = gl.arange(0, COLS // 4, layout=gl.SliceLayout(0, layout))[None, :]
    left = num_valid - (word // 4 * 16 + word % 4 * 2)
    kept = gl.where(left > 0, 0xFF, 0) | gl.where(left > 1, 0xFF00, 0)
    kept = kept | gl.where(left > 8, 0xFF0000, 0) | gl.where(left > 9, -0x1000000, 0)
    for first in gl.static_range(0, ROWS, step):
        rows = words.slice(first, step, dim=0)
        rows.store(rows.load(layout) & kept)
    fence_async_shared()
    gl.thread_barrier()
