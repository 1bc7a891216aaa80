"""dropout(layer_norm(attn) * u) in Triton: one pass forward, one pass backward, no mask stored.

With u_bias, u is a pre-activation and silu(u + u_bias) gates: nobody writes the activated u.
Bytes, for rows of b bytes: 3 b a row forward, 5 b backward. FP32 arithmetic; kept for the backward
are attn, u, 8 bytes of statistics a row and the mask's key. First derivatives only.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.dropout.triton_mask import draw_key, drop_below, keep_mask
from ops.norm.triton_impl import backward_of_rows
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
from ops.silu_split.triton_impl import sigmoid
from ops.triton_launch import launch

# of a thread, forward, half precision: by itself the compiler takes 72, and fewer warps fit
_REGISTERS_WITH_DROPOUT = 64


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
    return _GatedNorm.apply(attn_THV, u_THV, weight, bias, u_bias_HV, eps, dropout)


Kept = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]


def gate_forward(
    attn_THV: Tensor,
    u_THV: Tensor,
    *,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    u_bias_HV: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Kept, int]:
    """Return the gated rows, and tensors and mask key for `gate_backward`. No autograd."""
    check_rows("gated_norm", attn_THV, attn_THV.shape[1] * attn_THV.shape[2])
    attn = attn_THV.contiguous()
    u = u_THV if u_THV.stride(2) == 1 else u_THV.contiguous()
    u_bias = u_bias_HV
    if u_bias is not None and u_bias.stride(1) != 1:
        u_bias = u_bias.contiguous()
    num_rows, num_heads, width = attn.shape
    stats = torch.empty((2, num_rows), dtype=torch.float32, device=attn.device)
    gated = attn.new_empty((num_rows, num_heads * width))
    key = draw_key(attn.device) if dropout > 0.0 else 0
    if num_rows:
        kernel = "gate_forward_dropout" if key else "gate_forward"
        tiles = row_tiles(kernel, num_heads * width, attn.element_size())
        programs, num_tiles = tiles.split(num_rows, attn.device)
        launch(
            _forward_kernel,
            (programs,),
            {
                "attn_ptr": attn,
                "u_ptr": u,
                "u_bias_ptr": u_bias,
                "weight_ptr": weight,
                "bias_ptr": bias,
                "gated_ptr": gated,
                "stats_ptr": stats,
                "key": key,
                "num_rows": num_rows,
                "num_tiles": num_tiles,
                "eps": eps,
                "u_stride": u.stride(0),
                "u_head_stride": u.stride(1),
                "u_bias_stride": 0 if u_bias is None else u_bias.stride(0),
                "DROP_BELOW": drop_below(dropout) if key else 0,
                "SCALE": 1.0 / (1.0 - dropout),
                "V": width,
                "D": num_heads * width,
                "BLOCK_D": tiles.block,
                "ROWS": tiles.rows,
                "STAGES": 0 if tiles.programs is None else tiles.stages,
            },
            num_warps=tiles.warps,
            maxnreg=_REGISTERS_WITH_DROPOUT if key and attn.element_size() == 2 else None,
        )
    return gated, (attn, u, u_bias, weight, bias, stats), key


def gate_backward(
    grad_TD: Tensor, kept: Kept, *, dropout: float, key: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of attn, u (past bias and SiLU), weight and bias."""
    attn, u, u_bias, weight, bias, stats = kept
    num_rows, num_heads, width = attn.shape
    dattn = torch.empty_like(attn)
    du = torch.empty_like(attn)
    if not num_rows:
        dweight, dbias = torch.zeros_like(weight), torch.zeros_like(bias)
        return dattn, du, dweight, dbias
    kernel = "gate_backward_dropout" if key else "gate_backward"
    tiles = row_tiles(kernel, num_heads * width, attn.element_size())
    programs, num_tiles = tiles.split(num_rows, attn.device)
    partial = torch.empty(
        (programs, 2 * num_heads * width), dtype=torch.float32, device=attn.device
    )
    launch(
        _backward_kernel,
        (programs,),
        {
            "grad_ptr": grad_TD.contiguous(),
            "attn_ptr": attn,
            "u_ptr": u,
            "u_bias_ptr": u_bias,
            "weight_ptr": weight,
            "bias_ptr": bias,
            "stats_ptr": stats,
            "dattn_ptr": dattn,
            "du_ptr": du,
            "partial_ptr": partial,
            "key": key,
            "num_rows": num_rows,
            "num_tiles": num_tiles,
            "u_stride": u.stride(0),
            "u_head_stride": u.stride(1),
            "u_bias_stride": 0 if u_bias is None else u_bias.stride(0),
            "DROP_BELOW": drop_below(dropout) if key else 0,
            "SCALE": 1.0 / (1.0 - dropout),
            "V": width,
            "D": num_heads * width,
            "BLOCK_D": tiles.block,
            "ROWS": tiles.rows,
            "STAGES": tiles.stages,
        },
        num_warps=tiles.warps,
    )
    dweight, dbias = sum_partials(partial, dtype=weight.dtype).split(num_heads * width)
    return dattn, du, dweight, dbias


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
        gated, kept, ctx.key = gate_forward(
            attn, u, weight=weight, bias=bias, eps=eps, u_bias_HV=u_bias, dropout=dropout
        )
        ctx.save_for_backward(*kept)
        ctx.dropout = dropout
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = gate_backward(grad, ctx.saved_tensors, dropout=ctx.dropout, key=ctx.key)
        return *grads, None, None, None


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


@triton.jit
def gate_rows(
    xhat,
    u,
    weight,
    bias,
    u_bias,
    key,
    row,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    first=0,
):
    """dropout((xhat * weight + bias) * gate); u_bias None: u is the gate, else its pre-activation.

    A tile (ROWS, BLOCK_D) that begins in column `first`.
    The mask zeroes the gate: behind the product, entries would be chosen after rounding, which
    packs two into a register, and packed once more.
    """
    if u_bias is not None:
        u += u_bias
        u *= sigmoid(u, SCALE)
    elif SCALE != 1.0:
        u *= SCALE
    if DROP_BELOW > 0:
        u = tl.where(keep_mask(key, row, DROP_BELOW, ROWS, BLOCK_D, first), u, 0.0)
    return (xhat * weight + bias) * u


@triton.jit(do_not_specialize=["key", "num_rows", "num_tiles"])
def _forward_kernel(
    attn_ptr,
    u_ptr,
    u_bias_ptr,
    weight_ptr,
    bias_ptr,
    gated_ptr,
    stats_ptr,
    key,
    num_rows,
    num_tiles,
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
    STAGES: tl.constexpr,
):
    """Program p takes the row tiles p, p + programs, ..., with STAGES = 0 tile p alone.

    SCALE: of what dropout keeps.
    """
    program = tl.program_id(0)
    u_bias = None
    if STAGES == 0:
        row = program * ROWS + tl.arange(0, ROWS)
        attn = load_rows(attn_ptr, row, num_rows, D, BLOCK_D)
        u = _load_heads(u_ptr, row, num_rows, u_stride, u_head_stride, V, D, BLOCK_D)
        xhat = standardise(attn, stats_ptr, row, num_rows, eps, D, BLOCK_D)
        # behind the sums: held across them, parameters would cost a third of all registers
        weight = load_vector(weight_ptr, D, BLOCK_D)
        bias = load_vector(bias_ptr, D, BLOCK_D)
        if u_bias_ptr is not None:
            u_bias = _load_head_vector(u_bias_ptr, u_bias_stride, V, D, BLOCK_D)
        gated = gate_rows(xhat, u, weight, bias, u_bias, key, row, DROP_BELOW, SCALE, ROWS, BLOCK_D)
        store_rows(gated_ptr, row, num_rows, gated, D, BLOCK_D)
    else:
        weight = load_vector(weight_ptr, D, BLOCK_D)
        bias = load_vector(bias_ptr, D, BLOCK_D)
        if u_bias_ptr is not None:
            u_bias = _load_head_vector(u_bias_ptr, u_bias_stride, V, D, BLOCK_D)
        for tile in tl.range(program, num_tiles, tl.num_programs(0), num_stages=STAGES):
            row = tile * ROWS + tl.arange(0, ROWS)
            attn = load_rows(attn_ptr, row, num_rows, D, BLOCK_D)
            u = _load_heads(u_ptr, row, num_rows, u_stride, u_head_stride, V, D, BLOCK_D)
            xhat = standardise(attn, stats_ptr, row, num_rows, eps, D, BLOCK_D)
            gated = gate_rows(
                xhat, u, weight, bias, u_bias, key, row, DROP_BELOW, SCALE, ROWS, BLOCK_D
            )
            store_rows(gated_ptr, row, num_rows, gated, D, BLOCK_D)


@triton.jit(do_not_specialize=["key", "num_rows", "num_tiles"])
def _backward_kernel(
    grad_ptr,
    attn_ptr,
    u_ptr,
    u_bias_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    dattn_ptr,
    du_ptr,
    partial_ptr,
    key,
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
    """Program p takes the row tiles p, p + programs, ...; partial is (programs, 2, D)."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    weight = load_vector(weight_ptr, D, BLOCK_D) * SCALE
    bias = load_vector(bias_ptr, D, BLOCK_D) * SCALE
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
        if DROP_BELOW > 0:
            keep = keep_mask(key, row, DROP_BELOW, ROWS, BLOCK_D)
            grad = tl.where(keep, grad, 0.0)
        xhat = (attn - mean) * rstd
        du = grad * (xhat * weight + bias)
        if u_bias_ptr is not None:
            u += u_bias
            gate = sigmoid(u)
            du *= gate * (1.0 + u * (1.0 - gate))
            u *= gate
        store_rows(du_ptr, row, num_rows, du, D, BLOCK_D)
        grad *= u
        dweight += column_sums(grad * xhat)
        dbias += column_sums(grad)
        dattn = backward_of_rows(grad * weight, xhat, rstd, D)
        store_rows(dattn_ptr, row, num_rows, dattn, D, BLOCK_D)
    col = tl.arange(0, BLOCK_D)
    place = partial_ptr + program.to(tl.int64) * (2 * D) + col
    tl.store(place, dweight * SCALE, mask=col < D)
    tl.store(place + D, dbias * SCALE, mask=col < D)
