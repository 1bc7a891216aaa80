"""What the backward kernels of FP8 attention on Hopper share: powers of two, P and dS, tails.

P and dS are computed in FP16, two at a time, from h = S / 2: |h| is cut off at 65504, where silu
has long left E4M3; where scores are so small that P is scaled up (`weight_unit`), so are they.
Numbers of an accumulator travel as words (64, COLS / 4): four codes or two halves each
(`hopper_fp8_kernels.in_fours`).

Every block has one scale, a power of two, so factors of a tile are found as integers, by the
producer, which leaves them beside the tile.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import math

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ops.hstu_attention.hopper_fp8_kernels import in_fours

# ---- powers of two -------------------------------------------------------------------------


@gluon.jit
def exponent(x):
    """log2 of a power of two."""
    return (x.to(gl.int32, bitcast=True) >> 23 & 255) - 127


@gluon.jit
def power(e):
    """2 ** e; 0 where that is no normal number."""
    return gl.where(e > -127, e + 127 << 23, 0).to(gl.float32, bitcast=True)


@gluon.jit
def times_power(x, e):
    """x 2 ** e of a scalar; e itself may be out of range."""
    half = e // 2
    return x * power(half) * power(e - half)


@gluon.jit
def power_pair(e):
    """2 ** e for e up to 15 in FP16, twice in a word."""
    normal = gl.minimum(e, 15) + 15 << 10
    subnormal = gl.where(e < -24, 0, 1 << gl.maximum(e + 24, 0))
    return gl.where(e < -14, subnormal, normal) * 0x10001


@gluon.jit
def exponent_at(scale_ptr, place, exists):
    return exponent(gl.load(scale_ptr + place, mask=exists, other=1.0))


@triton.constexpr_function
def _least_weight_exponent(A):
    """log2 of the power of two under which no weight of unscaled codes passes 448."""
    return math.floor(-math.log2(A**0.5 * 448.0))


@gluon.jit
def weight_exponent(e_q, e_k, cast_exponent, A: gl.constexpr, SCALED: gl.constexpr):
    """log2 of `weight_unit`."""
    if SCALED:
        return gl.minimum(gl.maximum(_least_weight_exponent(A) - e_q - e_k, 0), 30)
    else:
        return cast_exponent


# ---- arithmetic ----------------------------------------------------------------------------


@gluon.jit
def weights_and_slopes(h, factor, COLS: gl.constexpr):
    """Codes of factor silu(2 h), and 2 silu'(2 h) in FP16, of an accumulator (64, COLS).

    Words (64, COLS / 4): four codes, two slopes, the other two. factor: FP16, twice in a word.
    Volatile, as `hopper_kernels.weights_and_slopes` is.
    """
    h0, h1, h2, h3 = in_fours(h, 64, COLS)
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 x0, x1, t0, t1, n0, n1, s0, s1, one;
            .reg .b16 low, high;
            mov.b32 one, 0x3C003C00;
            cvt.rn.satfinite.f16x2.f32 x0, $4, $3;
            cvt.rn.satfinite.f16x2.f32 x1, $6, $5;
            tanh.approx.f16x2 t0, x0;
            tanh.approx.f16x2 t1, x1;
            fma.rn.f16x2 s0, x0, t0, x0;
            fma.rn.f16x2 s1, x1, t1, x1;
            mul.rn.f16x2 s0, s0, $7;
            mul.rn.f16x2 s1, s1, $7;
            cvt.rn.satfinite.e4m3x2.f16x2 low, s0;
            cvt.rn.satfinite.e4m3x2.f16x2 high, s1;
            mov.b32 $0, {low, high};
            neg.f16x2 n0, t0;
            neg.f16x2 n1, t1;
            fma.rn.f16x2 n0, n0, t0, one;
            fma.rn.f16x2 n1, n1, t1, one;
            add.rn.f16x2 s0, t0, one;
            add.rn.f16x2 s1, t1, one;
            fma.rn.f16x2 $1, x0, n0, s0;
            fma.rn.f16x2 $2, x1, n1, s1;
        }""",
        "=r,=r,=r,f,f,f,f,r",
        [h0, h1, h2, h3, factor],
        dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def weights_and_slopes_of_small(x, factor, shrink, COLS: gl.constexpr):
    """`weights_and_slopes` of h = shrink x, with the weights of h / shrink."""
    x0, x1, x2, x3 = in_fours(x, 64, COLS)
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 x0, x1, h0, h1, t0, t1, n0, n1, s0, s1, one;
            .reg .b16 low, high;
            mov.b32 one, 0x3C003C00;
            cvt.rn.satfinite.f16x2.f32 x0, $4, $3;
            cvt.rn.satfinite.f16x2.f32 x1, $6, $5;
            mul.rn.f16x2 h0, x0, $8;
            mul.rn.f16x2 h1, x1, $8;
            tanh.approx.f16x2 t0, h0;
            tanh.approx.f16x2 t1, h1;
            fma.rn.f16x2 s0, x0, t0, x0;
            fma.rn.f16x2 s1, x1, t1, x1;
            mul.rn.f16x2 s0, s0, $7;
            mul.rn.f16x2 s1, s1, $7;
            cvt.rn.satfinite.e4m3x2.f16x2 low, s0;
            cvt.rn.satfinite.e4m3x2.f16x2 high, s1;
            mov.b32 $0, {low, high};
            neg.f16x2 n0, t0;
            neg.f16x2 n1, t1;
            fma.rn.f16x2 n0, n0, t0, one;
            fma.rn.f16x2 n1, n1, t1, one;
            add.rn.f16x2 s0, t0, one;
            add.rn.f16x2 s1, t1, one;
            fma.rn.f16x2 $1, h0, n0, s0;
            fma.rn.f16x2 $2, h1, n1, s1;
        }""",
        "=r,=r,=r,f,f,f,f,r,r",
        [x0, x1, x2, x3, factor, shrink],
        dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def slope_codes(dp, low, high, COLS: gl.constexpr):
    """Words of codes of dp times slopes, rounded to FP16 on the way."""
    d0, d1, d2, d3 = in_fours(dp, 64, COLS)
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 d0, d1;
            .reg .b16 low, high;
            cvt.rn.satfinite.f16x2.f32 d0, $2, $1;
            cvt.rn.satfinite.f16x2.f32 d1, $4, $3;
            mul.rn.f16x2 d0, d0, $5;
            mul.rn.f16x2 d1, d1, $6;
            cvt.rn.satfinite.e4m3x2.f16x2 low, d0;
            cvt.rn.satfinite.e4m3x2.f16x2 high, d1;
            mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f,r,r",
        [d0, d1, d2, d3, low, high],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def slopes(h, COLS: gl.constexpr):
    """2 silu'(2 h) in FP16 of an accumulator (64, COLS): two words (64, COLS / 4).

    Volatile, as `hopper_kernels.weights_and_slopes` is.
    """
    h0, h1, h2, h3 = in_fours(h, 64, COLS)
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 x0, x1, t0, t1, n0, n1, s0, s1, one;
            mov.b32 one, 0x3C003C00;
            cvt.rn.satfinite.f16x2.f32 x0, $3, $2;
            cvt.rn.satfinite.f16x2.f32 x1, $5, $4;
            tanh.approx.f16x2 t0, x0;
            tanh.approx.f16x2 t1, x1;
            neg.f16x2 n0, t0;
            neg.f16x2 n1, t1;
            fma.rn.f16x2 n0, n0, t0, one;
            fma.rn.f16x2 n1, n1, t1, one;
            add.rn.f16x2 s0, t0, one;
            add.rn.f16x2 s1, t1, one;
            fma.rn.f16x2 $0, x0, n0, s0;
            fma.rn.f16x2 $1, x1, n1, s1;
        }""",
        "=r,=r,f,f,f,f",
        [h0, h1, h2, h3],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


# ---- tails ---------------------------------------------------------------------------------


@gluon.jit
def as_words(tile):
    """A tile of codes in shared memory as words of four."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.NVMMASharedLayout(columns, 32, 2)
    return tile._reinterpret(gl.int32, [rows, columns // 4], layout)


@gluon.jit
def rows_until(words, num_valid):
    """Words of a tile by rows, zeros from row num_valid on."""
    columns: gl.constexpr = words.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // columns, columns // 4], [4, 1], [1, 0])
    row = gl.arange(0, words.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    return gl.where(row < num_valid, words.load(layout), 0)


@gluon.jit
def columns_until(words, num_valid):
    """Words of a transposed tile, zeros from position num_valid on.

    The positions of a word are two neighbours and the two that stand 8 after them.
    """
    columns: gl.constexpr = words.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // columns, columns // 4], [4, 1], [1, 0])
    word = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))[None, :]
    left = num_valid - (word // 4 * 16 + word % 4 * 2)
    kept = gl.where(left > 0, 0xFF, 0) | gl.where(left > 1, 0xFF00, 0)
    kept = kept | gl.where(left > 8, 0xFF0000, 0) | gl.where(left > 9, -0x1000000, 0)
    return words.load(layout) & kept
