"""dropout(layer_norm(attn) * u) straight to FP8, both orientations and the maximum.

Bytes, for rows of b bytes: 2 b read, 1 written an orientation; rows of attn are read a second time,
out of the L2 cache, as `ops.norm.triton_fp8` does. The gated rows are rounded to the dtype of attn
before they are scaled, so the result is that of `gate_forward` followed by `cast_rows`, with the
same dropout mask for the same key. `gate_backward` is the backward pass of both.
"""

# ruff: noqa: ANN001  a kernel's arguments are device values without a Python type

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.dropout.triton_mask import draw_key, drop_below
from ops.gated_norm.triton_impl import Kept, gate_rows
from ops.norm.triton_fp8 import row_statistics, store_statistics
from ops.norm.triton_rows import check_rows, load_stats
from ops.quantize.operand import CastRule, Fp8Operand
from ops.quantize.triton_cast import INTERPRETED, MAX_PROGRAMS, begin, emit, finish, load_four
from ops.quantize.triton_impl import Tuning, empty_operand, num_row_tiles, run_cast
from ops.triton_launch import next_power_of_2

TUNING = Tuning(rows=32, columns=128, stages=1)


def gate_cast(
    attn_THV: Tensor,
    u_THV: Tensor,
    *,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    u_bias_HV: Tensor | None,
    dropout: float,
    rule: CastRule,
    row_multiple: int = 16,
    wants_transposed: bool = True,
    wants_gated: bool = False,
) -> tuple[Fp8Operand, Tensor | None, Kept, int]:
    """Return the gated rows in FP8 and, if asked for, in their dtype; then as `gate_forward`.

    No autograd.

    Args:
        attn_THV: T at least 1.
        u_THV: the gate, or before bias and SiLU where u_bias_HV is given.
        weight: of the norm (H * V,) float32, as is bias.
        bias: (H * V,).
        eps: added to the variance.
        u_bias_HV: (H, V) or None.
        dropout: probability.
        rule: of the cast.
        row_multiple: of the columns of the transposed copy, a multiple of 16.
        wants_transposed: make that copy.
        wants_gated: write the rows in the dtype of attn as well.

    Raises:
        NotImplementedError: rows that the kernels do not have.
    """
    num_rows, num_heads, head_width = attn_THV.shape
    width = num_heads * head_width
    check_rows("gated_norm", attn_THV, width)
    attn = attn_THV.contiguous()
    u = u_THV if u_THV.stride(2) == 1 else u_THV.contiguous()
    u_bias = u_bias_HV
    if u_bias is not None and u_bias.stride(1) != 1:
        u_bias = u_bias.contiguous()
    key = draw_key(attn.device) if dropout > 0.0 else 0
    out = empty_operand(
        num_rows,
        width,
        rule,
        device=attn.device,
        row_multiple=row_multiple,
        wants_transposed=wants_transposed,
    )
    stats = torch.empty((2, num_rows), dtype=torch.float32, device=attn.device)
    gated = attn.new_empty((num_rows, width)) if wants_gated else None
    tuning = TUNING
    num_tiles = num_row_tiles(out, num_rows, tuning.rows)
    run_cast(
        _gate_cast_kernel,
        min(num_tiles, MAX_PROGRAMS) if rule.scale is None else num_tiles,
        {
            "attn_ptr": attn,
            "u_ptr": u,
            "u_bias_ptr": u_bias,
            "weight_ptr": weight,
            "bias_ptr": bias,
            "stats_ptr": stats,
            "gated_ptr": gated,
            "key": key,
            "num_rows": num_rows,
            "num_tiles": num_tiles,
            "eps": eps,
            "u_stride": u.stride(0),
            "u_head_stride": u.stride(1),
            "u_bias_stride": 0 if u_bias is None else u_bias.stride(0),
            "DROP_BELOW": drop_below(dropout) if key else 0,
            "SCALE": 1.0 / (1.0 - dropout),
            "V": head_width,
            "D": width,
            "ROWS": tuning.rows,
            "COLS": min(tuning.columns, max(16, next_power_of_2(width))),
            "STAGES": 1 if INTERPRETED else tuning.stages,
        },
        rule,
        out,
        tuning,
    )
    return out, gated, (attn, u, u_bias, weight, bias, stats), key


@triton.jit
def _gated(
    attn,
    u,
    mean,
    rstd,
    weight,
    bias,
    u_bias,
    key,
    row,
    start,
    num_rows,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
):
    """A quarter of a tile: gated rows, rounded to the dtype of attn, in FP32; zero past the last.

    start: the tile's first column.
    """
    xhat = (attn.to(tl.float32) - mean) * rstd
    y = gate_rows(
        xhat,
        u.to(tl.float32),
        weight,
        bias,
        u_bias,
        key,
        row,
        DROP_BELOW,
        SCALE,
        attn.shape[0],
        attn.shape[1],
        start,
    )
    y = tl.where(row[:, None] < num_rows, y, 0.0)
    return y.to(attn.dtype).to(tl.float32)


@triton.jit(
    do_not_specialize=["key", "num_rows", "num_tiles", "num_maxima"],
    do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"],  # entries of one tensor
)
def _gate_cast_kernel(
    attn_ptr,
    u_ptr,
    u_bias_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    gated_ptr,
    scale_ptr,
    maxima_ptr,
    amax_ptr,
    measured_ptr,
    values_ptr,
    transposed_ptr,
    scale_inv_ptr,
    key,
    num_rows,
    num_tiles,
    num_maxima,
    padded,
    eps,
    u_stride,
    u_head_stride,
    u_bias_stride,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """Program p takes the row tiles p, p + programs, ...

    measured_ptr: leave a maximum there, and statistics, and write nothing else.
    """
    QUARTER: tl.constexpr = ROWS // 4
    IS_EVEN: tl.constexpr = D % COLS == 0
    WRITES: tl.constexpr = measured_ptr is None
    TRACKS: tl.constexpr = not WRITES or (maxima_ptr is None and amax_ptr is not None)
    maxima = tl.full([QUARTER, COLS // 4], 0.0, tl.float32)
    scale = None
    if WRITES:
        scale = begin(scale_ptr, maxima_ptr, num_maxima, amax_ptr, scale_inv_ptr, FP8, MARGIN)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        word = tile * QUARTER + tl.arange(0, QUARTER)
        row = 4 * word
        if maxima_ptr is not None:
            mean0, rstd0 = load_stats(stats_ptr, row, num_rows)
            mean1, rstd1 = load_stats(stats_ptr, row + 1, num_rows)
            mean2, rstd2 = load_stats(stats_ptr, row + 2, num_rows)
            mean3, rstd3 = load_stats(stats_ptr, row + 3, num_rows)
        else:
            mean0, mean1, mean2, mean3, rstd0, rstd1, rstd2, rstd3 = row_statistics(
                attn_ptr, row, num_rows, eps, D, COLS, STAGES
            )
            store_statistics(stats_ptr, row, num_rows, mean0, rstd0)
            store_statistics(stats_ptr, row + 1, num_rows, mean1, rstd1)
            store_statistics(stats_ptr, row + 2, num_rows, mean2, rstd2)
            store_statistics(stats_ptr, row + 3, num_rows, mean3, rstd3)
        for start in tl.range(0, D, COLS):
            col = start + tl.arange(0, COLS)
            inside = col < D
            weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]
            bias = tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]
            u_bias = None
            if u_bias_ptr is not None:
                place = u_bias_ptr + (col // V) * u_bias_stride + col % V
                u_bias = tl.load(place, mask=inside, other=0.0).to(tl.float32)[None, :]
            u_col = (col // V) * u_head_stride + col % V
            x0, x1, x2, x3 = load_four(attn_ptr, row, col, D, inside, num_rows, IS_EVEN)
            u0, u1, u2, u3 = load_four(u_ptr, row, u_col, u_stride, inside, num_rows, IS_EVEN)
            x0 = _gated(
                x0, u0, mean0, rstd0, weight, bias, u_bias, key, row, start, num_rows,
                DROP_BELOW, SCALE,
            )  # fmt: skip
            x1 = _gated(
                x1, u1, mean1, rstd1, weight, bias, u_bias, key, row + 1, start, num_rows,
                DROP_BELOW, SCALE,
            )  # fmt: skip
            x2 = _gated(
                x2, u2, mean2, rstd2, weight, bias, u_bias, key, row + 2, start, num_rows,
                DROP_BELOW, SCALE,
            )  # fmt: skip
            x3 = _gated(
                x3, u3, mean3, rstd3, weight, bias, u_bias, key, row + 3, start, num_rows,
                DROP_BELOW, SCALE,
            )  # fmt: skip
            maxima = emit(
                x0,
                x1,
                x2,
                x3,
                maxima,
                scale,
                gated_ptr,
                values_ptr,
                transposed_ptr,
                word,
                col,
                inside,
                num_rows,
                padded,
                D,
                IS_EVEN,
                TRACKS,
                WRITES,
            )
    finish(maxima, amax_ptr, measured_ptr, TRACKS)
