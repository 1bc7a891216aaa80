"""FP8 linears by rounding: values as FP8 would hold them, multiplied in FP32, on any device.

The rules are those of the other backends, in plain PyTorch, so that what FP8 does to a model can be
seen without the hardware, and kernels have something to be compared with. It is slower than BF16.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.linear.engine import LinearEngine
from modules.linear.watch import observe
from ops.quantize import Quantized, dequantize, quantize

# scaling: granularity of rows and gradients, and of the weight, along the axis that is summed over
_GRANULARITIES = {
    "delayed": ("tensor", "tensor"),
    "tensorwise": ("tensor", "tensor"),
    "rowwise": ("rows", "rows"),
    "blockwise": ("1x128", "128x128"),
    "mxfp8": ("1x32", "1x32"),
}


class EmulatedEngine(LinearEngine):
    """Quantises and takes the scales off again in front of each of a linear's three products."""

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """Return x @ weight^T + bias; see `LinearEngine.linear`."""
        return _EmulatedLinear.apply(x_TK, weight_NK, bias_N, self)

    def seen(self, values: Tensor, operand: str, *, is_right: bool = False) -> Tensor:
        """Return an operand as its first product has it: recorded and told, then `rounded`."""
        if self.records and self.state is not None and values.numel():
            self.state.record(self.name, operand, values.abs().amax())
        quantized = self._quantized(values, operand, is_right=is_right)
        if self.records:
            observe(self.name, operand, values, quantized)
        return dequantize(quantized)

    def rounded(self, values: Tensor, operand: str, *, is_right: bool = False) -> Tensor:
        """Return a matrix as FP8 holds it, float32.

        Args:
            values: its product sums over the last axis.
            operand: "x", "w" or "dy".
            is_right: the weight, in blocks of its own under "blockwise".
        """
        return dequantize(self._quantized(values, operand, is_right=is_right))

    def _quantized(self, values: Tensor, operand: str, *, is_right: bool) -> Quantized:
        recipe, state, scale, margin = self.recipe, self.state, None, 0
        if recipe.scaling == "delayed":
            margin = recipe.margin
            if state is not None and state.is_warm:
                scale = state.scale[state.slot(self.name, operand)]
        return quantize(
            values,
            recipe.grad_dtype if operand == "dy" else torch.float8_e4m3fn,
            granularity=_GRANULARITIES[recipe.scaling][is_right],
            scale=scale,
            margin=margin,
        )


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, engine: EmulatedEngine
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.engine, ctx.bias_dtype = engine, None if bias is None else bias.dtype
        out = engine.seen(x, "x") @ engine.seen(weight, "w", is_right=True).t()
        if bias is not None:
            out += bias.to(x.dtype)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        engine: EmulatedEngine = ctx.engine
        dx = engine.seen(grad, "dy") @ engine.rounded(weight.t(), "w", is_right=True).t()
        if engine.recipe.fp8_wgrad and engine.recipe.scaling != "rowwise":
            dweight = engine.rounded(grad.t(), "dy") @ engine.rounded(x.t(), "x").t()
        else:
            dweight = grad.float().t() @ x.float()
        dbias = None if ctx.bias_dtype is None else grad.float().sum(0).to(ctx.bias_dtype)
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias, None


__all__ = ["EmulatedEngine"]
