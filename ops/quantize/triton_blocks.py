"""FP8 with a scale a row, or a scale a block of 128, in Triton: scales of the present values.

Bytes an entry of b bytes: rows b read (twice where a row is wider than a tile, the second time out
of the L2 cache), 1 written; blocks b read, 1 written an orientation.

Scales of blocks are laid out as cuBLASLt reads them: the index that is summed over outermost.
"""

# ruff: noqa: ANN001  a kernel's arguments are device values without a Python type

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.norm.triton_sums import sum_partials
from ops.quantize.triton_cast import (
    load_four,
    pack_four,
    running_maximum,
    scale_of,
    to_fp8,
)
from ops.quantize.triton_impl import TRITON_FP8, check_castable
from ops.triton_launch import cdiv, launch, next_power_of_2

BLOCK = 128
_ROW_TILE = (8, 512)  # rows, columns
_ROW_WARPS = 8
_BLOCK_WARPS = 16


def cast_each_row(x_TK: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows in FP8 (T, K), each with a scale of its own, and scale_inv (T, 1).

    Args:
        x_TK: contiguous, T at least 1, float32, bfloat16 or float16.
        fp8_dtype: float8_e4m3fn or float8_e5m2.

    Raises:
        NotImplementedError: a dtype, or more rows, than the kernel has.
    """
    check_castable(x_TK)
    num_rows, width = x_TK.shape
    values = torch.empty((num_rows, width), dtype=fp8_dtype, device=x_TK.device)
    scale_inv = torch.empty((num_rows, 1), dtype=torch.float32, device=x_TK.device)
    rows, columns = _ROW_TILE
    launch(
        _rows_kernel,
        (cdiv(num_rows, rows),),
        {
            "x_ptr": x_TK,
            "values_ptr": values,
            "scale_inv_ptr": scale_inv,
            "num_rows": num_rows,
            "K": width,
            "ROWS": rows,
            "COLS": min(columns, max(16, next_power_of_2(width))),
            "FP8": TRITON_FP8[fp8_dtype],
        },
        num_warps=_ROW_WARPS,
    )
    return values, scale_inv


def cast_strips(
    x_TK: Tensor, fp8_dtype: torch.dtype, *, sums_dtype: torch.dtype | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor | None]:
    """Return rows in FP8 with a scale for 128 neighbours along each orientation.

    P is T rounded up to 128; what is past T is zero.

    Args:
        x_TK: as in `cast_each_row`.
        fp8_dtype: of the values.
        sums_dtype: of sums by column; None: no sums.

    Returns:
        Values (P, K) and their scale_inv (P, ceil(K / 128)), strides (1, P); transposed values
        (K, P) and theirs (K, P / 128), strides (1, K); sums (K,).

    Raises:
        NotImplementedError: a dtype, or more rows, than the kernel has.
    """
    check_castable(x_TK)
    num_rows, width = x_TK.shape
    device = x_TK.device
    row_blocks, blocks = cdiv(num_rows, BLOCK), cdiv(width, BLOCK)
    padded = row_blocks * BLOCK
    values = torch.empty((padded, width), dtype=fp8_dtype, device=device)
    transposed = torch.empty((width, padded), dtype=fp8_dtype, device=device)
    along_rows = torch.empty((blocks, padded), dtype=torch.float32, device=device)
    along_columns = torch.empty((row_blocks, width), dtype=torch.float32, device=device)
    partial = None
    if sums_dtype is not None:
        partial = torch.empty((row_blocks, width), dtype=torch.float32, device=device)
    launch(
        _strips_kernel,
        (row_blocks * blocks,),
        {
            "x_ptr": x_TK,
            "values_ptr": values,
            "transposed_ptr": transposed,
            "along_rows_ptr": along_rows,
            "along_columns_ptr": along_columns,
            "sums_ptr": partial,
            "num_rows": num_rows,
            "padded": padded,
            "K": width,
            "FP8": TRITON_FP8[fp8_dtype],
        },
        num_warps=_BLOCK_WARPS,
    )
    sums = None
    if partial is not None and sums_dtype is not None:
        sums = sum_partials(partial, dtype=sums_dtype)
    return (values, along_rows.t()), (transposed, along_columns.t()), sums


def cast_squares(
    weight_NK: Tensor, fp8_dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a weight in FP8, a scale for 128 x 128, in both orientations.

    Args:
        weight_NK: contiguous; N and K multiples of 16.
        fp8_dtype: of the values.

    Returns:
        Values (N, K) and scale_inv (L, ceil(N / 128)), L = ceil(K / 128) rounded up to 4, strides
        (1, L), zeros in between; the same of the transposed weight.
    """
    check_castable(weight_NK)
    out_features, in_features = weight_NK.shape
    out_blocks, in_blocks = cdiv(out_features, BLOCK), cdiv(in_features, BLOCK)
    device = weight_NK.device
    values = torch.empty((out_features, in_features), dtype=fp8_dtype, device=device)
    transposed = torch.empty((in_features, out_features), dtype=fp8_dtype, device=device)
    scale = torch.zeros((out_blocks, -(-in_blocks // 4) * 4), device=device)
    scale_transposed = torch.zeros((in_blocks, -(-out_blocks // 4) * 4), device=device)
    launch(
        _squares_kernel,
        (out_blocks * in_blocks,),
        {
            "x_ptr": weight_NK,
            "values_ptr": values,
            "transposed_ptr": transposed,
            "scale_ptr": scale,
            "scale_transposed_ptr": scale_transposed,
            "num_rows": out_features,
            "K": in_features,
            "STRIDE": scale.shape[1],
            "STRIDE_TRANSPOSED": scale_transposed.shape[1],
            "FP8": TRITON_FP8[fp8_dtype],
        },
        num_warps=_BLOCK_WARPS,
    )
    return (values, scale.t()), (transposed, scale_transposed.t())


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    """Largest |x| along an axis; NaN wins, so integers are compared."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.reduce(bits, AXIS, _larger).to(tl.float32, bitcast=True)


@triton.jit
def _load(ptr, row, col, num_rows, K: tl.constexpr):
    mask = (row < num_rows)[:, None] & (col < K)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * K + col[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_ptr,
    values_ptr,
    scale_inv_ptr,
    num_rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FP8: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    maxima = tl.full([ROWS, COLS], 0.0, tl.float32)
    for start in tl.range(0, K, COLS):
        col = start + tl.arange(0, COLS)
        x = _load(x_ptr, row, col, num_rows, K)
        maxima = running_maximum(maxima, x.to(tl.float32))
    scale = scale_of(_largest(maxima, 1), FP8, 0)
    place = scale_inv_ptr + row.to(tl.int64)
    tl.store(place, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale), mask=row < num_rows)
    for start in tl.range(0, K, COLS):
        col = start + tl.arange(0, COLS)
        x = _load(x_ptr, row, col, num_rows, K)
        codes = to_fp8(x.to(tl.float32) * scale[:, None], FP8)
        mask = (row < num_rows)[:, None] & (col < K)[None, :]
        tl.store(values_ptr + row.to(tl.int64)[:, None] * K + col[None, :], codes, mask=mask)


@triton.jit
def _store_strip(
    values_ptr, along_rows_ptr, x, row, col, block, padded, K: tl.constexpr, FP8: tl.constexpr
):
    """Scale each row of a quarter by itself and write it."""
    scale = scale_of(_largest(x, 1), FP8, 0)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    tl.store(along_rows_ptr + block.to(tl.int64) * padded + row, inverse)
    place = values_ptr + row.to(tl.int64)[:, None] * K + col[None, :]
    tl.store(place, to_fp8(x * scale[:, None], FP8), mask=(col < K)[None, :])


@triton.jit
def _store_words(ptr, x0, x1, x2, x3, word, col, num_words, K: tl.constexpr, FP8: tl.constexpr):
    """Write scaled quarters transposed, a word at a time."""
    num_words = tl.multiple_of(num_words, 4)
    mask = (col < K)[:, None] & (word < num_words)[None, :]
    place = ptr.to(tl.pointer_type(tl.int32))
    place = place + col.to(tl.int64)[:, None] * num_words + word[None, :]
    tl.store(place, tl.trans(pack_four(x0, x1, x2, x3, FP8)), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _strips_kernel(
    x_ptr,
    values_ptr,
    transposed_ptr,
    along_rows_ptr,
    along_columns_ptr,
    sums_ptr,
    num_rows,
    padded,
    K: tl.constexpr,
    FP8: tl.constexpr,
):
    """A square of 128 x 128: a scale for each of its rows, and one for each of its columns."""
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    block = tl.program_id(0) % NUM_BLOCKS
    row_block = tl.program_id(0) // NUM_BLOCKS
    col = block * 128 + tl.arange(0, 128)
    word = row_block * 32 + tl.arange(0, 32)
    row = 4 * word
    IS_EVEN: tl.constexpr = K % 128 == 0
    x0, x1, x2, x3 = load_four(x_ptr, row, col, K, col < K, num_rows, IS_EVEN)
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    _store_strip(values_ptr, along_rows_ptr, x0, row, col, block, padded, K, FP8)
    _store_strip(values_ptr, along_rows_ptr, x1, row + 1, col, block, padded, K, FP8)
    _store_strip(values_ptr, along_rows_ptr, x2, row + 2, col, block, padded, K, FP8)
    _store_strip(values_ptr, along_rows_ptr, x3, row + 3, col, block, padded, K, FP8)
    place = row_block.to(tl.int64) * K + col
    if sums_ptr is not None:
        sums = tl.reduce((x0 + x1) + (x2 + x3), 0, tl.standard._sum_combine)
        tl.store(sums_ptr + place, sums, mask=col < K)
    maxima = running_maximum(running_maximum(tl.abs(x0), x1), x2)
    scale = scale_of(_largest(running_maximum(maxima, x3), 0), FP8, 0)
    inverse = tl.div_rn(tl.full([128], 1.0, tl.float32), scale)
    tl.store(along_columns_ptr + place, inverse, mask=col < K)
    scale = scale[None, :]
    _store_words(
        transposed_ptr,
        x0 * scale,
        x1 * scale,
        x2 * scale,
        x3 * scale,
        word,
        col,
        padded // 4,
        K,
        FP8,
    )


@triton.jit
def _squares_kernel(
    x_ptr,
    values_ptr,
    transposed_ptr,
    scale_ptr,
    scale_transposed_ptr,
    num_rows,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    STRIDE_TRANSPOSED: tl.constexpr,
    FP8: tl.constexpr,
):
    """A square of 128 x 128 with one scale."""
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    block = tl.program_id(0) % NUM_BLOCKS
    row_block = tl.program_id(0) // NUM_BLOCKS
    col = block * 128 + tl.arange(0, 128)
    word = row_block * 32 + tl.arange(0, 32)
    row = 4 * word
    x0, x1, x2, x3 = load_four(x_ptr, row, col, K, col < K, num_rows, False)
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    maxima = running_maximum(running_maximum(tl.abs(x0), x1), x2)
    scale = scale_of(_largest(_largest(running_maximum(maxima, x3), 1), 0), FP8, 0)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), scale)
    tl.store(scale_ptr + row_block * STRIDE + block, inverse)
    tl.store(scale_transposed_ptr + block * STRIDE_TRANSPOSED + row_block, inverse)
    x0, x1, x2, x3 = x0 * scale, x1 * scale, x2 * scale, x3 * scale
    _store_square(values_ptr, x0, row, col, num_rows, K, FP8)
    _store_square(values_ptr, x1, row + 1, col, num_rows, K, FP8)
    _store_square(values_ptr, x2, row + 2, col, num_rows, K, FP8)
    _store_square(values_ptr, x3, row + 3, col, num_rows, K, FP8)
    _store_words(transposed_ptr, x0, x1, x2, x3, word, col, num_rows // 4, K, FP8)


@triton.jit
def _store_square(ptr, x, row, col, num_rows, K: tl.constexpr, FP8: tl.constexpr):
    mask = (row < num_rows)[:, None] & (col < K)[None, :]
    tl.store(ptr + row.to(tl.int64)[:, None] * K + col[None, :], to_fp8(x, FP8), mask=mask)
