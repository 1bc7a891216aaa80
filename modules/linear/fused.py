"""The linears of an HSTU layer on the Triton path: what autograd would keep or launch too much.

Weights stay float32; a forward pass casts them to the dtype of the rows and keeps the copy for its
backward pass. Weight gradients leave the matrix product in float32, unrounded. First derivatives
only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class NormLinearFunction(torch.autograd.Function):
    """x -> linear(layer_norm(x)) without the linear's bias, and x again for the residual.

    The gradient that x receives as the residual is added inside the norm's backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        eps: float,
        recompute_norm: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return uvqk (T, X) and x. recompute_norm: keep x and the statistics, not the rows."""
        from ops.norm.triton_impl import norm_forward

        rows = x.contiguous()
        normed, stats = norm_forward(rows, norm_weight, bias_D=norm_bias, eps=eps)
        kept = None if recompute_norm else normed
        cast = weight.to(x.dtype)
        ctx.save_for_backward(rows, norm_weight, norm_bias, cast, stats, kept)
        ctx.eps, ctx.weight_dtype = eps, weight.dtype
        ctx.set_materialize_grads(False)
        return F.linear(normed, cast), x

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return gradients of x, the norm's weight and bias, and the linear's weight."""
        from ops.norm.triton_impl import norm_backward, norm_forward

        if grad is None:
            return residual, None, None, None, None, None
        x, norm_weight, norm_bias, cast, stats, normed = ctx.saved_tensors
        if normed is None:
            normed, _ = norm_forward(x, norm_weight, bias_D=norm_bias, eps=ctx.eps)
        dweight = weight_gradient(grad, normed, dtype=ctx.weight_dtype)
        dx, dnorm_weight, dnorm_bias = norm_backward(
            grad @ cast,
            x,
            weight_D=norm_weight,
            stats=stats,
            residual_TD=None if residual is None else residual.contiguous(),
        )
        return dx, dnorm_weight, dnorm_bias, dweight, None, None


class GatedNormLinearFunction(torch.autograd.Function):
    """attn, u, residual -> residual + linear(dropout(layer_norm(attn) * u)).

    The GEMM adds the bias; the residual is added to its result in place (three passes over the rows
    are the least that leaves the GEMM to cuBLAS).
    """

    @staticmethod
    def forward(
        ctx: Any,
        attn: Tensor,
        u: Tensor,
        u_bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor,
        eps: float,
        dropout: float,
    ) -> Tensor:
        """Return (T, D) in the dtype of the rows. u_bias: u is a pre-activation."""
        from ops.gated_norm.triton_impl import gate_forward

        gated, kept, ctx.key = gate_forward(
            attn,
            u,
            weight=norm_weight,
            bias=norm_bias,
            eps=eps,
            u_bias_HV=u_bias,
            dropout=dropout,
        )
        cast = weight.to(gated.dtype)
        ctx.save_for_backward(*kept, gated, cast)
        ctx.dropout, ctx.weight_dtype, ctx.bias_dtype = dropout, weight.dtype, bias.dtype
        return F.linear(gated, cast, bias.to(gated.dtype)).add_(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of attn, u, the norm's and the linear's parameters, and residual."""
        from ops.gated_norm.triton_impl import gate_backward
        from ops.norm.triton_sums import sum_rows

        *kept, gated, cast = ctx.saved_tensors
        dweight = weight_gradient(grad, gated, dtype=ctx.weight_dtype)
        dbias = sum_rows(grad.contiguous(), dtype=ctx.bias_dtype)
        dattn, du, dnorm_weight, dnorm_bias = gate_backward(
            grad @ cast, tuple(kept), dropout=ctx.dropout, key=ctx.key
        )
        return dattn, du, None, dnorm_weight, dnorm_bias, dweight, dbias, grad, None, None


def weight_gradient(grad_TO: Tensor, rows_TI: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return grad^T rows (O, I) in `dtype`, from the matrix product's FP32 sums on a GPU."""
    if grad_TO.is_cuda and dtype == torch.float32 != grad_TO.dtype:
        return torch.mm(grad_TO.t(), rows_TI, out_dtype=dtype)
    return (grad_TO.t() @ rows_TI).to(dtype)
