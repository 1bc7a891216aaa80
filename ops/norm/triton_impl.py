"""Layer norm in Triton: one pass forward, one pass backward.

Bytes, for rows of b bytes: 2 b a row forward, 3 b backward, 4 b with a residual gradient. FP32
arithmetic whatever the dtype of the rows; mean and 1 / sqrt(variance + eps) are kept, 8 bytes a
row. First derivatives only.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.norm.triton_rows import (
    check_rows,
    column_sums,
    load_rows,
    load_stats,
    load_vector,
    row_tiles,
    standardise,
    store_rows,
)
from ops.norm.triton_sums import sum_partials
from ops.triton_launch import cdiv, launch


def layer_norm(x_TD: Tensor, weight_D: Tensor, *, bias_D: Tensor, eps: float) -> Tensor:
    """Return the normalised rows; see `ops.norm.layer_norm`."""
    rows = x_TD.reshape(-1, x_TD.shape[-1])
    return _LayerNorm.apply(rows, weight_D, bias_D, eps).view(x_TD.shape)


def norm_forward(
    x_TD: Tensor, weight_D: Tensor, *, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the normalised rows and stats (2, T): mean, 1 / sqrt(variance + eps). No autograd."""
    num_rows, width = x_TD.shape
    check_rows("layer_norm", x_TD, width)
    y_TD = torch.empty_like(x_TD)
    stats = torch.empty((2, num_rows), dtype=torch.float32, device=x_TD.device)
    if num_rows:
        tiles = row_tiles("norm_forward", width, x_TD.element_size())
        launch(
            _forward_kernel,
            (cdiv(num_rows, tiles.rows),),
            {
                "x_ptr": x_TD,
                "weight_ptr": weight_D,
                "bias_ptr": bias_D,
                "y_ptr": y_TD,
                "stats_ptr": stats,
                "num_rows": num_rows,
                "eps": eps,
                "D": width,
                "BLOCK_D": tiles.block,
                "ROWS": tiles.rows,
            },
            num_warps=tiles.warps,
        )
    return y_TD, stats


def norm_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    *,
    weight_D: Tensor,
    stats: Tensor,
    residual_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias, the latter two in the weight's dtype.

    Args:
        grad_TD: gradient of the normalised rows, contiguous, as are x_TD and residual_TD.
        x_TD: the rows that were normalised.
        weight_D: (D,).
        stats: of `norm_forward`.
        residual_TD: gradient that x receives past the norm; added in the same pass.
    """
    num_rows, width = x_TD.shape
    dx_TD = torch.empty_like(x_TD)
    if not num_rows:
        return dx_TD, torch.zeros_like(weight_D), torch.zeros_like(weight_D)
    tiles = row_tiles("norm_backward", width, x_TD.element_size())
    programs, num_tiles = tiles.split(num_rows, x_TD.device)
    partial = torch.empty((programs, 2 * width), dtype=torch.float32, device=x_TD.device)
    launch(
        _backward_kernel,
        (programs,),
        {
            "dy_ptr": grad_TD,
            "x_ptr": x_TD,
            "weight_ptr": weight_D,
            "stats_ptr": stats,
            "residual_ptr": residual_TD,
            "dx_ptr": dx_TD,
            "partial_ptr": partial,
            "num_rows": num_rows,
            "num_tiles": num_tiles,
            "D": width,
            "BLOCK_D": tiles.block,
            "ROWS": tiles.rows,
            "STAGES": tiles.stages,
        },
        num_warps=tiles.warps,
    )
    dweight, dbias = sum_partials(partial, dtype=weight_D.dtype).split(width)
    return dx_TD, dweight, dbias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y, stats = norm_forward(x, weight, bias_D=bias, eps=eps)
        ctx.save_for_backward(x, weight, stats)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, stats = ctx.saved_tensors
        return *norm_backward(grad.contiguous(), x, weight_D=weight, stats=stats), None


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stats_ptr,
    num_rows,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    weight = load_vector(weight_ptr, D, BLOCK_D)
    bias = load_vector(bias_ptr, D, BLOCK_D)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = load_rows(x_ptr, row, num_rows, D, BLOCK_D)
    xhat = standardise(x, stats_ptr, row, num_rows, eps, D, BLOCK_D)
    store_rows(y_ptr, row, num_rows, xhat * weight + bias, D, BLOCK_D)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    residual_ptr,
    dx_ptr,
    partial_ptr,
    num_rows,
    num_tiles,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program p takes the row tiles p, p + programs, ...; partial is (programs, 2, D)."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    weight = load_vector(weight_ptr, D, BLOCK_D)
    dweight = tl.full([BLOCK_D], 0.0, tl.float32)
    dbias = tl.full([BLOCK_D], 0.0, tl.float32)
    for tile in tl.range(program, num_tiles, programs, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        dy = load_rows(dy_ptr, row, num_rows, D, BLOCK_D)
        x = load_rows(x_ptr, row, num_rows, D, BLOCK_D)
        mean, rstd = load_stats(stats_ptr, row, num_rows)
        xhat = (x - mean) * rstd
        dweight += column_sums(dy * xhat)
        dbias += column_sums(dy)
        dx = backward_of_rows(dy * weight, xhat, rstd, D)
        if residual_ptr is not None:
            dx += load_rows(residual_ptr, row, num_rows, D, BLOCK_D)
        store_rows(dx_ptr, row, num_rows, dx, D, BLOCK_D)
    col = tl.arange(0, BLOCK_D)
    place = partial_ptr + program.to(tl.int64) * (2 * D) + col
    tl.store(place, dweight, mask=col < D)
    tl.store(place + D, dbias, mask=col < D)


@triton.jit
def backward_of_rows(grad, xhat, rstd, D: tl.constexpr):
    """Gradient of x from that of xhat; entries past D of `grad` are zero."""
    # both sums in one reduction: half the barriers
    sums = tl.reduce(tl.join(grad * xhat, grad), 1, tl.standard._sum_combine) * (1.0 / D)
    along, shift = tl.split(sums)
    # two fused multiply-adds an entry: these kernels are close to what the GPU can issue
    along, shift = -along[:, None] * rstd, -shift[:, None] * rstd
    return xhat * along + (grad * rstd + shift)
