"""The native engine: against plain linears, against `ops.quantize`, and what it keeps.

In Triton's interpreter on a machine without a GPU; compiled with one.
"""

import pytest
import torch
from torch import Tensor, nn

from modules.linear.native import NativeEngine
from modules.linear.recipe import LinearRecipe
from modules.linear.sink import gradient_sink
from modules.linear.state import Fp8State
from modules.linear.watch import Watch
from ops.norm import layer_norm
from ops.quantize import dequantize, quantize
from ops.silu_split import silu_split
from tests.ops.quantize_kernels import DEVICE, INTERPRETED, TOKENS

SCALINGS = ["delayed", "tensorwise", "rowwise", "blockwise"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
K, N = 48, 64


def make_engine(
    scaling: str, in_features: int = K, out_features: int = N, **recipe
) -> NativeEngine:
    grad_dtype = E4M3 if scaling == "blockwise" else E5M2
    chosen = LinearRecipe(
        backend="native", scaling=scaling, grad_dtype=grad_dtype, history_len=4, **recipe
    )
    state = Fp8State(["it"], chosen).to(DEVICE) if scaling == "delayed" else None
    return NativeEngine(
        name="it",
        in_features=in_features,
        out_features=out_features,
        recipe=chosen,
        state=state,
    )


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def run(engine: NativeEngine, num_rows: int, *, seed: int = 0) -> dict[str, Tensor]:
    """One forward and backward of the bare linear; its tensors by name."""
    x = random(num_rows, K, seed=seed, dtype=torch.bfloat16).requires_grad_()
    weight, bias = nn.Parameter(random(N, K)), nn.Parameter(random(N))
    dy = random(num_rows, N, seed=seed + 1, dtype=torch.bfloat16) * 1e-3
    y = engine.linear(x, weight, bias)
    dx, dw, db = torch.autograd.grad(y, [x, weight, bias], dy)
    found = {"y": y, "dx": dx, "dw": dw, "db": db, "x": x, "weight": weight, "bias": bias}
    return {**{name: tensor.detach() for name, tensor in found.items()}, "dy_in": dy}


def error(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def exact(engine: NativeEngine, ran: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the products of rounded operands are."""

    def cast(matrix: Tensor, operand: str, dtype: torch.dtype = E4M3) -> Tensor:
        scheme = engine.scheme
        granularity = scheme.weight_granularity if operand == "w" else scheme.granularity
        return dequantize(quantize(matrix, dtype, granularity=granularity)).double()

    x, weight, dy = ran["x"], ran["weight"], ran["dy_in"]
    expected = {
        "y": cast(x, "x") @ cast(weight, "w").t() + ran["bias"],
        "dx": cast(dy, "dy", engine.recipe.grad_dtype) @ cast(weight.t(), "w").t(),
        "db": dy.double().sum(0),
    }
    if engine.scheme.granularity == "rows" or not engine.recipe.fp8_wgrad:
        return expected | {"dw": dy.double().t() @ x.double()}
    return expected | {"dw": cast(dy.t(), "dy", engine.recipe.grad_dtype) @ cast(x.t(), "x").t()}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_of_rounded_operands(scaling: str) -> None:
    for num_rows, fp8_wgrad in (
        ((17, True), (1, False)) if INTERPRETED else ((1, True), (131, True), (17, False))
    ):
        engine = make_engine(scaling, fp8_wgrad=fp8_wgrad)
        ran = run(engine, num_rows)
        is_plain = scaling == "rowwise" or not fp8_wgrad
        for name, expected in exact(engine, ran).items():
            limit = 4e-3 if name in ("y", "dx") or is_plain else 1e-3
            assert error(ran[name], expected) < limit, name
        assert ran["dw"].dtype == torch.float32 and ran["y"].dtype == torch.bfloat16


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_rows_give_zero_gradients(scaling: str) -> None:
    engine = make_engine(scaling)
    ran = run(engine, 0)
    assert ran["y"].shape == (0, N) and ran["dx"].shape == (0, K)
    assert torch.equal(ran["dw"], torch.zeros(N, K, device=DEVICE))
    assert torch.equal(ran["db"], torch.zeros(N, device=DEVICE))
    if engine.state is not None:  # the weight was there
        assert (engine.state.amax > 0).tolist() == [False, True, False]


@pytest.mark.parametrize("num_rows", TOKENS)
def test_padding_changes_nothing(num_rows: int) -> None:
    """Rows of zeros behind the tokens: the same outputs, gradients and maxima."""
    plain, padded = make_engine("delayed"), make_engine("delayed")
    x = random(num_rows, K, dtype=torch.bfloat16)
    dy = random(num_rows, N, dtype=torch.bfloat16)
    weight = nn.Parameter(random(N, K))
    found = []
    for engine, missing in ((plain, 0), (padded, -num_rows % 16)):
        rows = torch.nn.functional.pad(x, (0, 0, 0, missing)).requires_grad_()
        y = engine.linear(rows, weight, None)
        grads = torch.autograd.grad(
            y, [rows, weight], torch.nn.functional.pad(dy, (0, 0, 0, missing))
        )
        found.append((y[:num_rows], grads[0][:num_rows], grads[1], engine.state.amax))
    for actual, expected in zip(*found, strict=True):
        assert error(actual, expected) < 1e-6


def test_delayed_scaling_uses_the_step_before() -> None:
    engine = make_engine("delayed")
    ran = run(engine, 17)
    state = engine.state
    for operand, name in (("x", "x"), ("w", "weight"), ("dy", "dy_in")):
        assert state.amax[state.slot("it", operand)] == ran[name].float().abs().amax()
    state.commit()
    later = run(engine, 17, seed=5)
    at = state.slot("it", "x")
    x = dequantize(quantize(later["x"], E4M3, scale=state.scale[at : at + 1])).double()
    w = dequantize(quantize(later["weight"], E4M3)).double()
    assert error(later["y"], x @ w.t() + later["bias"]) < 4e-3
    assert state.amax[at] == later["x"].float().abs().amax()


def test_evaluation_writes_no_state() -> None:
    engine = make_engine("delayed", fp8_eval=True)
    run(engine, 5)
    engine.state.commit()
    engine.eval()
    before = engine.state.amax.clone()
    run(engine, 9)
    assert torch.equal(engine.state.amax, before)
    assert make_engine("delayed").eval().is_active is False


def test_a_weight_is_cast_once_while_it_is_held() -> None:
    engine = make_engine("tensorwise")
    weight = nn.Parameter(random(N, K))
    first, _ = engine.weights(weight, None, dtype=torch.bfloat16)
    assert engine.weights(weight, None, dtype=torch.bfloat16)[0] is not first
    engine.hold_weights(True)
    held, _ = engine.weights(weight, None, dtype=torch.bfloat16)
    assert engine.weights(weight, None, dtype=torch.bfloat16)[0] is held
    with torch.no_grad():
        weight.mul_(2.0)
    changed, _ = engine.weights(weight, None, dtype=torch.bfloat16)
    torch.testing.assert_close(changed.scale, held.scale * 2)


def test_training_records_a_weight_that_evaluation_has_cast() -> None:
    engine = make_engine("delayed")
    engine.hold_weights(True)
    weight = nn.Parameter(random(N, K))
    engine.eval()
    engine.weights(weight, None, dtype=torch.bfloat16)
    assert not engine.state.amax.any()
    engine.train()
    engine.weights(weight, None, dtype=torch.bfloat16)
    assert engine.state.amax[engine.state.slot("it", "w")] == weight.abs().max()


HEADS, DIM, WIDTH = 1, 16, 32


def boundary(
    engine: NativeEngine | None, *, recompute_norm: bool = False, fused: bool = True
) -> list[Tensor]:
    """Norm, linear and SiLU: outputs, then gradients of x, weights and biases."""
    x = random(19, WIDTH, dtype=torch.bfloat16).requires_grad_()
    norm = nn.LayerNorm(WIDTH).to(DEVICE)
    weight = nn.Parameter(random(4 * HEADS * DIM, WIDTH) * 0.1)
    bias = nn.Parameter(random(4 * HEADS * DIM) * 0.1)
    if engine is None:
        normed = layer_norm(x.float(), norm.weight, bias_D=norm.bias, eps=norm.eps)
        uvqk, residual = normed @ weight.t(), x
    else:
        uvqk, residual = engine.norm_linear(
            x,
            norm,
            weight=weight,
            bias=None,
            backend="triton",
            recompute_norm=recompute_norm,
        )
    parts = silu_split(
        uvqk,
        HEADS,
        attention_dim=DIM,
        linear_dim=DIM,
        bias_X=bias,
        gradient_target=gradient_sink(uvqk) if fused else None,
        backend="pytorch" if engine is None else "triton",
    )
    grads = [random(19, HEADS, DIM, seed=seed).to(parts[0].dtype) for seed in range(4)]
    leaves = [x, norm.weight, norm.bias, weight, bias]
    cotangents = [*grads, torch.ones_like(residual)]
    return [*parts, *torch.autograd.grad([*parts, residual], leaves, cotangents)]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_fused_boundary_is_close_to_plain(scaling: str) -> None:
    plain = boundary(None)
    for fp8_wgrad in (True, False)[: 1 if scaling == "blockwise" else 2]:
        found = boundary(make_engine(scaling, WIDTH, 4 * HEADS * DIM, fp8_wgrad=fp8_wgrad))
        for actual, expected in zip(found, plain, strict=True):
            assert error(actual, expected) < 0.12


@pytest.mark.parametrize("scaling", ["delayed"] if INTERPRETED else ["delayed", "tensorwise"])
def test_the_sink_and_recomputation_change_no_bit(scaling: str) -> None:
    variants = [{}, {"fused": False}, {"recompute_norm": True}]
    found = []
    for variant in variants:
        engine = make_engine(scaling, WIDTH, 4 * HEADS * DIM)
        found.append(boundary(engine, **variant))
        if engine.state is not None:
            found[-1].append(engine.state.amax)
    for other in found[1:]:
        for place, (actual, expected) in enumerate(zip(other, found[0], strict=True)):
            if place == 8:  # the bias gradient's sums go in another order without the sink
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(actual, expected)


def test_a_second_reader_of_the_projection_is_an_error() -> None:
    engine = make_engine("tensorwise", WIDTH, 4 * HEADS * DIM)
    x = random(5, WIDTH, dtype=torch.bfloat16).requires_grad_()
    norm = nn.LayerNorm(WIDTH).to(DEVICE)
    weight = nn.Parameter(random(4 * HEADS * DIM, WIDTH))
    uvqk, _ = engine.norm_linear(
        x, norm, weight=weight, bias=None, backend="triton", recompute_norm=False
    )
    parts = silu_split(
        uvqk,
        HEADS,
        attention_dim=DIM,
        linear_dim=DIM,
        gradient_target=gradient_sink(uvqk),
        backend="triton",
    )
    with pytest.raises(RuntimeError, match="second reader"):
        (sum(part.sum() for part in parts) + uvqk.sum()).backward()


def test_gated_boundary_is_close_to_plain() -> None:
    width = HEADS * DIM
    found = []
    for backend in ("triton", "pytorch"):
        engine = make_engine("tensorwise", width, K)
        norm = nn.LayerNorm(width).to(DEVICE)
        leaves = [random(19, HEADS, DIM, seed=seed, dtype=torch.bfloat16) for seed in range(2)]
        leaves += [random(19, K, dtype=torch.bfloat16), random(K, width) * 0.2, random(K)]
        attn, u, x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
        out = engine.gated_norm_linear(
            attn,
            u,
            x,
            norm=norm,
            weight=weight,
            bias=bias,
            u_bias_HV=None,
            dropout=0.0,
            backend=backend,
        )
        dy = random(19, K, seed=9, dtype=torch.bfloat16)
        found.append([out, *torch.autograd.grad(out, [attn, u, x, weight, bias], dy)])
    for actual, expected in zip(*found, strict=True):
        assert error(actual, expected) < 2e-2


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_watch_sees_all_operands(scaling: str) -> None:
    engine = make_engine(scaling, WIDTH, 4 * HEADS * DIM)
    with Watch() as watch:
        boundary(engine)
    figures = {row.operand: row for row in watch.figures()}
    assert set(figures) == {"x", "w", "dy"}
    assert all(row.num_values > 0 and row.num_saturated == 0 for row in figures.values())


def test_a_recipe_it_does_not_have() -> None:
    with pytest.raises(NotImplementedError, match="mxfp8"):
        make_engine("mxfp8")
