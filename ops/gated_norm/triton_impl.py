"""dropout(layer_norm(attn) * u) in Triton: one pass forward, one pass backward, no mask stored.

With u_bias, u is a pre-activation and silu(u + u_bias) gates: nobody writes the activated u.
Bytes, for rows of b bytes: 3 b a row forward, 5 b backward. FP32 arithmetic; kept for the backward
are attn, u, 8 bytes of statistics a row and the 8-byte seed of the mask. First derivatives only.
"""

# ruff: noqa: ANN001  a kernel's arguments are device values without a Python type

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.dropout.triton_mask import draw_seed, drop_below, keep_mask
from ops.norm.triton_impl import backward_of_rows
from ops.norm.triton_rows import (
    check_rows,
    column_sums,
    load_rows,
    load_stats,
    load_vector,
    num_processors,
    row_tiles,
    standardise,
    store_rows,
)
from ops.silu_split.triton_impl import sigmoid


def gated_norm(
    attn_THV: Tensor,
    u_THV: Tensor,
    *,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    u_bias_HV: Tensor | None,
    dropout: float,
) -> Tensor:
    """Return the gated rows (T, H * V); see `ops.gated_norm.gated_norm`. Drops out if asked to."""
    check_rows("gated_norm", attn_THV, attn_THV.shape[1] * attn_THV.shape[2])
    return _GatedNorm.apply(attn_THV, u_THV, weight, bias, u_bias_HV, eps, dropout)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attn: Tensor,
        u: Tensor,
        weight: Tensor,
        bias: Tensor,
        u_bias: Tensor | None,
        eps: float,
        dropout: float,
    ) -> Tensor:
        attn = attn.contiguous()
        u = u if u.stride(2) == 1 else u.contiguous()
        if u_bias is not None and u_bias.stride(1) != 1:
            u_bias = u_bias.contiguous()
        num_rows, num_heads, width = attn.shape
        stats = torch.empty((2, num_rows), dtype=torch.float32, device=attn.device)
        gated = attn.new_empty((num_rows, num_heads * width))
        seed = draw_seed(attn.device) if dropout > 0.0 else None
        if num_rows:
            tiles = row_tiles(gated)
            _forward_kernel[(triton.cdiv(num_rows, tiles.rows),)](
                attn,
                u,
                u_bias,
                weight,
                bias,
                seed,
                gated,
                stats,
                num_rows,
                eps,
                u.stride(0),
                u.stride(1),
                0 if u_bias is None else u_bias.stride(0),
                DROP_BELOW=drop_below(dropout),
                SCALE=1.0 / (1.0 - dropout),
                V=width,
                D=num_heads * width,
                BLOCK_D=tiles.block,
                ROWS=tiles.rows,
                num_warps=tiles.warps,
            )
        ctx.save_for_backward(attn, u, u_bias, weight, bias, stats, seed)
        ctx.dropout = dropout
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attn, u, u_bias, weight, bias, stats, seed = ctx.saved_tensors
        num_rows, num_heads, width = attn.shape
        dattn = torch.empty_like(attn)
        du = torch.empty_like(attn)
        if not num_rows:
            dweight, dbias = torch.zeros_like(weight), torch.zeros_like(bias)
            return dattn, du, dweight, dbias, None, None, None
        tiles = row_tiles(grad, persistent=True)
        num_tiles = triton.cdiv(num_rows, tiles.rows)
        programs = min(num_tiles, tiles.programs * num_processors(attn.device))
        partial = torch.empty(
            (2, programs, num_heads * width), dtype=torch.float32, device=attn.device
        )
        _backward_kernel[(programs,)](
            grad.contiguous(),
            attn,
            u,
            u_bias,
            weight,
            bias,
            stats,
            seed,
            dattn,
            du,
            partial,
            num_rows,
            num_tiles,
            u.stride(0),
            u.stride(1),
            0 if u_bias is None else u_bias.stride(0),
            DROP_BELOW=drop_below(ctx.dropout),
            SCALE=1.0 / (1.0 - ctx.dropout),
            V=width,
            D=num_heads * width,
            BLOCK_D=tiles.block,
            ROWS=tiles.rows,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
        )
        dweight, dbias = partial.sum(1).to(weight.dtype)
        return dattn, du, dweight, dbias, None, None, None


@triton.jit
def _load_heads(
    ptr, row, num_rows, stride, head_stride, V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows (ROWS, BLOCK) of a strided (num_rows, D // V, V) tensor, FP32."""
    col = tl.arange(0, BLOCK)[None, :]
    mask = row[:, None] < num_rows
    if BLOCK != D:
        mask = mask & (col < D)
    place = ptr + row.to(tl.int64)[:, None] * stride + (col // V) * head_stride + col % V
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_head_vector(ptr, head_stride, V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """A strided (D // V, V) parameter as one FP32 row (1, BLOCK); zeros past D."""
    col = tl.arange(0, BLOCK)[None, :]
    place = ptr + (col // V) * head_stride + col % V
    return tl.load(place, mask=col < D, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    attn_ptr,
    u_ptr,
    u_bias_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    gated_ptr,
    stats_ptr,
    num_rows,
    eps,
    u_stride,
    u_head_stride,
    u_bias_stride,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    attn = load_rows(attn_ptr, row, num_rows, D, BLOCK_D)
    u = _load_heads(u_ptr, row, num_rows, u_stride, u_head_stride, V, D, BLOCK_D)
    xhat = standardise(attn, stats_ptr, row, num_rows, eps, D, BLOCK_D)
    gated = xhat * load_vector(weight_ptr, D, BLOCK_D) + load_vector(bias_ptr, D, BLOCK_D)
    if u_bias_ptr is not None:
        u += _load_head_vector(u_bias_ptr, u_bias_stride, V, D, BLOCK_D)
        u *= sigmoid(u)
    gated *= u
    if seed_ptr is not None:
        keep = keep_mask(tl.load(seed_ptr), row, DROP_BELOW, ROWS, BLOCK_D)
        gated = tl.where(keep, gated * SCALE, 0.0)
    store_rows(gated_ptr, row, num_rows, gated, D, BLOCK_D)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _backward_kernel(
    grad_ptr,
    attn_ptr,
    u_ptr,
    u_bias_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    seed_ptr,
    dattn_ptr,
    du_ptr,
    partial_ptr,
    num_rows,
    num_tiles,
    u_stride,
    u_head_stride,
    u_bias_stride,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program p takes the row tiles p, p + programs, ...; partial is (2, programs, D)."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    weight = load_vector(weight_ptr, D, BLOCK_D)
    bias = load_vector(bias_ptr, D, BLOCK_D)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    if u_bias_ptr is not None:
        u_bias = _load_head_vector(u_bias_ptr, u_bias_stride, V, D, BLOCK_D)
    dweight = tl.full([BLOCK_D], 0.0, tl.float32)
    dbias = tl.full([BLOCK_D], 0.0, tl.float32)
    for tile in tl.range(program, num_tiles, programs, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        grad = load_rows(grad_ptr, row, num_rows, D, BLOCK_D)
        attn = load_rows(attn_ptr, row, num_rows, D, BLOCK_D)
        u = _load_heads(u_ptr, row, num_rows, u_stride, u_head_stride, V, D, BLOCK_D)
        mean, rstd = load_stats(stats_ptr, row, num_rows)
        if seed_ptr is not None:
            keep = keep_mask(seed, row, DROP_BELOW, ROWS, BLOCK_D)
            grad = tl.where(keep, grad * SCALE, 0.0)
        xhat = (attn - mean) * rstd
        du = grad * (xhat * weight + bias)
        if u_bias_ptr is not None:
            u += u_bias
            gate = sigmoid(u)
            du *= gate + u * gate * (1.0 - gate)
            u *= gate
        store_rows(du_ptr, row, num_rows, du, D, BLOCK_D)
        grad *= u
        dweight += column_sums(grad * xhat)
        dbias += column_sums(grad)
        dattn = backward_of_rows(grad * weight, xhat, rstd, D)
        store_rows(dattn_ptr, row, num_rows, dattn, D, BLOCK_D)
    col = tl.arange(0, BLOCK_D)
    place = partial_ptr + program.to(tl.int64) * D + col
    tl.store(place, dweight, mask=col < D)
    tl.store(place + programs.to(tl.int64) * D, dbias, mask=col < D)
