"""What the quantising kernels share: scales, maxima, the cast, a tile in both orientations.

A tile of R rows is held as four quarters: quarter j has the rows 4 i + j. So four bytes that follow
one another in a transposed row are in one thread, which packs them into a word, and the
transposition through shared memory moves words: a quarter of the accesses that bytes would take.
Accesses along the rows stay as wide as those of a plain tile.

Casts saturate and NaN stays NaN, as the conversion instructions of compute capability 8.9 and later
have it. Triton's interpreter has no exact cast: there the code is computed in integers.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
MAX_PROGRAMS = 1024
"""Of a kernel that measures: each program leaves one maximum, and the next kernel reads all."""

_IN_INTERPRETER = tl.constexpr(INTERPRETED)
_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_LARGEST_SCALE = tl.constexpr(2.0**126)


@triton.jit
def fp8_max(FP8: tl.constexpr):
    """Largest finite value of a FP8 type."""
    return 448.0 if tl.float8e4nv == FP8 else 57344.0


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def running_maximum(maxima, x):
    """Elementwise larger of `maxima` and |x|; NaN wins."""
    return tl.maximum(maxima, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum_bits(maxima):
    """Largest entry of a non-negative FP32 tile as an integer: so ordered, NaN is above infinity.

    Returns a scalar.
    """
    bits = maxima.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.reduce(tl.reduce(bits, 1, _larger), 0, _larger)


@triton.jit
def record_maximum(amax_ptr, bits):
    """Fold a maximum into a one-element FP32 tensor: one integer atomic, the same in any order."""
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def store_maximum(maxima_ptr, bits):
    """Leave this program's maximum for `load_scale`."""
    tl.store(maxima_ptr.to(tl.pointer_type(tl.int32)) + tl.program_id(0), bits)


@triton.jit
def load_scale(
    scale_ptr, maxima_ptr, num_maxima, amax_ptr, FP8: tl.constexpr, MARGIN: tl.constexpr
):
    """The given scale, or else the one of the maxima that were left (`scale_from_amax`).

    With maxima, program 0 records the largest in amax_ptr, unless that is None.
    """
    if maxima_ptr is None:
        return tl.load(scale_ptr)
    else:
        index = tl.arange(0, _MAX_PROGRAMS)
        maxima_ptr = maxima_ptr.to(tl.pointer_type(tl.int32))
        bits = tl.load(maxima_ptr + index, mask=index < num_maxima, other=0)
        bits = tl.reduce(bits, 0, _larger)
        records = tl.program_id(0) == 0
        if amax_ptr is not None and records:
            record_maximum(amax_ptr, bits)
        return scale_of(bits.to(tl.float32, bitcast=True), FP8, MARGIN)


@triton.jit
def scale_of(amax, FP8: tl.constexpr, MARGIN: tl.constexpr):
    """What values are multiplied by, with the roundings of `scale_from_amax`; 1 for zero."""
    scale = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), amax * 2.0**MARGIN) * fp8_max(FP8)
    scale = tl.maximum(scale, _SMALLEST_SCALE, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.minimum(scale, _LARGEST_SCALE, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def begin(
    scale_ptr,
    maxima_ptr,
    num_maxima,
    amax_ptr,
    scale_inv_ptr,
    FP8: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """The scale of a kernel that writes; program 0 notes its reciprocal."""
    scale = load_scale(scale_ptr, maxima_ptr, num_maxima, amax_ptr, FP8, MARGIN)
    store_reciprocal(scale_inv_ptr, scale)
    return scale


@triton.jit
def store_reciprocal(scale_inv_ptr, scale):
    """Program 0 writes 1 / scale, correctly rounded."""
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, tl.div_rn(tl.full([], 1.0, tl.float32), scale))


@triton.jit
def to_fp8(x, FP8: tl.constexpr):
    """FP32 -> FP8, saturating, to the nearest, ties to even."""
    if _IN_INTERPRETER:
        return _code(x, FP8).to(tl.uint8).to(FP8, bitcast=True)
    else:
        return x.to(FP8)


@triton.jit
def pack_four(x0, x1, x2, x3, FP8: tl.constexpr):
    """Four FP32 -> one int32 of their FP8 codes, x0 in the lowest byte."""
    if _IN_INTERPRETER:
        low = _code(x0, FP8) | (_code(x1, FP8) << 8)
        return low | (_code(x2, FP8) << 16) | (_code(x3, FP8) << 24)
    elif tl.float8e4nv == FP8:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _code(x, FP8: tl.constexpr):
    """The FP8 code of FP32 entries, in int32."""
    MANTISSA: tl.constexpr = 3 if tl.float8e4nv == FP8 else 2
    BIAS: tl.constexpr = 7 if tl.float8e4nv == FP8 else 15
    SHIFT: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(x), fp8_max(FP8))
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    # adding 1.5 * 2**23 leaves the nearest integer in the low bits
    steps = size * 2.0 ** (BIAS - 1 + MANTISSA)
    subnormal = (steps + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def load_four(ptr, row, col, stride, is_inside, num_rows, IS_EVEN: tl.constexpr):
    """The quarters of a tile, as they are stored; zeros outside.

    One address and three distances: with an address for each quarter registers run out.

    Args:
        row: (R / 4,), rows of quarter 0.
        col, is_inside: (COLS,), columns, and which of them count (unless IS_EVEN, then all).
        stride: of the rows.
    """
    place = ptr + row.to(tl.int64)[:, None] * stride + col[None, :]
    below = num_rows - row[:, None]
    if IS_EVEN:
        x0 = tl.load(place, mask=below > 0, other=0.0)
        x1 = tl.load(place + stride, mask=below > 1, other=0.0)
        x2 = tl.load(place + 2 * stride, mask=below > 2, other=0.0)
        x3 = tl.load(place + 3 * stride, mask=below > 3, other=0.0)
    else:
        inside = is_inside[None, :]
        x0 = tl.load(place, mask=(below > 0) & inside, other=0.0)
        x1 = tl.load(place + stride, mask=(below > 1) & inside, other=0.0)
        x2 = tl.load(place + 2 * stride, mask=(below > 2) & inside, other=0.0)
        x3 = tl.load(place + 3 * stride, mask=(below > 3) & inside, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def _store_rows(
    ptr, x0, x1, x2, x3, row, col, is_inside, num_rows, K: tl.constexpr, IS_EVEN: tl.constexpr
):
    """Write quarters to a contiguous (num_rows, K) matrix; row: those of quarter 0."""
    place = ptr + row.to(tl.int64)[:, None] * K + col[None, :]
    below = num_rows - row[:, None]
    TYPE: tl.constexpr = ptr.dtype.element_ty
    if IS_EVEN:
        tl.store(place, _as(x0, TYPE), mask=below > 0)
        tl.store(place + K, _as(x1, TYPE), mask=below > 1)
        tl.store(place + 2 * K, _as(x2, TYPE), mask=below > 2)
        tl.store(place + 3 * K, _as(x3, TYPE), mask=below > 3)
    else:
        inside = is_inside[None, :]
        tl.store(place, _as(x0, TYPE), mask=(below > 0) & inside)
        tl.store(place + K, _as(x1, TYPE), mask=(below > 1) & inside)
        tl.store(place + 2 * K, _as(x2, TYPE), mask=(below > 2) & inside)
        tl.store(place + 3 * K, _as(x3, TYPE), mask=(below > 3) & inside)


@triton.jit
def _as(x, TYPE: tl.constexpr):
    if TYPE.primitive_bitwidth == 8:
        return to_fp8(x, TYPE)
    else:
        return x.to(TYPE)


@triton.jit
def _store_columns(ptr, x0, x1, x2, x3, word, col, is_inside, padded, IS_EVEN: tl.constexpr):
    """Write quarters to a contiguous (K, padded) FP8 matrix, transposed; padded % 16 == 0."""
    num_words = tl.multiple_of(padded // 4, 4)  # for 16-byte stores
    mask = (word < num_words)[None, :]
    if not IS_EVEN:
        mask = mask & is_inside[:, None]
    place = ptr.to(tl.pointer_type(tl.int32))
    place = place + col.to(tl.int64)[:, None] * num_words + word[None, :]
    tl.store(place, tl.trans(pack_four(x0, x1, x2, x3, ptr.dtype.element_ty)), mask=mask)


@triton.jit
def emit(
    x0,
    x1,
    x2,
    x3,
    maxima,
    scale,
    plain_ptr,
    values_ptr,
    transposed_ptr,
    word,
    col,
    is_inside,
    num_rows,
    padded,
    K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TRACKS: tl.constexpr,
    WRITES: tl.constexpr,
):
    """Do with a tile what a cast does; return the running maxima.

    Args:
        x0, x1, x2, x3: quarters in FP32, zero past the last row.
        maxima: (R / 4, COLS / 4); updated where TRACKS.
        scale: values are multiplied by it; not read unless WRITES.
        plain_ptr, values_ptr, transposed_ptr: None where not wanted.
        word: (R / 4,), rows of quarter 0 divided by 4.
        col, is_inside: (COLS,), columns of a matrix K wide and which of them count (unless
            IS_EVEN, then all).
        padded: columns of the transposed matrix.
    """
    if TRACKS:
        largest = running_maximum(running_maximum(tl.abs(x0), x1), running_maximum(tl.abs(x2), x3))
        # a thread holds four neighbours at least: so many registers less, and no exchange
        largest = tl.reshape(largest, [x0.shape[0], x0.shape[1] // 4, 4])
        maxima = running_maximum(maxima, tl.reduce(largest, 2, _larger_or_nan))
    if WRITES:
        row = 4 * word
        if plain_ptr is not None:
            _store_rows(plain_ptr, x0, x1, x2, x3, row, col, is_inside, num_rows, K, IS_EVEN)
        x0, x1, x2, x3 = x0 * scale, x1 * scale, x2 * scale, x3 * scale
        if values_ptr is not None:
            _store_rows(values_ptr, x0, x1, x2, x3, row, col, is_inside, num_rows, K, IS_EVEN)
        if transposed_ptr is not None:
            _store_columns(transposed_ptr, x0, x1, x2, x3, word, col, is_inside, padded, IS_EVEN)
    return maxima


@triton.jit
def finish(maxima, amax_ptr, measured_ptr, TRACKS: tl.constexpr):
    """Leave this program's maximum where it is wanted."""
    if TRACKS:
        if measured_ptr is not None:
            store_maximum(measured_ptr, maximum_bits(maxima))
        else:
            record_maximum(amax_ptr, maximum_bits(maxima))
