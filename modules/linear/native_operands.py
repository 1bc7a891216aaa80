"""How the native engine makes FP8 operands and multiplies them, by kind of scale.

A linear has three products, each with its own two operands:

    y  = x w^T       x (T, K)      w (N, K)       contraction K
    dx = dy w        dy (T, N)     w^T (K, N)     contraction N
    dw = dy^T x      dy^T (N, P)   x^T (K, P)     contraction P, T rounded up

FP8 tensor cores of Hopper read both operands along the contraction, hence two orientations of each.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modules.linear.fused import weight_gradient
from modules.linear.recipe import LinearRecipe
from ops.quantize.operand import CastRule, Fp8Operand
from ops.scaled_gemm import multiply

_FAST_ACCUMULATION = {"y": True, "dx": True, "dw": False}
"""Sums of FP8 tensor cores kept in fewer bits than FP32; over all tokens that is too few."""


@dataclass(slots=True)
class Operand:
    """A matrix (T, K), ready for products along K and along T.

    values, scale: (T, K) in FP8, for products along K; None in a copy made for products along T.
        With scales of blocks it has P rows.
    transposed, transposed_scale: (K, P) in FP8, for products along T; None: `plain` is used.
    plain: (T, K) in the dtype of the rows.
    """

    values: Tensor | None
    scale: Tensor
    transposed: Tensor | None
    transposed_scale: Tensor | None
    plain: Tensor | None

    @classmethod
    def of(cls, operand: Fp8Operand, plain: Tensor | None = None) -> "Operand":
        """Return the operand that has one scale for everything."""
        return cls(operand.values, operand.scale_inv, operand.transposed, operand.scale_inv, plain)


class Scheme(Protocol):
    """Casts for one kind of scale."""

    granularity: str
    """Of rows and gradients, as in `ops.quantize`."""
    weight_granularity: str

    def cast(
        self, x_TK: Tensor, rule: CastRule, *, sums_dtype: torch.dtype | None = None
    ) -> tuple[Operand, Tensor | None]:
        """Return rows (T at least 1, contiguous) as an operand, and their sums by column (K,)."""

    def cast_weight(self, weight_NK: Tensor, rule: CastRule) -> Operand:
        """Return a weight as an operand with both orientations."""


class TensorScheme:
    """One scale a tensor.

    Args:
        fp8_wgrad: whether the weight gradient multiplies FP8.
        row_multiple: of P.
    """

    granularity = weight_granularity = "tensor"

    def __init__(self, *, fp8_wgrad: bool, row_multiple: int) -> None:
        self.fp8_wgrad = fp8_wgrad
        self.row_multiple = row_multiple

    def cast(
        self, x_TK: Tensor, rule: CastRule, *, sums_dtype: torch.dtype | None = None
    ) -> tuple[Operand, Tensor | None]:
        """See `Scheme`: one launch, two where the scale is not known before, one for sums."""
        from ops.quantize.triton_impl import cast_rows

        operand, sums = cast_rows(
            x_TK,
            rule,
            row_multiple=self.row_multiple,
            wants_transposed=self.fp8_wgrad,
            sums_dtype=sums_dtype,
        )
        return Operand.of(operand, None if self.fp8_wgrad else x_TK), sums

    def cast_weight(self, weight_NK: Tensor, rule: CastRule) -> Operand:
        """See `Scheme`."""
        from ops.quantize.triton_impl import cast_rows

        return Operand.of(cast_rows(weight_NK, rule)[0])


class RowScheme:
    """A scale a row; the weight gradient is a product in the dtype of the rows.

    Scales of its FP8 operands would have to be those of a whole column.
    """

    granularity = weight_granularity = "rows"

    def cast(
        self, x_TK: Tensor, rule: CastRule, *, sums_dtype: torch.dtype | None = None
    ) -> tuple[Operand, Tensor | None]:
        """See `Scheme`."""
        from ops.norm.triton_sums import sum_rows
        from ops.quantize.triton_blocks import cast_each_row

        sums = None if sums_dtype is None else sum_rows(x_TK, dtype=sums_dtype)
        values, scale = cast_each_row(x_TK, rule.fp8_dtype)
        return Operand(values, scale, None, None, x_TK), sums

    def cast_weight(self, weight_NK: Tensor, rule: CastRule) -> Operand:
        """See `Scheme`."""
        from ops.quantize.triton_blocks import cast_each_row

        values, scale = cast_each_row(weight_NK, rule.fp8_dtype)
        turned = cast_each_row(weight_NK.t().contiguous(), rule.fp8_dtype)
        return Operand(values, scale, *turned, None)


class BlockScheme:
    """A scale for 128 neighbours along what is summed over; the weight's for 128 x 128.

    fp8_wgrad: whether the weight gradient multiplies FP8.
    """

    granularity, weight_granularity = "1x128", "128x128"

    def __init__(self, *, fp8_wgrad: bool) -> None:
        self.fp8_wgrad = fp8_wgrad

    def cast(
        self, x_TK: Tensor, rule: CastRule, *, sums_dtype: torch.dtype | None = None
    ) -> tuple[Operand, Tensor | None]:
        """See `Scheme`."""
        from ops.quantize.triton_blocks import cast_strips

        rows, columns, sums = cast_strips(x_TK, rule.fp8_dtype, sums_dtype=sums_dtype)
        if not self.fp8_wgrad:
            return Operand(*rows, None, None, x_TK), sums
        return Operand(*rows, *columns, None), sums

    def cast_weight(self, weight_NK: Tensor, rule: CastRule) -> Operand:
        """See `Scheme`."""
        from ops.quantize.triton_blocks import cast_squares

        values, turned = cast_squares(weight_NK, rule.fp8_dtype)
        return Operand(*values, *turned, None)


def make_scheme(recipe: LinearRecipe) -> Scheme:
    """Return the scheme of a recipe.

    Raises:
        NotImplementedError: a scaling that the native engine does not have.
    """
    if recipe.scaling in ("delayed", "tensorwise"):
        return TensorScheme(fp8_wgrad=recipe.fp8_wgrad, row_multiple=recipe.row_multiple)
    if recipe.scaling == "rowwise":
        return RowScheme()
    if recipe.scaling == "blockwise":
        return BlockScheme(fp8_wgrad=recipe.fp8_wgrad)
    raise NotImplementedError(
        'MixedPrecisionArgs.linear_recipe must be "delayed", "tensorwise", "rowwise" or '
        f'"blockwise" for linear_backend = "native", got {recipe.scaling!r}; choose one of these '
        'or linear_backend = "te"'
    )


def output(
    x: Operand,
    weight: Operand,
    *,
    num_rows: int,
    dtype: torch.dtype,
    bias_N: Tensor | None,
    granularity: str,
) -> Tensor:
    """Return x w^T + bias, (num_rows, N). granularity: of the weight."""
    assert x.values is not None and weight.values is not None
    product = multiply(
        x.values,
        weight.values,
        scale_a=x.scale,
        scale_b=weight.scale,
        out_dtype=dtype,
        fast_accum=_FAST_ACCUMULATION["y"],
        bias_N=bias_N,
        granularity_b=granularity,
    )
    return product if product.shape[0] == num_rows else product[:num_rows]


def input_gradient(
    dy: Operand,
    weight_KN: Tensor,
    scale: Tensor,
    *,
    num_rows: int,
    dtype: torch.dtype,
    granularity: str,
) -> Tensor:
    """Return dy w, (num_rows, K), from the transposed weight. granularity: of the weight."""
    assert dy.values is not None
    product = multiply(
        dy.values,
        weight_KN,
        scale_a=dy.scale,
        scale_b=scale,
        out_dtype=dtype,
        fast_accum=_FAST_ACCUMULATION["dx"],
        granularity_b=granularity,
    )
    return product if product.shape[0] == num_rows else product[:num_rows]


def weight_product(
    dy: Operand,
    x_KP: Tensor | None,
    scale: Tensor | None,
    plain_TK: Tensor | None,
    *,
    granularity: str,
) -> Tensor:
    """Return dy^T x, (N, K) float32: in FP8 from x_KP and its scale, else from plain rows."""
    if x_KP is None or dy.transposed is None:
        assert dy.plain is not None and plain_TK is not None
        return weight_gradient(dy.plain, plain_TK, dtype=torch.float32)
    assert scale is not None and dy.transposed_scale is not None
    return multiply(
        dy.transposed,
        x_KP,
        scale_a=dy.transposed_scale,
        scale_b=scale,
        out_dtype=torch.float32,
        fast_accum=_FAST_ACCUMULATION["dw"],
        granularity_b=granularity,
    )
