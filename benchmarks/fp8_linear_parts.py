"""The casts and products of an FP8 linear one by one, for benchmarks/fp8_linear.py."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from modules.linear.sink import GradientSink
from ops.norm.triton_fp8 import norm_cast
from ops.quantize.operand import CastRule
from ops.quantize.triton_impl import cast_rows
from ops.scaled_gemm import multiply
from ops.silu_split.triton_fp8 import silu_backward_cast

_NUM_HEADS = 4
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def casts(
    tokens: int, in_features: int, out_features: int
) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Yield name, call and bytes that must move, for delayed scaling, then tensorwise."""
    dim = out_features // (4 * _NUM_HEADS)
    one = torch.ones(1, device="cuda")
    x = torch.randn(tokens, in_features, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(tokens, out_features, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(in_features, device="cuda")
    bias = torch.zeros(out_features, device="cuda")
    weight = torch.randn(out_features, in_features, device="cuda")
    parts = [
        torch.randn(tokens, _NUM_HEADS, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    ]
    for suffix, scale, extra in (("", one, 0), (" tensorwise", None, 1)):
        rule = CastRule(fp8_dtype=_E4M3, scale=scale, amax=torch.zeros(1, device="cuda"))
        grad_rule = CastRule(fp8_dtype=_E5M2, scale=scale, amax=torch.zeros(1, device="cuda"))

        def silu(rule: CastRule = grad_rule) -> None:
            sink = GradientSink(rule, row_multiple=16, wants_transposed=True, wants_plain=False)
            dims = (_NUM_HEADS, dim, dim)
            silu_backward_cast(y, bias, parts, dims, activates_u=False, target=sink)

        # u's pre-activation is not read: 7 of 8 quarters of 4 bytes
        yield f"silu backward{suffix}", silu, (int(5.5 * y.numel()) + extra * int(3.5 * y.numel()))
        yield (
            f"norm{suffix}",
            lambda rule=rule: norm_cast(x, norm, bias_D=norm, eps=1e-5, rule=rule),
            (4 + 2 * extra) * x.numel(),
        )
        yield f"x{suffix}", lambda rule=rule: cast_rows(x, rule), (4 + 2 * extra) * x.numel()
        yield (
            f"dy with sums{suffix}",
            lambda rule=grad_rule: cast_rows(y, rule, sums_dtype=torch.float32),
            (4 + 2 * extra) * y.numel(),
        )
        yield (
            f"weight{suffix}",
            lambda rule=rule: cast_rows(weight, rule),
            (6 + 4 * extra) * weight.numel(),
        )


def products(
    tokens: int, in_features: int, out_features: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield name and call of each product, with sums in fewer bits and without."""
    one = torch.ones(1, device="cuda")

    def codes(rows: int, columns: int, dtype: torch.dtype = _E4M3) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda").to(dtype)

    operands = {
        "y = x w'": (codes(tokens, in_features), codes(out_features, in_features), torch.bfloat16),
        "dx = dy w": (
            codes(tokens, out_features, _E5M2),
            codes(in_features, out_features),
            torch.bfloat16,
        ),
        "dw = dy' x": (
            codes(out_features, tokens, _E5M2),
            codes(in_features, tokens),
            torch.float32,
        ),
    }
    for name, (a, b, dtype) in operands.items():
        for fast in (True, False):
            yield (
                f"{name}{' fast' if fast else ''}",
                lambda a=a, b=b, dtype=dtype, fast=fast: multiply(
                    a, b, scale_a=one, scale_b=one, out_dtype=dtype, fast_accum=fast
                ),
            )
    left = torch.randn(out_features, tokens, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(tokens, in_features, device="cuda", dtype=torch.bfloat16)
    yield "dw in BF16", lambda: torch.mm(left, right, out_dtype=torch.float32)
