"""Casts to FP8 in Triton against `ops.quantize` in plain PyTorch, bit by bit.

On a machine without a GPU the kernels run in Triton's interpreter; with one it is compiled.
"""

import pytest
import torch
from torch import Tensor

from ops.quantize import scale_from_amax
from ops.quantize.operand import CastRule
from tests.ops.quantize_kernels import DEVICE, TOKENS, expected_codes, same_codes, spread

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rule(dtype: torch.dtype = E4M3, scale: float | None = 3.7, margin: int = 0) -> CastRule:
    known = None if scale is None else torch.full((1,), scale, device=DEVICE)
    return CastRule(fp8_dtype=dtype, scale=known, amax=torch.zeros(1, device=DEVICE), margin=margin)


def cast_rows(x: Tensor, rule: CastRule, **options):
    from ops.quantize.triton_impl import cast_rows

    return cast_rows(x, rule, **options)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [3.7, None], ids=["known", "present"])
@pytest.mark.parametrize("num_rows", TOKENS)
def test_both_orientations(num_rows: int, scale: float | None, dtype: torch.dtype) -> None:
    for width, rows_dtype in ((16, torch.float32), (48, torch.bfloat16)):
        x = spread(num_rows, width, dtype=rows_dtype)
        asked = rule(dtype, scale)
        cast, sums = cast_rows(x, asked, sums_dtype=torch.float32)
        expected = expected_codes(x, dtype, asked.scale)
        assert same_codes(cast.values, expected)
        assert same_codes(cast.transposed[:, :num_rows].t(), expected)
        assert cast.transposed.shape == (width, -(-num_rows // 16) * 16)
        assert not cast.transposed[:, num_rows:].float().any()
        amax = x.float().abs().amax()
        assert torch.equal(asked.amax[0], amax)
        used = asked.scale[0] if scale else scale_from_amax(amax, dtype)
        torch.testing.assert_close(cast.scale_inv[0], 1.0 / used, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(sums, x.double().sum(0).float(), rtol=1e-5, atol=1e-2)


def test_more_rows_than_a_program_takes() -> None:
    x = spread(700, 48)
    asked = rule()
    cast, sums = cast_rows(x, asked, sums_dtype=torch.float32, row_multiple=128)
    assert same_codes(cast.values, expected_codes(x, E4M3, asked.scale))
    assert same_codes(cast.transposed[:, :700].t(), cast.values)
    assert cast.transposed.shape == (48, 768) and not cast.transposed[:, 700:].float().any()
    torch.testing.assert_close(sums, x.double().sum(0).float(), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("scale", [1.0, None], ids=["known", "present"])
def test_what_is_not_finite(scale: float | None) -> None:
    """NaN stays NaN and reaches the maximum; infinity saturates under a known scale."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(3, 16, device=DEVICE)
        x[1, 5] = bad
        asked = rule(scale=scale)
        cast, _ = cast_rows(x, asked)
        assert same_codes(cast.values, expected_codes(x, E4M3, asked.scale))
        recorded = asked.amax[0]
        assert recorded.isnan() if bad != bad else recorded == float("inf")


def test_zeros_and_the_smallest_numbers() -> None:
    for value in (0.0, 1e-40, 1e-30):
        x = torch.full((5, 16), value, device=DEVICE)
        asked = rule(scale=None)
        cast, _ = cast_rows(x, asked)
        assert same_codes(cast.values, expected_codes(x, E4M3))
        assert cast.scale_inv.isfinite().all() and cast.scale_inv > 0
        assert torch.equal(asked.amax[0], x[0, 0])


def test_margin_leaves_headroom() -> None:
    x = spread(9, 16)
    plain, _ = cast_rows(x, rule(scale=None))
    roomy, _ = cast_rows(x, rule(scale=None, margin=2))
    assert torch.equal(roomy.scale_inv, plain.scale_inv * 4)


def test_maxima_accumulate() -> None:
    asked = rule()
    big, small = spread(17, 16), spread(17, 16) * 0.01
    cast_rows(big, asked)
    cast_rows(small, asked)
    assert torch.equal(asked.amax[0], big.float().abs().amax())


def test_one_orientation_and_no_record() -> None:
    x = spread(17, 16)
    quiet = CastRule(fp8_dtype=E4M3, scale=torch.ones(1, device=DEVICE))
    assert cast_rows(x, quiet, wants_transposed=False)[0].transposed is None
    assert cast_rows(x, quiet, wants_values=False)[0].values is None


def test_a_dtype_without_kernel() -> None:
    with pytest.raises(NotImplementedError, match="float32, bfloat16 or float16"):
        cast_rows(torch.ones(3, 16, dtype=torch.float64, device=DEVICE), rule())


@pytest.mark.parametrize("scale", [11.0, None], ids=["known", "present"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (17, 144), (70, 48)])
def test_norm(num_rows: int, width: int, scale: float | None) -> None:
    """The norm in FP8 is the cast of the norm's rows, which are those of the plain kernel."""
    from ops.norm.triton_fp8 import norm_cast
    from ops.norm.triton_impl import norm_forward

    x = (torch.randn(num_rows, width) * 3 + 200).bfloat16().to(DEVICE)
    weight, bias = torch.randn(2, width).to(DEVICE)
    options = {"bias_D": bias, "eps": 1e-5}
    plain, stats = norm_forward(x, weight, **options)
    asked, again = rule(scale=scale), rule(scale=scale)
    cast, normed, found = norm_cast(x, weight, rule=asked, wants_normed=True, **options)
    torch.testing.assert_close(found, stats, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(normed, plain, rtol=8e-3, atol=1e-2)
    expected, _ = cast_rows(normed, again)
    assert same_codes(cast.values, expected.values)
    assert same_codes(cast.transposed, expected.transposed)
    assert torch.equal(cast.scale_inv, expected.scale_inv)
    assert torch.equal(asked.amax, again.amax)
    # with statistics that are known, and nothing else than the transposed copy
    only, _, _ = norm_cast(x, weight, rule=asked, wants_values=False, stats=found, **options)
    assert only.values is None and same_codes(only.transposed, cast.transposed)


@pytest.mark.parametrize(
    ("dims", "scale", "dropout", "has_u_bias"),
    [
        ((1, 1, 16), 11.0, 0.0, False),
        ((17, 2, 72), None, 0.25, True),
        ((70, 3, 16), 11.0, 0.25, True),
        ((33, 1, 130), 11.0, 0.0, True),
    ],
)
def test_gate(
    dims: tuple[int, int, int], scale: float | None, dropout: float, has_u_bias: bool
) -> None:
    """The gate in FP8 is the cast of the plain kernel's rows, under the same dropout mask."""
    from ops.gated_norm.triton_fp8 import gate_cast
    from ops.gated_norm.triton_impl import gate_forward

    num_rows, heads, dim = dims
    attn = (torch.randn(dims) * 3 + 200).bfloat16().to(DEVICE)
    # of a wider matrix, as a layer's is
    u = torch.randn(num_rows, heads, 4 * dim).bfloat16().to(DEVICE)[..., :dim]
    weight, bias = torch.randn(2, heads * dim).to(DEVICE)
    u_bias = torch.randn(heads, dim).to(DEVICE) if has_u_bias else None
    options = {"weight": weight, "bias": bias, "eps": 1e-5, "u_bias_HV": u_bias, "dropout": dropout}
    torch.manual_seed(3)
    plain, plain_kept, plain_key = gate_forward(attn, u, **options)
    asked, again = rule(scale=scale), rule(scale=scale)
    torch.manual_seed(3)
    cast, gated, kept, key = gate_cast(attn, u, rule=asked, wants_gated=True, **options)
    assert key == plain_key
    assert torch.equal(gated == 0, plain == 0)
    torch.testing.assert_close(gated, plain, rtol=8e-3, atol=2e-2)
    torch.testing.assert_close(kept[-1], plain_kept[-1], rtol=1e-5, atol=1e-6)
    expected, _ = cast_rows(gated, again)
    assert same_codes(cast.values, expected.values)
    assert same_codes(cast.transposed, expected.transposed)
    assert torch.equal(cast.scale_inv, expected.scale_inv)
    assert torch.equal(asked.amax, again.amax)


class Target:
    """Keeps what SiLU's backward pass hands over."""

    row_multiple = 16
    wants_transposed = wants_plain = True

    def __init__(self, rule: CastRule) -> None:
        self.rule = rule

    def put(self, operand, plain, *, like_TX: Tensor) -> Tensor:
        self.operand, self.plain = operand, plain
        return like_TX.new_zeros(1).expand(like_TX.shape)


@pytest.mark.parametrize(
    ("dims", "scale", "activates_u"),
    [
        ((1, 1, 16, 16), 11.0, True),
        ((17, 1, 32, 16), None, False),
        ((70, 2, 16, 16), 11.0, False),
        ((33, 1, 24, 40), None, True),
    ],
)
def test_silu_backward(
    dims: tuple[int, int, int, int], scale: float | None, activates_u: bool
) -> None:
    """SiLU' in FP8 is the cast of the plain kernel's gradient, and its bias gradient the same."""
    from ops.silu_split import silu_split

    num_rows, heads, linear_dim, attention_dim = dims
    width = 2 * heads * (linear_dim + attention_dim)
    target, again = Target(rule(E5M2, scale)), rule(E5M2, scale)
    results = []
    for gradient_target in (None, target):
        torch.manual_seed(0)
        uvqk = torch.randn(num_rows, width).bfloat16().to(DEVICE).requires_grad_()
        bias = torch.randn(width).to(DEVICE).requires_grad_()
        parts = silu_split(
            uvqk,
            heads,
            attention_dim=attention_dim,
            linear_dim=linear_dim,
            bias_X=bias,
            activates_u=activates_u,
            gradient_target=gradient_target,
            backend="triton",
        )
        grads = [torch.randn(part.shape).bfloat16().to(DEVICE) for part in parts]
        results.append(torch.autograd.grad(parts, [uvqk, bias], grads))
    (expected, dbias), (placeholder, dbias_fp8) = results
    assert placeholder.stride() == (0, 0) and placeholder.shape == expected.shape
    torch.testing.assert_close(dbias_fp8, dbias, rtol=1e-4, atol=1e-4)
    assert torch.equal(target.plain, expected)
    cast, _ = cast_rows(expected, again)
    assert same_codes(target.operand.values, cast.values)
    assert same_codes(target.operand.transposed, cast.transposed)
    assert torch.equal(target.operand.scale_inv, cast.scale_inv)
    assert torch.equal(target.rule.amax, again.amax)


def test_silu_needs_triton_for_a_target() -> None:
    from ops.silu_split import silu_split

    with pytest.raises(NotImplementedError, match="gradient_target"):
        silu_split(
            torch.ones(3, 64), 1, attention_dim=16, linear_dim=16, gradient_target=Target(rule())
        )
