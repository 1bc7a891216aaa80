"""Layer norm straight to FP8, both orientations and the maximum in one pass over memory.

Bytes, for rows of b bytes: b read, 1 written an orientation. A program takes whole rows: it sums
them first, then reads them again, out of the L2 cache, to normalise and cast column tile by column
tile. The normalised rows are rounded to the dtype of x before they are scaled, so the result is
that of `norm_forward` followed by `cast_rows`.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.norm.triton_rows import check_rows, load_stats
from ops.quantize.operand import CastRule, Fp8Operand
from ops.quantize.triton_cast import INTERPRETED, MAX_PROGRAMS, begin, emit, finish, load_four
from ops.quantize.triton_impl import Tuning, empty_operand, num_row_tiles, run_cast
from ops.triton_launch import next_power_of_2

TUNING = Tuning(rows=32, columns=128, stages=1)


def norm_cast(
    x_TD: Tensor,
    weight_D: Tensor,
    *,
    bias_D: Tensor,
    eps: float,
    rule: CastRule,
    row_multiple: int = 16,
    wants_values: bool = True,
    wants_transposed: bool = True,
    wants_normed: bool = False,
    stats: Tensor | None = None,
) -> tuple[Fp8Operand, Tensor | None, Tensor]:
    """Return the normalised rows in FP8, in the dtype of x if asked for, and their statistics.

    No autograd.

    Args:
        x_TD: contiguous, T at least 1.
        weight_D: (D,) float32, as is bias_D.
        bias_D: (D,).
        eps: added to the variance.
        rule: of the cast.
        row_multiple: of the columns of the transposed copy, a multiple of 16.
        wants_values, wants_transposed: which orientations.
        wants_normed: write the rows in the dtype of x as well.
        stats: of an earlier call for the same rows; None: computed. (2, T): mean and
            1 / sqrt(variance + eps).

    Raises:
        NotImplementedError: rows that the kernels do not have.
    """
    num_rows, width = x_TD.shape
    check_rows("layer_norm", x_TD, width)
    out = empty_operand(
        num_rows,
        width,
        rule,
        device=x_TD.device,
        row_multiple=row_multiple,
        wants_values=wants_values,
        wants_transposed=wants_transposed,
    )
    is_known = stats is not None
    if stats is None:
        stats = torch.empty((2, num_rows), dtype=torch.float32, device=x_TD.device)
    normed = torch.empty_like(x_TD) if wants_normed else None
    block = max(16, next_power_of_2(width))
    tuning = TUNING
    num_tiles = num_row_tiles(out, num_rows, tuning.rows)
    run_cast(
        _norm_cast_kernel,
        min(num_tiles, MAX_PROGRAMS) if rule.scale is None else num_tiles,
        {
            "x_ptr": x_TD,
            "weight_ptr": weight_D,
            "bias_ptr": bias_D,
            "stats_ptr": stats,
            "normed_ptr": normed,
            "num_rows": num_rows,
            "num_tiles": num_tiles,
            "eps": eps,
            "K": width,
            "ROWS": tuning.rows,
            "COLS": min(tuning.columns, block),
            "STAGES": 1 if INTERPRETED else tuning.stages,
            "IS_KNOWN": is_known,
        },
        rule,
        out,
        tuning,
    )
    return out, normed, stats


@triton.jit
def _row_sums(tile):
    return tl.reduce(tile, 1, tl.standard._sum_combine)[:, None]


@triton.jit
def _fold(total, squares, x, shift, is_inside, IS_EVEN: tl.constexpr):
    """Add a tile to running sums of x - shift and its square, (R / 4, COLS / 4) each."""
    x = x.to(tl.float32) - shift
    if not IS_EVEN:
        x = tl.where(is_inside[None, :], x, 0.0)
    # a thread holds four neighbours at least: these sums need no exchange
    x = tl.reshape(x, [x.shape[0], x.shape[1] // 4, 4])
    total += tl.reduce(x, 2, tl.standard._sum_combine)
    squares += tl.reduce(x * x, 2, tl.standard._sum_combine)
    return total, squares


@triton.jit
def _statistics(total, squares, shift, eps, K: tl.constexpr):
    """Mean and 1 / sqrt(variance + eps), (R / 4, 1) each."""
    total = _row_sums(total) * (1.0 / K)
    variance = _row_sums(squares) * (1.0 / K) - total * total
    variance = tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return shift + total, tl.rsqrt(variance + eps)


@triton.jit
def row_statistics(
    ptr, row, num_rows, eps, K: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr
):
    """Statistics of the rows row, row + 1, row + 2 and row + 3: four means, four reciprocals.

    One pass. Sums are of the distance to the mean of a row's first tile: without it the variance of
    rows far from zero would drown.
    """
    FIRST: tl.constexpr = 1.0 / (COLS if COLS < K else K)
    IS_EVEN: tl.constexpr = K % COLS == 0
    col = tl.arange(0, COLS)
    inside = col < K
    x0, x1, x2, x3 = load_four(ptr, row, col, K, inside, num_rows, IS_EVEN)
    shift0 = _row_sums(x0.to(tl.float32)) * FIRST
    shift1 = _row_sums(x1.to(tl.float32)) * FIRST
    shift2 = _row_sums(x2.to(tl.float32)) * FIRST
    shift3 = _row_sums(x3.to(tl.float32)) * FIRST
    zeros = tl.full([row.shape[0], COLS // 4], 0.0, tl.float32)
    sum0, square0 = _fold(zeros, zeros, x0, shift0, inside, IS_EVEN)
    sum1, square1 = _fold(zeros, zeros, x1, shift1, inside, IS_EVEN)
    sum2, square2 = _fold(zeros, zeros, x2, shift2, inside, IS_EVEN)
    sum3, square3 = _fold(zeros, zeros, x3, shift3, inside, IS_EVEN)
    for start in tl.range(COLS, K, COLS, num_stages=STAGES):
        col = start + tl.arange(0, COLS)
        inside = col < K
        x0, x1, x2, x3 = load_four(ptr, row, col, K, inside, num_rows, IS_EVEN)
        sum0, square0 = _fold(sum0, square0, x0, shift0, inside, IS_EVEN)
        sum1, square1 = _fold(sum1, square1, x1, shift1, inside, IS_EVEN)
        sum2, square2 = _fold(sum2, square2, x2, shift2, inside, IS_EVEN)
        sum3, square3 = _fold(sum3, square3, x3, shift3, inside, IS_EVEN)
    mean0, rstd0 = _statistics(sum0, square0, shift0, eps, K)
    mean1, rstd1 = _statistics(sum1, square1, shift1, eps, K)
    mean2, rstd2 = _statistics(sum2, square2, shift2, eps, K)
    mean3, rstd3 = _statistics(sum3, square3, shift3, eps, K)
    return mean0, mean1, mean2, mean3, rstd0, rstd1, rstd2, rstd3


@triton.jit
def store_statistics(stats_ptr, row, num_rows, mean, rstd):
    """Write statistics of a quarter to stats (2, num_rows)."""
    place = stats_ptr + row.to(tl.int64)[:, None]
    tl.store(place, mean, mask=row[:, None] < num_rows)
    tl.store(place + num_rows, rstd, mask=row[:, None] < num_rows)


@triton.jit
def _normed(x, mean, rstd, weight, bias):
    """Normalised rows, rounded to the dtype of x, in FP32."""
    y = (x.to(tl.float32) - mean) * rstd * weight + bias
    return y.to(x.dtype).to(tl.float32)


@triton.jit(
    do_not_specialize=["num_rows", "num_tiles", "num_maxima"],
    do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"],  # entries of one tensor
)
def _norm_cast_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    normed_ptr,
    scale_ptr,
    maxima_ptr,
    amax_ptr,
    measured_ptr,
    values_ptr,
    transposed_ptr,
    scale_inv_ptr,
    num_rows,
    num_tiles,
    num_maxima,
    padded,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_KNOWN: tl.constexpr,
    FP8: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """Program p takes the row tiles p, p + programs, ...

    measured_ptr: leave a maximum there, and statistics, and write nothing else.
    """
    QUARTER: tl.constexpr = ROWS // 4
    IS_EVEN: tl.constexpr = K % COLS == 0
    WRITES: tl.constexpr = measured_ptr is None
    TRACKS: tl.constexpr = not WRITES or (maxima_ptr is None and amax_ptr is not None)
    maxima = tl.full([QUARTER, COLS // 4], 0.0, tl.float32)
    scale = None
    if WRITES:
        scale = begin(scale_ptr, maxima_ptr, num_maxima, amax_ptr, scale_inv_ptr, FP8, MARGIN)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        word = tile * QUARTER + tl.arange(0, QUARTER)
        row = 4 * word
        if IS_KNOWN or maxima_ptr is not None:
            mean0, rstd0 = load_stats(stats_ptr, row, num_rows)
            mean1, rstd1 = load_stats(stats_ptr, row + 1, num_rows)
            mean2, rstd2 = load_stats(stats_ptr, row + 2, num_rows)
            mean3, rstd3 = load_stats(stats_ptr, row + 3, num_rows)
        else:
            mean0, mean1, mean2, mean3, rstd0, rstd1, rstd2, rstd3 = row_statistics(
                x_ptr, row, num_rows, eps, K, COLS, STAGES
            )
            store_statistics(stats_ptr, row, num_rows, mean0, rstd0)
            store_statistics(stats_ptr, row + 1, num_rows, mean1, rstd1)
            store_statistics(stats_ptr, row + 2, num_rows, mean2, rstd2)
            store_statistics(stats_ptr, row + 3, num_rows, mean3, rstd3)
        for start in tl.range(0, K, COLS):
            col = start + tl.arange(0, COLS)
            inside = col < K
            weight = tl.load(weight_ptr + col, mask=inside, other=0.0)[None, :]
            bias = tl.load(bias_ptr + col, mask=inside, other=0.0)[None, :]
            x0, x1, x2, x3 = load_four(x_ptr, row, col, K, inside, num_rows, IS_EVEN)
            x0 = _normed(x0, mean0, rstd0, weight, bias)
            x1 = _normed(x1, mean1, rstd1, weight, bias)
            x2 = _normed(x2, mean2, rstd2, weight, bias)
            x3 = _normed(x3, mean3, rstd3, weight, bias)
            # rows past the last would be biases
            x0 = tl.where(row[:, None] < num_rows, x0, 0.0)
            x1 = tl.where(row[:, None] + 1 < num_rows, x1, 0.0)
            x2 = tl.where(row[:, None] + 2 < num_rows, x2, 0.0)
            x3 = tl.where(row[:, None] + 3 < num_rows, x3, 0.0)
            maxima = emit(
                x0,
                x1,
                x2,
                x3,
                maxima,
                scale,
                normed_ptr,
                values_ptr,
                transposed_ptr,
                word,
                col,
                inside,
                num_rows,
                padded,
                K,
                IS_EVEN,
                TRACKS,
                WRITES,
            )
    finish(maxima, amax_ptr, measured_ptr, TRACKS)
