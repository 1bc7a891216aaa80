"""Whether native FP8 linears are right on this GPU, for benchmarks/fp8_linear.py.

The oracle of a cast is `ops.quantize` in plain PyTorch, bit by bit; that of a linear is float64 on
the operands that the oracle's casts give, so all that is left is the products' accumulation.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.elementwise import rounded
from modules.linear.native import NativeEngine
from modules.linear.recipe import LinearRecipe
from modules.linear.sink import gradient_sink
from modules.linear.state import Fp8State
from ops.norm.triton_impl import norm_forward
from ops.quantize import dequantize, quantize
from ops.quantize.operand import CastRule
from ops.quantize.triton_impl import cast_rows
from ops.silu_split import silu_split

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_TOKENS = (1, 7, 15, 16, 17, 31, 4095)
# BF16 rounds outputs to 2**-9; sums of FP8 products are kept in 14 bits where they are fast
_LIMITS = {"y": 4e-3, "dx": 4e-3, "dw": 1e-3, "db": 1e-4}


def gate(scalings: Sequence[str]) -> bool:
    """Print one row a check; return whether all passed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty comes full of NaN
    try:
        rows = [_casts(dtype) for dtype in (_E4M3, _E5M2)]
        rows += [_linear(scaling) for scaling in scalings]
        rows += [_fused(scaling) for scaling in scalings if scaling in ("delayed", "tensorwise")]
    finally:
        torch.use_deterministic_algorithms(before)
    for row in rows:
        print(json.dumps(row), flush=True)
    return all(row["ok"] for row in rows)


def _casts(dtype: torch.dtype) -> dict[str, Any]:
    """Both orientations bit by bit, maxima exactly, zero tails, for hostile values."""
    worst = 0
    ok = True
    for tokens in _TOKENS:
        for width in (16, 48, 512):
            for rows_dtype in (torch.bfloat16, torch.float32):
                spread = torch.randn(tokens, width, device="cuda") * 4
                x = (torch.randn(tokens, width, device="cuda") * spread.exp()).to(rows_dtype)
                x[0, 0], x[-1, -1] = 0.0, 1e-40
                for scale in (torch.full((1,), 3.7, device="cuda"), None):
                    amax = torch.zeros(1, device="cuda")
                    rule = CastRule(fp8_dtype=dtype, scale=scale, amax=amax)
                    actual, _ = cast_rows(x, rule)
                    expected = quantize(x, dtype, scale=scale).values.float()
                    assert actual.values is not None and actual.transposed is not None
                    worst = max(worst, int((actual.values.float() != expected).sum()))
                    transposed = actual.transposed.float()
                    ok &= torch.equal(transposed[:, :tokens].t(), actual.values.float())
                    ok &= not transposed[:, tokens:].any()
                    ok &= torch.equal(amax[0], x.float().abs().amax())
    x = torch.tensor([[float("nan"), float("inf"), -1e9, 0.0] * 4], device="cuda")
    actual, _ = cast_rows(x, CastRule(fp8_dtype=dtype, scale=torch.ones(1, device="cuda")))
    assert actual.values is not None
    largest = torch.finfo(dtype).max
    hostile = actual.values.float()[0, :4].tolist()
    ok &= hostile[0] != hostile[0] and hostile[1:] == [largest, -largest, 0.0]
    # a scale of the present maximum may differ by a rounding, and so may a tie
    return {"gate": f"cast {dtype}", "ok": ok and worst <= 2, "different_codes": worst}


def _engine(scaling: str, in_features: int, out_features: int) -> NativeEngine:
    grad_dtype = _E4M3 if scaling == "blockwise" else _E5M2
    recipe = LinearRecipe(backend="native", scaling=scaling, grad_dtype=grad_dtype)
    state = Fp8State(["gate"], recipe).cuda() if scaling == "delayed" else None
    return NativeEngine(
        name="gate",
        in_features=in_features,
        out_features=out_features,
        recipe=recipe,
        state=state,
    )


def _commit(engine: NativeEngine) -> None:
    if engine.state is not None:
        engine.state.commit()


def _exact(engine: NativeEngine, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Return x w^T, dy w and dy^T x of operands as their casts leave them, float64."""
    scheme, state = engine.scheme, engine.state

    def cast(matrix: Tensor, operand: str) -> Tensor:
        granularity = scheme.weight_granularity if operand == "w" else scheme.granularity
        scale = None
        if state is not None and state.is_warm:
            at = state.slot(engine.name, operand)
            scale = state.scale[at : at + 1]
        dtype = engine.recipe.grad_dtype if operand == "dy" else _E4M3
        return dequantize(quantize(matrix, dtype, granularity=granularity, scale=scale)).double()

    y = cast(x, "x") @ cast(weight, "w").t()
    dx = cast(dy, "dy") @ cast(weight.t(), "w").t()
    if scheme.granularity == "rows":  # its weight gradient is a product in BF16
        return y, dx, dy.double().t() @ x.double()
    return y, dx, cast(dy.t(), "dy") @ cast(x.t(), "x").t()


def _linear(scaling: str) -> dict[str, Any]:
    errors: dict[str, float] = {}
    for tokens in _TOKENS:
        engine = _engine(scaling, 256, 512)
        weight = nn.Parameter(torch.randn(512, 256, device="cuda") * 0.05)
        bias = nn.Parameter(torch.randn(512, device="cuda"))
        for _ in range(2):  # the second step of delayed scaling uses the first one's maxima
            x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
            grad = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16) * 1e-3
            expected = _exact(engine, x.detach(), weight.detach(), grad)
            y = engine.linear(x, weight, bias)
            dx, dw, db = torch.autograd.grad(y, [x, weight, bias], grad)
            _note(errors, "y", y, expected[0] + bias.double())
            _note(errors, "dx", dx, expected[1])
            _note(errors, "dw", dw, expected[2])
            _note(errors, "db", db, grad.double().sum(0))
            _commit(engine)
    return _row(f"linear {scaling}", errors)


def _fused(scaling: str) -> dict[str, Any]:
    """The fused boundary against the plain kernels around the bare linear, and x by x."""
    errors: dict[str, float] = {}
    for tokens, width, heads, dim in ((4095, 512, 4, 128), (17, 96, 3, 32), (1, 256, 2, 64)):
        engine = _engine(scaling, width, 4 * heads * dim)
        norm = nn.LayerNorm(width).cuda()
        weight = nn.Parameter(torch.randn(4 * heads * dim, width, device="cuda") * 0.05)
        bias = nn.Parameter(torch.randn(4 * heads * dim, device="cuda") * 0.1)
        for _ in range(2):
            x = (torch.randn(tokens, width, device="cuda") * 2 + 3).bfloat16().requires_grad_()
            grads = [torch.randn(tokens, heads, dim, device="cuda").bfloat16() for _ in range(4)]
            leaves = [x, norm.weight, norm.bias, weight, bias]
            found = []
            for fused in (True, False):
                if fused:
                    y, _ = engine.norm_linear(
                        x,
                        norm,
                        weight=weight,
                        bias=None,
                        backend="triton",
                        recompute_norm=False,
                    )
                else:
                    normed, _ = norm_forward(
                        x.detach(), norm.weight, bias_D=norm.bias, eps=norm.eps
                    )
                    y = engine.linear(normed.requires_grad_(), weight, None)
                parts = silu_split(
                    y,
                    heads,
                    attention_dim=dim,
                    linear_dim=dim,
                    bias_X=bias,
                    gradient_target=gradient_sink(y) if fused else None,
                    backend="triton",
                )
                wanted = leaves if fused else [normed, weight, bias]
                found.append([*parts, *torch.autograd.grad(parts, wanted, grads)])
            fused_out, plain_out = found
            for actual, expected in zip(fused_out[:4], plain_out[:4], strict=True):
                _note(errors, "y", actual, expected.double())
            # weight and bias gradients; the norm's backward is the BF16 path's own
            _note(errors, "dw", fused_out[7], plain_out[5].double())
            _note(errors, "db", fused_out[8], plain_out[6].double())
            normed32 = x.detach().double().requires_grad_()
            out = torch.nn.functional.layer_norm(
                normed32, (width,), norm.weight.double(), norm.bias.double(), norm.eps
            )
            (dx,) = torch.autograd.grad(out, normed32, plain_out[4].double())
            _note(errors, "dx", fused_out[4], dx)
            _commit(engine)
    # a rounding of the norm may fall to the other side: then whole FP8 steps are between the two
    limits = {"y": 1e-2, "dx": 1e-2, "dw": 1e-2, "db": 1e-2}
    return _row(f"fused {scaling}", errors, limits)


def _note(errors: dict[str, float], name: str, actual: Tensor, expected: Tensor) -> None:
    difference = (actual.detach().double() - expected.detach()).norm()
    error = float(difference / expected.detach().norm().clamp(min=1e-30))
    # NaN must not lose against a number
    errors[name] = error if error != error else max(errors.get(name, 0.0), error)


def _row(name: str, errors: dict[str, float], limits: dict[str, float] = _LIMITS) -> dict[str, Any]:
    ok = all(errors[key] <= limit for key, limit in limits.items())
    return {"gate": name, "ok": ok, "relative_errors": rounded(errors)}
