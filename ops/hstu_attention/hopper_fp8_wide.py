"""What the FP8 backward kernels of head dim 256 for Hopper share: slopes, codes of the gradients of
scores, scales, quarters of the head dim.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ops.hstu_attention.hopper_fp8_kernels import SCALE_ROWS, as_left_operand, in_fours
from ops.hstu_attention.hopper_kernels import zero_rows_past

# ---- arithmetic ----------------------------------------------------------------------------


@gluon.jit
def weight_and_slope_words(h, unit, ROWS: gl.constexpr, COLS: gl.constexpr):
    """`weight_words` and `slope_words`, of one tanh."""
    h0, h1, h2, h3 = in_fours(h, ROWS, COLS)
    p, s0, s1 = gl.inline_asm_elementwise(
        """{
            .reg .f32 t0, t1, t2, t3, n0, n1, n2, n3, s0, s1, s2, s3, u0, u1, u2, u3;
            .reg .b16 low, high;
            tanh.approx.f32 t0, $3;
            tanh.approx.f32 t1, $4;
            tanh.approx.f32 t2, $5;
            tanh.approx.f32 t3, $6;
            mul.f32 u0, $3, $7;
            mul.f32 u1, $4, $7;
            mul.f32 u2, $5, $7;
            mul.f32 u3, $6, $7;
            fma.rn.f32 u0, u0, t0, u0;
            fma.rn.f32 u1, u1, t1, u1;
            fma.rn.f32 u2, u2, t2, u2;
            fma.rn.f32 u3, u3, t3, u3;
            cvt.rn.satfinite.e4m3x2.f32 low, u1, u0;
            cvt.rn.satfinite.e4m3x2.f32 high, u3, u2;
            mov.b32 $0, {low, high};
            neg.f32 n0, t0;
            neg.f32 n1, t1;
            neg.f32 n2, t2;
            neg.f32 n3, t3;
            fma.rn.f32 n0, n0, t0, 0f3F800000;
            fma.rn.f32 n1, n1, t1, 0f3F800000;
            fma.rn.f32 n2, n2, t2, 0f3F800000;
            fma.rn.f32 n3, n3, t3, 0f3F800000;
            add.f32 s0, t0, 0f3F800000;
            add.f32 s1, t1, 0f3F800000;
            add.f32 s2, t2, 0f3F800000;
            add.f32 s3, t3, 0f3F800000;
            fma.rn.f32 s0, $3, n0, s0;
            fma.rn.f32 s1, $4, n1, s1;
            fma.rn.f32 s2, $5, n2, s2;
            fma.rn.f32 s3, $6, n3, s3;
            cvt.rn.f16x2.f32 $1, s1, s0;
            cvt.rn.f16x2.f32 $2, s3, s2;
        }""",
        "=&r,=&r,=&r,f,f,f,f,f",
        [h0, h1, h2, h3, unit],
        dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )
    return p, (s0, s1)


@gluon.jit
def slope_words(h, ROWS: gl.constexpr, COLS: gl.constexpr):
    """2 silu'(2 h) in FP16, two words for every word of codes; h is an accumulator.

    As `hopper_kernels.slopes`, but FP16: codes are made of it two at a time.
    """
    h0, h1, h2, h3 = in_fours(h, ROWS, COLS)
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 t0, t1, t2, t3, n0, n1, n2, n3, s0, s1, s2, s3;
            tanh.approx.f32 t0, $2;
            tanh.approx.f32 t1, $3;
            tanh.approx.f32 t2, $4;
            tanh.approx.f32 t3, $5;
            neg.f32 n0, t0;
            neg.f32 n1, t1;
            neg.f32 n2, t2;
            neg.f32 n3, t3;
            fma.rn.f32 n0, n0, t0, 0f3F800000;
            fma.rn.f32 n1, n1, t1, 0f3F800000;
            fma.rn.f32 n2, n2, t2, 0f3F800000;
            fma.rn.f32 n3, n3, t3, 0f3F800000;
            add.f32 s0, t0, 0f3F800000;
            add.f32 s1, t1, 0f3F800000;
            add.f32 s2, t2, 0f3F800000;
            add.f32 s3, t3, 0f3F800000;
            fma.rn.f32 s0, $2, n0, s0;
            fma.rn.f32 s1, $3, n1, s1;
            fma.rn.f32 s2, $4, n2, s2;
            fma.rn.f32 s3, $5, n3, s3;
            cvt.rn.f16x2.f32 $0, s1, s0;
            cvt.rn.f16x2.f32 $1, s3, s2;
        }""",
        "=r,=r,f,f,f,f",
        [h0, h1, h2, h3],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def gradient_words(dp, slope, factor, ROWS: gl.constexpr, COLS: gl.constexpr):
    """E4M3 codes, saturated, of factor dp slope, as words; FP16 on the way."""
    d0, d1, d2, d3 = in_fours(dp, ROWS, COLS)
    s0, s1 = slope
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 d0, d1, d2, d3;
            .reg .b32 e0, e1;
            .reg .b16 c0, c1;
            mul.f32 d0, $1, $7;
            mul.f32 d1, $2, $7;
            mul.f32 d2, $3, $7;
            mul.f32 d3, $4, $7;
            cvt.rn.f16x2.f32 e0, d1, d0;
            cvt.rn.f16x2.f32 e1, d3, d2;
            mul.rn.f16x2 e0, e0, $5;
            mul.rn.f16x2 e1, e1, $6;
            cvt.rn.satfinite.e4m3x2.f16x2 c0, e0;
            cvt.rn.satfinite.e4m3x2.f16x2 c1, e1;
            mov.b32 $0, {c0, c1};
        }""",
        "=r,f,f,f,f,r,r,f",
        [d0, d1, d2, d3, s0, s1, factor],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def halves(x, LAYOUT: gl.constexpr):
    """The first and the last 64 columns of an accumulator (64, 128); no instruction."""
    low, high = gl.split(x.reshape(64, 2, 64).permute(0, 2, 1))
    low = gl.convert_layout(low, LAYOUT, assert_trivial=True)
    return low, gl.convert_layout(high, LAYOUT, assert_trivial=True)


@gluon.jit
def words_beside(left, right):
    """Words (64, 16) of the first and of the last 64 columns of a tile as (64, 32)."""
    return gl.join(left, right).permute(0, 2, 1).reshape(64, 32)


# ---- tiles that go by ----------------------------------------------------------------------


@gluon.jit
def bring(desc, first, second, ring, full, free, count, STAGES: gl.constexpr):
    """Bring the count-th tile of all to its place in the ring."""
    stage = count % STAGES
    mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    place = ring.index(stage)._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    tma.async_copy_global_to_shared(desc, [first, second], full.index(stage), place)


@gluon.jit
def load_scale(scale_ptr, slot, first, head, num_heads, exists):
    """The scale of the tile that starts at a user's position `first`; 1 where there is none."""
    place = (slot + first // SCALE_ROWS).to(gl.int64) * num_heads + head
    return gl.load(scale_ptr + place, mask=exists, other=1.0)


@gluon.jit
def zero_codes_past(tile, num_valid, ROWS: gl.constexpr):
    """`zero_rows_past` of a tile of codes (ROWS, 256), a word of four at a time."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    zero_rows_past(tile._reinterpret(gl.int32, [ROWS, 64], layout), num_valid, ROWS)


# ---- quarters of the head dim --------------------------------------------------------------


@gluon.jit
def quarter(tile, INDEX: gl.constexpr):
    """A quarter of a transposed tile (256, positions) as a right operand (positions, 64)."""
    return tile.slice(INDEX * 64, 64, dim=0).permute((1, 0))


@gluon.jit
def add_product(gradient, words, tile, factor, zero, COLS: gl.constexpr):
    """gradient + factor codes tile, quarter by quarter, one product ahead of the sums.

    gradient: its four quarters (64, 64); words of codes (64, COLS); tile (256, COLS).
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 4)
    left = as_left_operand(words, 64, COLS, layout)
    g0, g1, g2, g3 = gradient
    c0 = warpgroup_mma(left, quarter(tile, 0), zero, use_acc=False, is_async=True)
    c1 = warpgroup_mma(left, quarter(tile, 1), zero, use_acc=False, is_async=True)
    c0 = warpgroup_mma_wait(num_outstanding=1, deps=(c0,))
    g0 += c0 * factor
    c2 = warpgroup_mma(left, quarter(tile, 2), zero, use_acc=False, is_async=True)
    c1 = warpgroup_mma_wait(num_outstanding=1, deps=(c1,))
    g1 += c1 * factor
    c3 = warpgroup_mma(left, quarter(tile, 3), zero, use_acc=False, is_async=True)
    c2 = warpgroup_mma_wait(num_outstanding=1, deps=(c2,))
    g2 += c2 * factor
    c3, words = warpgroup_mma_wait(num_outstanding=0, deps=(c3, words))
    g3 += c3 * factor
    return g0, g1, g2, g3


@gluon.jit
def store_half(base, stride, first, end, left, right, tile):
    """Store two quarters (64, 64) side by side to rows [first, end), by way of 16 KB of tile."""
    dtype: gl.constexpr = base.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    staged = tile._reinterpret(dtype, [64, 128], shared)
    staged.slice(0, 64, dim=1).store(left.to(dtype))
    staged.slice(64, 64, dim=1).store(right.to(dtype))
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))[None, :]
    at = base + row.to(gl.int64)[:, None] * stride + col
    gl.store(at, staged.load(layout), mask=(row < end)[:, None])


@gluon.jit
def store_quarters(base, stride, first, end, gradient, factor, tile):
    """Store factor gradient, its quarters (64, 64), to rows [first, end) of 256."""
    g0, g1, g2, g3 = gradient
    store_half(base, stride, first, end, g0 * factor, g1 * factor, tile)
    store_half(base + 128, stride, first, end, g2 * factor, g3 * factor, tile)


# ---- sums in BF16 --------------------------------------------------------------------------


@gluon.jit
def no_pairs(zero):
    """Four quarters of a gradient of zeros, two BF16 neighbours in a word: (64, 32) each."""
    even, _ = gl.split(zero.reshape(64, 32, 2))
    layout: gl.constexpr = even.type.layout
    words = gl.full([64, 32], 0, gl.int32, layout)
    return words, words, words, words


@gluon.jit
def _pairs(x):
    """An accumulator (64, 64) as BF16, two neighbours in a word."""
    even, odd = gl.split(x.reshape(64, 32, 2))
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _add_pairs(sums, pairs, factor):
    return gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [pairs, factor, sums], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def add_to_pairs(gradient, words, tile, factor, zero, COLS: gl.constexpr):
    """`add_product` to sums in BF16; factor: a power of two."""
    layout: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 4)
    left = as_left_operand(words, 64, COLS, layout)
    twice = (factor.to(gl.int32, bitcast=True) >> 16) * 0x10001
    g0, g1, g2, g3 = gradient
    sums = warpgroup_mma(left, quarter(tile, 0), zero, use_acc=False, is_async=True)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    pairs = _pairs(sums)
    sums = warpgroup_mma(left, quarter(tile, 1), zero, use_acc=False, is_async=True)
    g0 = _add_pairs(g0, pairs, twice)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    pairs = _pairs(sums)
    sums = warpgroup_mma(left, quarter(tile, 2), zero, use_acc=False, is_async=True)
    g1 = _add_pairs(g1, pairs, twice)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    pairs = _pairs(sums)
    sums = warpgroup_mma(left, quarter(tile, 3), zero, use_acc=False, is_async=True)
    g2 = _add_pairs(g2, pairs, twice)
    sums, words = warpgroup_mma_wait(num_outstanding=0, deps=(sums, words))
    g3 = _add_pairs(g3, _pairs(sums), twice)
    return g0, g1, g2, g3


@gluon.jit
def _unpacked(words, factor):
    """factor times the numbers of words (64, 32) of BF16 pairs, (64, 64) FP32."""
    even, odd = gl.inline_asm_elementwise(
        """{
            .reg .b32 even, odd;
            shl.b32 even, $2, 16;
            and.b32 odd, $2, 0xFFFF0000;
            mul.f32 $0, even, $3;
            mul.f32 $1, odd, $3;
        }""",
        "=&f,=&f,r,f",
        [words, factor],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    return gl.join(even, odd).reshape(64, 64)


@gluon.jit
def store_pairs(base, stride, first, end, gradient, factor, tile):
    """`store_quarters` of sums in BF16."""
    g0, g1, g2, g3 = gradient
    left = _unpacked(g0, factor)
    store_half(base, stride, first, end, left, _unpacked(g1, factor), tile)
    left = _unpacked(g2, factor)
    store_half(base + 128, stride, first, end, left, _unpacked(g3, factor), tile)
