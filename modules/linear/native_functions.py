"""The native FP8 linears as autograd sees them: one node each, first derivatives only.

Kept for the backward pass: x^T in FP8 (T K bytes, half of BF16 rows), the weight's transposed FP8
copy, which the engine shares until the next optimizer step, and scales.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.linear.native_operands import Operand, input_gradient, weight_product

if TYPE_CHECKING:
    from modules.linear.native import NativeEngine

Gradients = tuple[Tensor | None, ...]


class NativeLinear(torch.autograd.Function):
    """x, weight, bias -> x w^T + bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, engine: "NativeEngine"
    ) -> Tensor:
        """Return (T, N) in the dtype of x; T at least 1."""
        rows = x.contiguous()
        operand, _ = engine.cast(rows, "x")
        quantized, cast_bias = engine.weights(weight, bias, dtype=x.dtype)
        _save(ctx, operand, quantized)
        ctx.engine = engine
        ctx.bias_dtype = None if bias is None else bias.dtype
        return engine.output(operand, quantized, like_T=x, bias_N=cast_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Return gradients of x, weight and bias."""
        dy, dbias = ctx.engine.cast(grad.contiguous(), "dy", sums_dtype=ctx.bias_dtype)
        dx, dweight = _gradients(ctx, dy, ctx.saved_tensors, like_T=grad)
        return dx, dweight, dbias, None


class NativeNormLinear(torch.autograd.Function):
    """x -> layer_norm(x) w^T, and x again for the residual (see `NormLinearFunction`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        engine: "NativeEngine",
        eps: float,
        recompute_norm: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return uvqk (T, X) and x; T at least 1. recompute_norm: keep x and statistics only."""
        rows = x.contiguous()
        operand, stats = engine.cast_normed(rows, norm_weight, norm_bias, eps=eps)
        quantized, _ = engine.weights(weight, None, dtype=x.dtype)
        if recompute_norm:
            kept = Operand(operand.values, operand.scale, None, None, None)
        else:
            kept = operand
        _save(ctx, kept, quantized, rows, norm_weight, norm_bias, stats)
        ctx.engine, ctx.eps, ctx.recompute_norm = engine, eps, recompute_norm
        ctx.gradient_sink = engine.make_sink()
        ctx.set_materialize_grads(False)
        return engine.output(operand, quantized, like_T=x), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, residual: Tensor | None) -> Gradients:
        """Return gradients of x, the norm's weight and bias, and the linear's weight."""
        from ops.norm.triton_impl import norm_backward

        if grad is None:
            return residual, None, None, None, None, None, None
        engine, saved = ctx.engine, ctx.saved_tensors
        x, norm_weight, norm_bias, stats = saved[_NUM_SAVED:]
        dy = engine.gradient_of(ctx.gradient_sink, grad)
        if ctx.recompute_norm:
            again, _ = engine.cast_normed(x, norm_weight, norm_bias, eps=ctx.eps, stats=stats)
            saved = (again.transposed, again.transposed_scale, again.plain, *saved[3:])
        dnormed, dweight = _gradients(ctx, dy, saved, like_T=x)
        dx, dnorm_weight, dnorm_bias = norm_backward(
            dnormed,
            x,
            weight_D=norm_weight,
            stats=stats,
            residual_TD=None if residual is None else residual.contiguous(),
        )
        return dx, dnorm_weight, dnorm_bias, dweight, None, None, None


class NativeGatedNormLinear(torch.autograd.Function):
    """attn, u, residual -> residual + dropout(layer_norm(attn) * u) w^T + bias."""

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
        engine: "NativeEngine",
        eps: float,
        dropout: float,
    ) -> Tensor:
        """Return (T, D) in the dtype of the rows; T at least 1."""
        operand, kept, ctx.key = engine.cast_gated(
            attn, u, u_bias, weight=norm_weight, bias=norm_bias, eps=eps, dropout=dropout
        )
        quantized, cast_bias = engine.weights(weight, bias, dtype=attn.dtype)
        _save(ctx, operand, quantized, *kept)
        ctx.engine, ctx.dropout, ctx.bias_dtype = engine, dropout, bias.dtype
        return engine.output(operand, quantized, like_T=attn, bias_N=cast_bias).add_(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Return gradients of attn, u, the norm's and the linear's parameters, and residual."""
        from ops.gated_norm.triton_impl import gate_backward

        dy, dbias = ctx.engine.cast(grad.contiguous(), "dy", sums_dtype=ctx.bias_dtype)
        saved = ctx.saved_tensors
        dgated, dweight = _gradients(ctx, dy, saved, like_T=grad)
        dattn, du, dnorm_weight, dnorm_bias = gate_backward(
            dgated, saved[_NUM_SAVED:], dropout=ctx.dropout, key=ctx.key
        )
        return dattn, du, None, dnorm_weight, dnorm_bias, dweight, dbias, grad, None, None, None


_NUM_SAVED = 5


def _save(ctx: Any, x: Operand, weight: Operand, *others: Tensor | None) -> None:
    """Keep what both products of the backward pass need, and `others` behind it."""
    ctx.save_for_backward(
        x.transposed,
        None if x.transposed is None else x.transposed_scale,
        x.plain if x.transposed is None else None,
        weight.transposed,
        weight.transposed_scale,
        *others,
    )


def _gradients(
    ctx: Any, dy: Operand, saved: tuple[Tensor | None, ...], *, like_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the linear's input (T, K) and weight (N, K)."""
    x_KP, x_scale, plain_TK, weight_KN, weight_scale = saved[:_NUM_SAVED]
    assert weight_KN is not None and weight_scale is not None
    scheme = ctx.engine.scheme
    dx = input_gradient(
        dy,
        weight_KN,
        weight_scale,
        num_rows=like_T.shape[0],
        dtype=like_T.dtype,
        granularity=scheme.weight_granularity,
    )
    return dx, weight_product(dy, x_KP, x_scale, plain_TK, granularity=scheme.granularity)
