"""The emulated FP8 linear: its three products by hand, any number of rows, what it records."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modules.linear.emulated import EmulatedEngine
from modules.linear.recipe import LinearRecipe
from modules.linear.state import Fp8State
from modules.linear.watch import Watch
from ops.quantize import dequantize, quantize

K, N = 48, 80
NAME = "layers.0.proj"
HOSTILE = (0, 1, 7, 15, 16, 17, 31, 4095)
SCALINGS = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def recipe_of(scaling: str, **fields: Any) -> LinearRecipe:
    known: dict[str, Any] = {
        "backend": "emulated",
        "scaling": scaling,
        "grad_dtype": E5M2,
        "history_len": 4,
    }
    return LinearRecipe(**(known | fields))


class Layer(nn.Module):
    """A linear, its engine and the state of delayed scaling."""

    def __init__(
        self, scaling: str = "tensorwise", *, width: int = K, out: int = N, bias: bool = True,
        **fields: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(5)
        self.proj = nn.Linear(width, out, bias=bias)
        recipe = recipe_of(scaling, **fields)
        self.state = Fp8State([NAME], recipe) if scaling == "delayed" else None
        self.engine = EmulatedEngine(
            name=NAME, in_features=width, out_features=out, recipe=recipe, state=self.state
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.engine.linear(x, self.proj.weight, self.proj.bias)

    def step(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Output and gradients; nothing is committed."""
        x = x.detach().requires_grad_()
        self.zero_grad()
        out = self(x)
        out.backward(grad)
        found = {"out": out.detach(), "dx": x.grad, "dw": self.proj.weight.grad}
        if self.proj.bias is not None:
            found["db"] = self.proj.bias.grad
        return found

    @property
    def amax(self) -> list[float]:
        assert self.state is not None
        return self.state.amax.tolist()


def rows(num_rows: int, width: int = K, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    draw = torch.Generator().manual_seed(num_rows + width)
    return torch.randn(num_rows, width, generator=draw).to(dtype)


def kept(values: Tensor, granularity: str, dtype: torch.dtype = E4M3) -> Tensor:
    return dequantize(quantize(values.detach(), dtype, granularity=granularity))


def by_hand(layer: Layer, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The three products, each operand quantised along the axis it is summed over."""
    recipe, weight = layer.engine.recipe, layer.proj.weight
    dy = recipe.grad_dtype
    left, right = {"rowwise": ("rows", "rows"), "blockwise": ("1x128", "128x128"),
                   "mxfp8": ("1x32", "1x32")}.get(recipe.scaling, ("tensor", "tensor"))  # fmt: skip
    dw = grad.float().t() @ x.float()
    if recipe.fp8_wgrad and recipe.scaling != "rowwise":
        dw = kept(grad.t(), left, dy) @ kept(x.t(), left).t()
    bias = layer.proj.bias
    return {
        "out": kept(x, left) @ kept(weight, right).t()
        + (0 if bias is None else bias.detach().to(x.dtype).float()),
        "dx": kept(grad, left, dy) @ kept(weight.t(), right).t(),
        "dw": dw,
        "db": grad.float().sum(0),
    }


def exact(layer: Layer, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x, grad, weight = x.double(), grad.double(), layer.proj.weight.detach().double()
    return {"out": x @ weight.t() + layer.proj.bias.detach(), "dx": grad @ weight,
            "dw": grad.t() @ x, "db": grad.sum(0)}  # fmt: skip


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("num_rows", HOSTILE)
def test_rows_in_are_rows_out(num_rows: int, scaling: str, dtype: torch.dtype) -> None:
    layer = Layer(scaling)
    x, grad = rows(num_rows, dtype=dtype), rows(num_rows, N, dtype=dtype)
    found = layer.step(x, grad)
    assert found["out"].shape == (num_rows, N) and found["out"].dtype == dtype
    assert found["dx"].shape == (num_rows, K) and found["dx"].dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 3e-3
    for name, wanted in by_hand(layer, x, grad).items():
        assert error(found[name], wanted) <= tolerance, name
    for parameter in (layer.proj.weight, layer.proj.bias):
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert bool(parameter.grad.any()) == (num_rows > 0)


@pytest.mark.parametrize("fields", [{}, {"grad_dtype": E4M3}], ids=["hybrid", "e4m3"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_it_differs_from_an_exact_linear_as_fp8_does(scaling: str, fields: dict) -> None:
    layer = Layer(scaling, **fields)
    x, grad = rows(301), rows(301, N)
    found, wanted = layer.step(x, grad), exact(layer, x, grad)
    # one e4m3 rounding is 2.65% rms, one of e5m2 twice that
    largest = 0.045 if fields else 0.07
    assert 0.02 < error(found["out"], wanted["out"]) < 0.045
    assert 0.02 < error(found["dx"], wanted["dx"]) < largest
    if scaling == "rowwise":
        assert error(found["dw"], wanted["dw"]) < 1e-6
    else:
        assert 0.02 < error(found["dw"], wanted["dw"]) < largest
    if not fields:
        assert error(found["dx"], wanted["dx"]) > 0.045


def test_scales_follow_the_axis_of_each_product() -> None:
    """Rows of very different size: what shares a scale with them loses its small values."""
    x, grad = rows(256, 256), rows(256, 256)
    for by_row in (x, grad):
        by_row[:128] *= 2.0**-20  # tokens 0..127 are small
    errors = {}
    for scaling in SCALINGS:
        layer = Layer(scaling, width=256, out=256)
        with torch.no_grad():
            layer.proj.weight[:, :128] *= 2.0**-20
            layer.proj.bias.zero_()
        found, wanted = layer.step(x, grad), exact(layer, x, grad)
        errors[scaling] = {
            "small rows of out": error(found["out"][:128], wanted["out"][:128]),
            "small rows of dx": error(found["dx"][128:, :128], wanted["dx"][128:, :128]),
        }
    for scaling in ("rowwise", "blockwise", "mxfp8"):
        assert max(errors[scaling].values()) < 0.08, scaling
    for scaling in ("delayed", "tensorwise"):
        assert min(errors[scaling].values()) > 0.5, scaling


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_weight_gradient_that_is_not_fp8(scaling: str) -> None:
    layer, plain = Layer(scaling), Layer(scaling, fp8_wgrad=False)
    x, grad = rows(17), rows(17, N)
    found, other = plain.step(x, grad), layer.step(x, grad)
    assert error(found["dw"], grad.double().t() @ x.double()) < 1e-6
    for name in ("out", "dx", "db"):
        assert torch.equal(found[name], other[name])


def test_without_bias() -> None:
    layer = Layer(bias=False)
    x, grad = rows(9), rows(9, N)
    found = layer.step(x, grad)
    for name in ("out", "dx", "dw"):
        assert error(found[name], by_hand(layer, x, grad)[name]) < 3e-3


@pytest.mark.parametrize("tail", [0.0, 1e4, math.nan], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_memory_behind_the_rows_is_not_seen(scaling: str, tail: float) -> None:
    layer = Layer(scaling)
    buffers = torch.full((64, K), tail).bfloat16(), torch.full((64, N), tail).bfloat16()
    views = []
    for buffer in buffers:
        buffer[:31] = rows(31, buffer.shape[1])
        views.append(buffer[:31])
    found = layer.step(*views)
    amax = layer.amax if scaling == "delayed" else None
    wanted = layer.step(rows(31), rows(31, N))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    if amax is not None:
        assert amax == [
            float(t.detach().float().abs().amax()) for t in (views[0], layer.proj.weight, views[1])
        ]


@pytest.mark.parametrize("multiple", [16, 64])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("num_rows", [1, 7, 17, 31])
def test_rows_of_zeros_change_nothing(num_rows: int, scaling: str, multiple: int) -> None:
    """What a kernel pads with takes no part, whatever the scales are made of."""
    layer, padded = Layer(scaling), Layer(scaling)
    x, grad = rows(num_rows, dtype=torch.float32), rows(num_rows, N, dtype=torch.float32)
    missing = (0, 0, 0, -num_rows % multiple)
    found = layer.step(x, grad)
    other = padded.step(nn.functional.pad(x, missing), nn.functional.pad(grad, missing))
    for name, wanted in found.items():
        same = other[name] if name in ("dw", "db") else other[name][:num_rows]
        torch.testing.assert_close(same, wanted, rtol=1e-5, atol=1e-6)
    assert not other["dx"][num_rows:].any()
    if scaling == "delayed":
        assert layer.amax == padded.amax


def test_delayed_scales_are_current_until_the_first_commit() -> None:
    layer, current = Layer("delayed"), Layer("tensorwise")
    x, grad = rows(16), rows(16, N)
    found, wanted = layer.step(x, grad), current.step(x, grad)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    largest = [float(t.detach().float().abs().amax()) for t in (x, layer.proj.weight, grad)]
    assert layer.amax == largest

    assert layer.state is not None
    layer.state.commit()
    # the scales are those of the past: what is larger saturates, what is smaller is cut finer
    found = layer.step(4 * x, grad)
    scale = torch.tensor(448.0) / largest[0]
    clipped = quantize(4 * x, E4M3, scale=scale)
    assert (clipped.values.float().abs() == 448).sum() > 10
    wanted_out = dequantize(clipped) @ kept(layer.proj.weight, "tensor").t()
    wanted_out += layer.proj.bias.detach().bfloat16()
    assert error(found["out"], wanted_out) < 3e-3
    assert layer.amax == [4 * largest[0], *largest[1:]]
    wanted_dw = kept(grad.t(), "tensor", E5M2) @ dequantize(clipped)
    assert error(found["dw"], wanted_dw) < 1e-6


def test_margin_is_for_delayed_scales_alone() -> None:
    x = rows(16)
    for scaling, is_moved in (("delayed", True), ("tensorwise", False)):
        layer = Layer(scaling, margin=7)
        with torch.no_grad():
            found, plain = layer(x), Layer(scaling)(x)
        assert torch.equal(found, plain) != is_moved


def test_parts_and_recomputation_leave_the_same_maxima() -> None:
    x, grad = rows(32), rows(32, N)
    whole, parts, again = Layer("delayed"), Layer("delayed"), Layer("delayed")
    whole.step(x, grad)
    for place in range(0, 32, 8):
        parts(x[place : place + 8]).backward(grad[place : place + 8])
    checkpoint(again, x.clone().requires_grad_(), use_reentrant=False).backward(grad)
    assert whole.amax == parts.amax == again.amax
    assert again.proj.weight.grad is not None
    assert torch.equal(again.proj.weight.grad, whole.proj.weight.grad)


def test_evaluation_is_bf16_unless_asked_for_and_never_recorded() -> None:
    layer = Layer("delayed")
    assert layer.engine.is_active and layer.engine.records
    layer.eval()
    assert not layer.engine.is_active and not layer.engine.records
    assert Layer(fp8_eval=True).eval().engine.is_active

    layer = Layer("delayed", fp8_eval=True)
    layer.step(rows(16), rows(16, N))
    assert layer.state is not None
    layer.state.commit()
    before = copy.deepcopy(dict(layer.state.named_buffers()))
    layer.eval()
    with torch.no_grad():
        out = layer(1000 * rows(3))
    assert out.shape == (3, N) and torch.isfinite(out).all()
    assert all(torch.equal(b, before[name]) for name, b in layer.state.named_buffers())
    # training mode counts, not whether gradients are on
    layer.train()
    with torch.no_grad():
        layer(rows(3))
    assert layer.amax[0] == float(rows(3).float().abs().amax())


def test_new_weights_are_seen_at_once() -> None:
    layer = Layer("tensorwise")
    layer(rows(16))
    with torch.no_grad():
        layer.proj.weight.zero_()
        assert torch.equal(layer(rows(2)), layer.proj.bias.bfloat16().expand(2, N))


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("operand", ["x", "w", "dy"])
def test_what_is_not_finite_is_found_in_the_state(operand: str, is_warm: bool, bad: float) -> None:
    layer = Layer("delayed")
    assert layer.state is not None
    if is_warm:
        layer.step(rows(16), rows(16, N))
        layer.state.commit()
    x, grad = rows(16), rows(16, N)
    {"x": x, "dy": grad, "w": layer.proj.weight.data}[operand][3, 4] = bad
    layer.step(x, grad)
    assert bool(layer.state.non_finite())
    assert layer.state.first_bad() == f"{NAME}: {operand}"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_nan_reaches_the_output(scaling: str) -> None:
    x = rows(16)
    x[3, 4] = math.nan
    out = Layer(scaling)(x)
    assert out[3].isnan().all()


def test_a_watch_is_told_of_each_operand_once() -> None:
    layer = Layer("mxfp8")
    x, grad = rows(16), rows(16, N)
    with Watch() as watch:
        layer.step(x, grad)
        layer.eval()
        layer(x)
    figures = {one.operand: one for one in watch.figures()}
    sizes = {name: one.num_values for name, one in figures.items()}
    assert sizes == {"x": 16 * K, "w": N * K, "dy": 16 * N}
    assert {one.module for one in figures.values()} == {NAME}
    assert figures["dy"].amax == float(grad.float().abs().amax())


def test_the_engine_owns_nothing() -> None:
    layer = Layer("delayed")
    assert not list(layer.engine.parameters()) and not list(layer.engine.buffers())
    assert list(layer.engine.modules()) == [layer.engine]
    assert list(layer.state_dict()) == ["proj.weight", "proj.bias"]
    twin = copy.deepcopy(layer)
    assert twin.engine.state is twin.state is not layer.state
