"""The Transformer Engine adapter, on a stand-in that follows the library's rules.

What only the real library can show (its kernels) is for a GPU; see test_padding_gpu.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.linear.recipe import LinearRecipe
from modules.linear.te import TeEngine, load_te, te_recipe
from modules.linear.watch import Watch
from tests.support import te_stand_in
from tests.support.two_ranks import TwoRanks
from training.precision import fp8_autocast

K, N = 32, 48
HOSTILE = (0, 1, 7, 15, 16, 17, 31, 4095)
POISON = 3e4


def recipe_of(**fields: Any) -> LinearRecipe:
    known = {"scaling": "tensorwise", "grad_dtype": torch.float8_e5m2, "history_len": 4}
    return LinearRecipe(backend="te", **(known | fields))


class Layer(nn.Module):
    """A linear with its engine, as layers own them."""

    def __init__(self, *, bias: bool = True, **fields: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.proj = nn.Linear(K, N, bias=bias)
        self.recipe = recipe_of(**fields)
        self.engine = TeEngine(
            name="layers.0.proj", in_features=K, out_features=N, recipe=self.recipe, state=None
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.engine.linear(x, self.proj.weight, self.proj.bias)

    @property
    def module(self) -> te_stand_in.Linear:
        return self.engine._module

    def step(self, x: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output and gradient of x; the backward pass runs outside of the region."""
        x = x.clone().requires_grad_()
        self.zero_grad()
        with fp8_autocast(self.recipe):
            out = self(x)
        out.backward(torch.ones_like(out) if grad is None else grad)
        assert x.grad is not None
        return out.detach(), x.grad


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    te_recipe.cache_clear()
    yield te_stand_in.install(monkeypatch)
    te_recipe.cache_clear()


def rows(num_tokens: int, *, dtype: torch.dtype = torch.bfloat16, width: int = K) -> Tensor:
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, width).to(dtype)


def per_tensor(x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """What is left of x in FP8 with one current scale, from the rows there are."""
    fp8_max = torch.finfo(fp8_dtype).max
    scale = fp8_max / x.float().abs().amax() if x.numel() else torch.ones(())
    return (x.float() * scale).to(fp8_dtype).float() / scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", HOSTILE)
def test_rows_in_are_rows_out_and_padding_has_no_effect(
    te: SimpleNamespace, num_tokens: int, dtype: torch.dtype
) -> None:
    layer = Layer()
    x, grad = rows(num_tokens, dtype=dtype), rows(num_tokens, dtype=dtype, width=N)
    out, dx = layer.step(x, grad)
    assert out.shape == (num_tokens, N) and out.dtype == dtype
    assert dx.shape == (num_tokens, K) and dx.dtype == dtype

    x_q, w_q = (per_tensor(t, torch.float8_e4m3fn) for t in (x, layer.proj.weight.detach()))
    grad_q = per_tensor(grad, torch.float8_e5m2)
    wanted = {
        "out": (out, x_q @ w_q.t() + layer.proj.bias.detach().to(dtype).float()),
        "dx": (dx, grad_q @ w_q),
        "weight": (layer.proj.weight.grad, grad_q.t() @ x_q),
        "bias": (layer.proj.bias.grad, grad.float().sum(0)),
    }
    for name, (found, expected) in wanted.items():
        assert found is not None, name
        error = (found.float() - expected).norm()
        assert error <= (1e-6 if dtype == torch.float32 else 4e-3) * expected.norm(), name
    if num_tokens == 0:
        assert not layer.proj.weight.grad.any() and not layer.proj.bias.grad.any()


@pytest.mark.parametrize(("scaling", "multiple"), [("delayed", 16), ("mxfp8", 32)])
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 33])
def test_what_is_added_to_the_rows_is_zero_in_both_directions(
    te: SimpleNamespace, scaling: str, multiple: int, num_tokens: int
) -> None:
    layer = Layer(scaling=scaling)
    full = torch.full((64, K), POISON, dtype=torch.bfloat16)
    full[:num_tokens] = rows(num_tokens)
    # a view of poisoned memory, and a gradient whose own memory goes on behind it
    layer.step(full[:num_tokens], torch.full((64, N), POISON)[:num_tokens].bfloat16())
    for seen in (*layer.module.seen_rows, *layer.module.seen_grads):
        # no kernel of the library is asked what it does without rows
        assert seen.shape[0] == max(multiple, -(-num_tokens // multiple) * multiple)
        assert not seen[num_tokens:].any()


def test_rows_that_fit_are_not_copied(te: SimpleNamespace) -> None:
    layer = Layer()
    with fp8_autocast(layer.recipe):
        out = layer(rows(32).requires_grad_())
    assert not out._is_view()


def test_the_parameters_stay_the_layers_own(te: SimpleNamespace) -> None:
    layer = Layer()
    names = [name for name, _ in layer.named_parameters()]
    layer.step(rows(16))
    assert [name for name, _ in layer.named_parameters()] == names == ["proj.weight", "proj.bias"]
    assert list(layer.state_dict()) == names
    assert list(layer.engine.modules()) == [layer.engine]
    assert layer.module.weight is layer.proj.weight and layer.module.bias is layer.proj.bias
    assert layer.proj.weight.grad is not None and layer.proj.weight.grad.dtype == torch.float32

    layer.proj.weight = nn.Parameter(torch.zeros(N, K))
    out, _ = layer.step(rows(16))
    torch.testing.assert_close(out, layer.proj.bias.detach().bfloat16().expand_as(out))


def test_without_bias(te: SimpleNamespace) -> None:
    layer = Layer(bias=False)
    layer.step(rows(16))
    assert layer.proj.weight.grad is not None
    with fp8_autocast(layer.recipe), pytest.raises(RuntimeError, match=r"layers\.0\.proj.*bias"):
        layer.engine.linear(rows(16), layer.proj.weight, torch.zeros(N))


def test_outside_of_the_region_is_an_error_not_bf16(te: SimpleNamespace) -> None:
    layer = Layer()
    with pytest.raises(RuntimeError, match=r"layers\.0\.proj.*fp8_autocast"):
        layer(rows(16))


def test_a_weight_gradient_that_is_not_fp8(te: SimpleNamespace) -> None:
    layer, plain = Layer(), Layer(fp8_wgrad=False)
    x, grad = rows(17), rows(17, width=N)
    fp8, bf16 = layer.step(x, grad), plain.step(x, grad)
    for found, expected in zip(bf16, fp8, strict=True):
        assert torch.equal(found, expected)
    exact = grad.float().t() @ x.float()
    torch.testing.assert_close(plain.proj.weight.grad, exact, rtol=1e-2, atol=1e-2)
    fp8_error, bf16_error = (
        float((one.proj.weight.grad - exact).norm() / exact.norm()) for one in (layer, plain)
    )
    assert bf16_error < 3e-3 < 1e-2 < fp8_error
    assert torch.equal(plain.proj.bias.grad, layer.proj.bias.grad)
    assert plain.module.weight.grad is None  # nor computed
    # an optimizer's new weights are seen
    with torch.no_grad():
        plain.proj.weight.zero_()
    assert not (plain.step(x, grad)[0] - plain.proj.bias.detach().bfloat16()).any()


def test_delayed_scales_follow_both_directions(te: SimpleNamespace) -> None:
    layer = Layer(scaling="delayed")
    layer.step(rows(16) * 0 + 2, torch.full((16, N), 4.0, dtype=torch.bfloat16))
    state = layer.engine.fp8_state_dict()
    assert state["history_fwd"].shape == (4, 3) and state["history_bwd"].shape == (4, 2)
    assert state["history_fwd"][-1, 0] == 2 and state["history_bwd"][-1, 0] == 4
    assert state["scale_fwd"][0] == 448 / 2 and state["scale_bwd"][0] == 57344 / 4
    assert not state["history_fwd"][0].any() and not state["history_bwd"][0].any()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_bad_step_is_taken_back(te: SimpleNamespace, steps_before: int) -> None:
    layer = Layer(scaling="delayed")
    for _ in range(steps_before):
        layer.step(rows(16))
    before = layer.engine.snapshot()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    layer.step(rows(16) * 1000, rows(16, width=N) * 1e6)
    assert any(not torch.equal(layer.engine.snapshot()[n], t) for n, t in kept.items()) or not kept
    layer.engine.restore(before)
    after = layer.engine.snapshot()
    if steps_before:
        assert all(torch.equal(after[name], kept[name]) for name in kept)
    else:
        assert all((after[f"scale_{way}"] == 1).all() for way in ("fwd", "bwd"))
        assert not after["history_fwd"].any() and not after["history_bwd"].any()
    # the step that follows is the one that would have been
    again, other = layer.step(rows(16)), Layer(scaling="delayed")
    for _ in range(steps_before):
        other.step(rows(16))
    assert torch.equal(again[0], other.step(rows(16))[0])


@pytest.mark.parametrize("is_first", [True, False])
def test_an_evaluation_in_fp8_leaves_the_state(te: SimpleNamespace, is_first: bool) -> None:
    layer = Layer(scaling="delayed", fp8_eval=True)
    if not is_first:
        layer.step(rows(16))
    before = layer.engine.snapshot()
    layer.eval()
    with torch.no_grad(), fp8_autocast(layer.recipe):
        out = layer(rows(3) * 1000)
    assert out.shape == (3, N) and not out.requires_grad
    after = layer.engine.snapshot()
    if is_first:
        assert not after["history_fwd"].any() and (after["scale_fwd"] == 1).all()
    else:
        assert before and all(torch.equal(after[name], before[name]) for name in before)
    layer.train()
    layer.step(rows(16))
    assert layer.engine.snapshot()["history_fwd"][-1, 0] == rows(16).float().abs().amax()


def test_recomputing_the_norm_runs_nothing_twice(te: SimpleNamespace) -> None:
    layer, norm = Layer(scaling="delayed"), nn.LayerNorm(K)
    x = rows(17).requires_grad_()
    with fp8_autocast(layer.recipe):
        uvqk, residual = layer.engine.norm_linear(
            x,
            norm,
            weight=layer.proj.weight,
            bias=layer.proj.bias,
            backend="pytorch",
            recompute_norm=True,
        )
    (uvqk.float().sum() + residual.float().sum()).backward()
    assert len(layer.module.seen_rows) == 1
    assert x.grad is not None and norm.weight.grad is not None


@pytest.mark.parametrize("length", [2, 4, 7])
@pytest.mark.parametrize("is_built", [True, False])
def test_state_travels_into_another_run(te: SimpleNamespace, length: int, is_built: bool) -> None:
    layer = Layer(scaling="delayed")
    for factor in (1, 8, 4):
        layer.step(rows(16) * factor)
    saved = layer.engine.fp8_state_dict()
    other = Layer(scaling="delayed", history_len=length)
    if is_built:
        other.step(rows(16) * 100)
    other.engine.load_fp8_state_dict(saved)
    if not is_built:
        assert other.engine.fp8_state_dict().keys() == saved.keys()
    out, _ = other.step(rows(16))
    assert torch.equal(out, layer.step(rows(16))[0])
    found = other.engine.fp8_state_dict()["history_fwd"]
    assert found.shape == (length, 3)
    newest = min(length, 4) - 1
    assert torch.equal(found[-newest:], layer.engine.fp8_state_dict()["history_fwd"][-newest:])


@pytest.mark.parametrize("is_built", [True, False])
def test_gradient_scales_of_another_format_are_converted(
    te: SimpleNamespace, is_built: bool
) -> None:
    layer = Layer(scaling="delayed")
    layer.step(rows(16))
    saved = layer.engine.fp8_state_dict()
    other = Layer(scaling="delayed", grad_dtype=torch.float8_e4m3fn)
    if is_built:
        other.step(rows(16))
    other.engine.load_fp8_state_dict(saved)
    # a file written before the first step still says which format its scales are for
    other.engine.load_fp8_state_dict(other.engine.fp8_state_dict())
    if not is_built:
        other.engine._module_for(other.proj.weight, other.proj.bias)
    found = other.engine.fp8_state_dict()
    torch.testing.assert_close(found["scale_bwd"], saved["scale_bwd"] * 448 / 57344)
    assert torch.equal(found["scale_fwd"], saved["scale_fwd"])


def test_only_delayed_scaling_has_state(te: SimpleNamespace) -> None:
    layer = Layer()
    layer.step(rows(16))
    assert layer.engine.fp8_state_dict() == {} == layer.engine.snapshot()
    layer.engine.restore({})
    layer.engine.load_fp8_state_dict({})


def _two_steps_without_rows_on_rank_1(rank: int, world_size: int) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        te_stand_in.install(monkeypatch)
        te_recipe.cache_clear()
        layer = Layer(scaling="delayed")
        for step in (1, 2):
            layer.step(rows(0 if rank else 32).clamp(-1, 1) * 2 * step)
            gradient = layer.proj.weight.grad
            assert gradient is not None and bool(gradient.any()) != bool(rank)
        te_recipe.cache_clear()
        return layer.engine.snapshot()


def test_a_rank_without_rows_agrees_on_scales_from_the_first_step(two_ranks: TwoRanks) -> None:
    first, second = two_ranks.run(_two_steps_without_rows_on_rank_1)
    assert first["history_fwd"][-2:, 0].tolist() == [2.0, 4.0]
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_recipes(te: SimpleNamespace) -> None:
    kinds = te.recipe
    delayed = te_recipe(
        recipe_of(scaling="delayed", history_len=7, amax_compute_algo="most_recent", margin=2)
    )
    assert delayed == kinds.DelayedScaling(
        fp8_format=kinds.Format.HYBRID,
        amax_history_len=7,
        amax_compute_algo="most_recent",
        margin=2,
    )
    e4m3 = {"grad_dtype": torch.float8_e4m3fn}
    assert te_recipe(recipe_of(**e4m3)) == kinds.Float8CurrentScaling(kinds.Format.E4M3)
    assert te_recipe(recipe_of()) is te_recipe(recipe_of())
    assert isinstance(te_recipe(recipe_of(scaling="blockwise")), kinds.Float8BlockScaling)
    assert isinstance(te_recipe(recipe_of(scaling="mxfp8")), kinds.MXFP8BlockScaling)
    del kinds.MXFP8BlockScaling
    te_recipe.cache_clear()
    with pytest.raises(NotImplementedError, match="mxfp8"):
        te_recipe(recipe_of(scaling="mxfp8"))


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_a_watch_sees_all_operands_without_padding(te: SimpleNamespace, scaling: str) -> None:
    layer = Layer(scaling=scaling)
    x, grad = rows(33), rows(33, width=N) * 8
    layer.step(x, grad)
    with Watch() as watch:
        layer.step(x, grad)
    found = {figures.operand: figures for figures in watch.figures()}
    operands = {"x": (x, 448), "w": (layer.proj.weight, 448), "dy": (grad, 57344)}
    assert found.keys() == operands.keys()
    for operand, (values, fp8_max) in operands.items():
        figures = found[operand]
        assert figures.module == "layers.0.proj" and figures.num_values == values.numel()
        assert figures.amax == values.detach().float().abs().amax()
        if scaling in ("delayed", "tensorwise"):
            assert figures.scale == pytest.approx(fp8_max / figures.amax, rel=1e-5)
    seen_twice = len(layer.module.seen_rows)
    layer.step(x, grad)
    assert len(watch.figures()) == 3 and len(layer.module.seen_rows) == seen_twice + 1


class _EmptyMetapackage:
    """An importer that fails as the metapackage without its extension does."""

    def find_spec(self, name: str, *unused: object) -> None:
        if name == "transformer_engine":
            raise RuntimeError("Found empty `transformer-engine` meta package installed.\nMore")


def test_a_package_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_EmptyMetapackage(), *sys.meta_path])
    with pytest.raises(RuntimeError, match=r"transformer_engine 2\.x.*Found empty") as caught:
        load_te()
    assert "More" not in str(caught.value)

    old = ModuleType("transformer_engine")
    old.__version__ = "1.13.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", old)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch"))
    with pytest.raises(RuntimeError, match=r"found version 1\.13\.0"):
        load_te()


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise"])
@pytest.mark.parametrize("value", [0.0, 1e-40, torch.nan])
def test_rows_of_one_odd_value(te: SimpleNamespace, scaling: str, value: float) -> None:
    layer = Layer(scaling=scaling)
    for _ in range(2):
        out, dx = layer.step(torch.full((5, K), value))
        assert dx.isfinite().all()
        assert out.isnan().all() if value != value else out.isfinite().all()
