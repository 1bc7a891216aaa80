"""FP8 linears by our kernels: casts fused with what stands before and behind, torch's scaled GEMM.

What a linear reads and writes, in bytes an entry, K wide in and N wide out, with one scale a tensor
that is known before (delayed scaling):

    boundary                          BF16                         FP8
    layer norm -> x                   K: 2 read, 2 written         2 read, 1 + 1 written
    y = x w^T                         2 K read, 2 N written        1 K read, 2 N written
    SiLU and split                    N: 2 read, 2 written         the same
    SiLU' -> dy                       N: 4 read, 2 written         4 read, 1 + 1 written
    dx = dy w                         2 N read, 2 K written        1 N read, 2 K written
    dw = dy^T x                       2 N + 2 K read               1 N + 1 K read
    layer norm's backward             K: 4 (6) read, 2 written     the same
    LN(attn) * u, dropout -> x        K: 4 read, 2 written         4 read, 1 + 1 written

So the fused boundary moves no byte more than BF16 outside of its products, which take half the
time at best: at 65,536 x 512 x 2048 the rest (1.7 GB, 0.43 ms) is more than a third of the BF16
boundary, which is why no pass may be added. A scale of the present maximum (tensorwise, and delayed
before the first commit) reads x and dy once more: K: 2 and N: 4.

A bare linear has no neighbour to share a pass with: 2 + 1 + 1 bytes an entry of x and of dy.

Weights are cast once an optimizer step, from FP32, in both orientations.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modules.linear.engine import LinearEngine
from modules.linear.native_functions import (
    NativeGatedNormLinear,
    NativeLinear,
    NativeNormLinear,
)
from modules.linear.native_operands import Operand, make_scheme, output
from modules.linear.sink import GradientSink
from modules.linear.watch import is_watched, observe
from ops.quantize import Quantized
from ops.quantize.operand import CastRule


@dataclass(slots=True)
class _Weights:
    """A weight and bias as they were cast, and what tells whether they still are the same."""

    key: tuple[Any, ...]
    weight: Operand
    bias: Tensor | None


class NativeEngine(LinearEngine):
    """Runs a linear through our quantising kernels; see `LinearEngine`. Needs Triton and a GPU."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scheme = make_scheme(self.recipe)
        # fused kernels know one scale a tensor
        self._is_fused = self.scheme.granularity == "tensor"
        self._weights: _Weights | None = None
        self._holds_weights = False
        self._rules: dict[tuple[str, bool, bool], CastRule] = {}
        self._rules_of: Tensor | None = None

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """Return x @ weight^T + bias, (T, N) in the dtype of x; see `LinearEngine.linear`."""
        if not x_TK.shape[0]:
            self.weights(weight_NK, bias_N, dtype=x_TK.dtype)  # its maximum counts all the same
            return _of_no_rows(x_TK, weight_NK, bias_N)
        return NativeLinear.apply(x_TK, weight_NK, bias_N, self)

    def norm_linear(
        self,
        x_TD: Tensor,
        norm: nn.LayerNorm,
        *,
        weight: Tensor,
        bias: Tensor | None,
        backend: str,
        recompute_norm: bool,
    ) -> tuple[Tensor, Tensor]:
        """See `LinearEngine.norm_linear`: in Triton the norm writes FP8, and so does SiLU'."""
        is_fused = self._is_fused and backend == "triton" and bias is None
        if not is_fused or not x_TD.shape[0]:
            return super().norm_linear(
                x_TD,
                norm,
                weight=weight,
                bias=bias,
                backend=backend,
                recompute_norm=recompute_norm,
            )
        recompute = recompute_norm and self.training
        return NativeNormLinear.apply(
            x_TD, norm.weight, norm.bias, weight, self, norm.eps, recompute
        )

    def gated_norm_linear(
        self,
        attn_THV: Tensor,
        u_THV: Tensor,
        x_TD: Tensor,
        *,
        norm: nn.LayerNorm,
        weight: Tensor,
        bias: Tensor | None,
        u_bias_HV: Tensor | None,
        dropout: float,
        backend: str,
    ) -> Tensor:
        """See `LinearEngine.gated_norm_linear`: one autograd node in Triton."""
        if backend != "triton" or bias is None or not x_TD.shape[0]:
            return super().gated_norm_linear(
                attn_THV,
                u_THV,
                x_TD,
                norm=norm,
                weight=weight,
                bias=bias,
                u_bias_HV=u_bias_HV,
                dropout=dropout,
                backend=backend,
            )
        return NativeGatedNormLinear.apply(
            attn_THV,
            u_THV,
            u_bias_HV,
            norm.weight,
            norm.bias,
            weight,
            bias,
            x_TD,
            self,
            norm.eps,
            dropout if self.training else 0.0,
        )

    def cast(
        self, x_TK: Tensor, operand: str, *, sums_dtype: torch.dtype | None = None
    ) -> tuple[Operand, Tensor | None]:
        """Return rows as operand "x" or "dy", and their sums by column in `sums_dtype`."""
        result, sums = self.scheme.cast(x_TK, self._rule(operand), sums_dtype=sums_dtype)
        if is_watched():
            self._observe(operand, x_TK, result)
        return result, sums

    def cast_normed(
        self,
        x_TD: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        *,
        eps: float,
        stats: Tensor | None = None,
    ) -> tuple[Operand, Tensor]:
        """Return the normalised rows as operand "x" and their statistics (2, T).

        Args:
            x_TD: contiguous.
            weight_D, bias_D: of the norm.
            eps: added to the variance.
            stats: what an earlier call returned: only what the weight gradient needs is made.
        """
        from ops.norm.triton_fp8 import norm_cast

        recipe = self.recipe
        is_first = stats is None
        watched = is_first and is_watched()
        cast, normed, stats = norm_cast(
            x_TD,
            weight_D,
            bias_D=bias_D,
            eps=eps,
            rule=self._rule("x"),
            row_multiple=recipe.row_multiple,
            wants_values=is_first,
            wants_transposed=recipe.fp8_wgrad,
            wants_normed=watched or not recipe.fp8_wgrad,
            stats=stats,
        )
        result = Operand.of(cast, normed)
        if watched and normed is not None:
            self._observe("x", normed, result)
        return result, stats

    def cast_gated(
        self,
        attn_THV: Tensor,
        u_THV: Tensor,
        u_bias_HV: Tensor | None,
        *,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dropout: float,
    ) -> tuple[Operand, tuple[Tensor | None, ...], int]:
        """Return the gated rows as operand "x", and what `gate_backward` needs."""
        options: dict[str, Any] = {
            "weight": weight,
            "bias": bias,
            "eps": eps,
            "u_bias_HV": u_bias_HV,
            "dropout": dropout,
        }
        if not self._is_fused:
            from ops.gated_norm.triton_impl import gate_forward

            rows, kept, key = gate_forward(attn_THV, u_THV, **options)
            return self.cast(rows, "x")[0], kept, key
        from ops.gated_norm.triton_fp8 import gate_cast

        recipe, watched = self.recipe, is_watched()
        cast, gated, kept, key = gate_cast(
            attn_THV,
            u_THV,
            **options,
            rule=self._rule("x"),
            row_multiple=recipe.row_multiple,
            wants_transposed=recipe.fp8_wgrad,
            wants_gated=watched or not recipe.fp8_wgrad,
        )
        result = Operand.of(cast, gated)
        if watched and gated is not None:
            self._observe("x", gated, result)
        return result, kept, key

    def output(
        self, x: Operand, weight: Operand, *, like_T: Tensor, bias_N: Tensor | None = None
    ) -> Tensor:
        """Return x w^T + bias, (T, N), with the rows and in the dtype of like_T."""
        return output(
            x,
            weight,
            num_rows=like_T.shape[0],
            dtype=like_T.dtype,
            bias_N=bias_N,
            granularity=self.scheme.weight_granularity,
        )

    def make_sink(self) -> GradientSink:
        """Return what takes this linear's output gradient past autograd."""
        return GradientSink(
            self._rule("dy"),
            row_multiple=self.recipe.row_multiple,
            wants_transposed=self.recipe.fp8_wgrad,
            wants_plain=not self.recipe.fp8_wgrad or is_watched(),
        )

    def gradient_of(self, sink: GradientSink, grad_TX: Tensor) -> Operand:
        """Return the output gradient as operand "dy": out of the sink, else of what autograd has.

        Raises:
            RuntimeError: the gradient in the sink is not all of it.
        """
        taken = sink.take(grad_TX)
        if taken is None:
            return self.cast(grad_TX.contiguous(), "dy")[0]
        result = Operand.of(*taken)
        if is_watched() and result.plain is not None:
            self._observe("dy", result.plain, result)
        return result

    def weights(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, dtype: torch.dtype
    ) -> tuple[Operand, Tensor | None]:
        """Return the weight in FP8 and the bias in `dtype`, cast once while they are held."""
        bias_key = None if bias_N is None else (bias_N.data_ptr(), bias_N._version)
        key = (weight_NK.data_ptr(), weight_NK._version, bias_key, dtype)
        kept = self._weights
        # one that evaluation has cast is not recorded yet
        if (
            kept is None
            or not self._holds_weights
            or kept.key[:-1] != key
            or self.records > kept.key[-1]
        ):
            operand = self.scheme.cast_weight(weight_NK.detach(), self._rule("w"))
            bias = None if bias_N is None else bias_N.detach().to(dtype)
            kept = self._weights = _Weights((*key, self.records), operand, bias)
        if is_watched():
            self._observe("w", weight_NK.detach(), kept.weight)
        return kept.weight, kept.bias

    def hold_weights(self, held: bool) -> None:
        """See `LinearEngine.hold_weights`: while held, weight and bias are cast once."""
        self._holds_weights = held
        self._weights = None

    def _rule(self, operand: str) -> CastRule:
        """Scale and record of an operand. Views of the state are made once."""
        state, records = self.state, self.records
        scale = None if state is None else state.scale
        if scale is not self._rules_of:  # moved to another device
            self._rules, self._rules_of = {}, scale
        is_warm = state is not None and state.is_warm
        rule = self._rules.get((operand, is_warm, records))
        if rule is None:
            rule = self._make_rule(operand, is_warm)
            self._rules[operand, is_warm, records] = rule
        return rule

    def _make_rule(self, operand: str, is_warm: bool) -> CastRule:
        recipe, state = self.recipe, self.state
        fp8_dtype = recipe.grad_dtype if operand == "dy" else torch.float8_e4m3fn
        if state is None:
            return CastRule(fp8_dtype=fp8_dtype)
        at = state.slot(self.name, operand)
        return CastRule(
            fp8_dtype=fp8_dtype,
            scale=state.scale[at : at + 1] if is_warm else None,
            amax=state.amax[at : at + 1] if self.records else None,
            margin=recipe.margin,
        )

    def _observe(self, operand: str, plain: Tensor, result: Operand) -> None:
        assert result.values is not None
        scheme, scale_inv = self.scheme, result.scale
        is_weight = operand == "w"
        granularity = scheme.weight_granularity if is_weight else scheme.granularity
        if granularity == "128x128":  # without what its layout is padded with
            scale_inv = scale_inv[: -(-plain.shape[1] // 128)].t()
        elif granularity == "1x128":
            scale_inv = scale_inv[: plain.shape[0]]
        if scale_inv.dim() == 2:
            scale_inv = scale_inv.contiguous()
        values = result.values[: plain.shape[0]]  # blocks come with rows of padding
        quantized = Quantized(values=values, scale_inv=scale_inv, granularity=granularity)
        observe(self.name, operand, plain, quantized)


def _of_no_rows(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return (0, N) with gradients of zero for everything."""
    y_TN = x_TK @ weight_NK.to(x_TK.dtype).t()
    return y_TN if bias_N is None else y_TN + bias_N.to(x_TK.dtype)


__all__ = ["NativeEngine"]
