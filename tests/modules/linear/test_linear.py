"""The linears of a layer with an engine attached: what they hand it, and when they use it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.hstu_layer import HSTULayer
from modules.linear import GatedNormLinear, NormLinear
from modules.linear.emulated import EmulatedEngine
from modules.linear.engine import LinearEngine
from modules.linear.state import Fp8State
from tests.modules.linear.test_emulated import recipe_of
from tests.modules.test_hstu_layer_triton import CONFIG, make_sequence
from tests.ops.elementwise_cases import DEVICE, INTERPRETED

D, X, HEADS, V = 32, 48, 2, 16


def engine_of(name: str, width: int, out: int, **fields: object) -> EmulatedEngine:
    recipe = recipe_of(str(fields.pop("scaling", "delayed")), **fields)
    state = Fp8State([name], recipe) if recipe.scaling == "delayed" else None
    return EmulatedEngine(
        name=name, in_features=width, out_features=out, recipe=recipe, state=state
    )


def norm_linear(*, has_engine: bool = True, recompute_norm: bool = False) -> NormLinear:
    torch.manual_seed(3)
    module = NormLinear(D, X, eps=1e-5, recompute_norm=recompute_norm)
    torch.nn.init.normal_(module.norm.weight)
    torch.nn.init.normal_(module.uvqk.bias)
    if has_engine:
        module.engine = engine_of("uvqk", D, X)
    return module


def gated_norm_linear(*, has_engine: bool = True, dropout: float = 0.0) -> GatedNormLinear:
    torch.manual_seed(3)
    module = GatedNormLinear(HEADS * V, D, eps=1e-5, dropout=dropout)
    torch.nn.init.normal_(module.norm.weight)
    torch.nn.init.normal_(module.proj.bias)
    if has_engine:
        module.engine = engine_of("proj", HEADS * V, D)
    return module


def rows(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=draw).requires_grad_()


@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_norm_then_fp8(num_rows: int) -> None:
    module, x = norm_linear(), rows(num_rows, D)
    assert module.engine is not None
    uvqk, residual = module(x)
    normed = F.layer_norm(x, (D,), module.norm.weight, module.norm.bias, 1e-5)
    wanted = module.engine.linear(normed, module.uvqk.weight, module.uvqk.bias)
    assert torch.equal(uvqk, wanted) and torch.equal(residual, x)
    plain, _ = norm_linear(has_engine=False)(x)
    assert torch.equal(uvqk, plain) == (num_rows == 0)
    (uvqk.sum() + residual.sum()).backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
    assert x.grad is not None and x.grad.shape == (num_rows, D)


def test_recomputing_the_norm_keeps_less_and_changes_nothing() -> None:
    results, kept = [], []
    for recompute_norm in (False, True):
        module, x = norm_linear(recompute_norm=recompute_norm), rows(17, D)
        saved: list[Tensor] = []

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            uvqk, residual = module(x)
        kept.append(sum(tensor.shape == x.shape for tensor in saved))
        (uvqk.square().sum() + residual.sum()).backward()
        engine = module.engine
        assert engine is not None and engine.state is not None and engine.state.amax.all()
        results.append((uvqk, x.grad, module.uvqk.weight.grad, engine.state.amax))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept == [2, 1]  # x, and the normalised rows where they are not computed again


@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_gate_then_fp8(num_rows: int) -> None:
    module = gated_norm_linear()
    attn, u, x = rows(num_rows, HEADS, V), rows(num_rows, HEADS, V), rows(num_rows, D)
    assert module.engine is not None
    out = module(attn, u, x)
    normed = F.layer_norm(attn.flatten(1), (D,), module.norm.weight, module.norm.bias, 1e-5)
    gated = normed * u.flatten(1)
    wanted = x + module.engine.linear(gated, module.proj.weight, module.proj.bias)
    assert torch.equal(out, wanted)
    assert torch.equal(out, gated_norm_linear(has_engine=False)(attn, u, x)) == (num_rows == 0)
    out.sum().backward()
    assert all(t.grad is not None for t in (attn, u, x, *module.parameters()))


def test_dropout_is_that_of_the_layer() -> None:
    attn, u, x = rows(64, HEADS, V), rows(64, HEADS, V), torch.zeros(64, D)
    module = gated_norm_linear(dropout=0.999)
    torch.nn.init.zeros_(module.proj.bias)
    out = module(attn, u, x)
    assert (out == 0).all(dim=1).float().mean() > 0.8
    module.eval()
    assert (module(attn, u, x) != 0).all(dim=1).float().mean() > 0.8


def test_evaluation_runs_the_plain_layer_bit_for_bit() -> None:
    x = rows(17, D)
    attn, u = rows(17, HEADS, V), rows(17, HEADS, V)
    fp8, plain = norm_linear().eval(), norm_linear(has_engine=False).eval()
    assert torch.equal(fp8(x)[0], plain(x)[0])
    gate, plain_gate = gated_norm_linear().eval(), gated_norm_linear(has_engine=False).eval()
    assert torch.equal(gate(attn, u, x), plain_gate(attn, u, x))
    for module in (fp8, gate):
        state = module.engine.state
        assert not state.amax.any()


def test_names_of_parameters_are_those_of_a_layer_without_fp8() -> None:
    for make in (norm_linear, gated_norm_linear):
        with_engine, without = make(), make(has_engine=False)
        assert list(with_engine.state_dict()) == list(without.state_dict())
        names = [[name for name, _ in m.named_parameters()] for m in (with_engine, without)]
        assert names[0] == names[1]
        engines = [m for m in with_engine.modules() if isinstance(m, LinearEngine)]
        assert engines == [with_engine.engine]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_whose_elementwise_part_is_triton(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SiLU adds the bias there, so the engine gets none; the result is that of the plain layer."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    changes = {"recompute_input_layernorm": recompute, "recompute_input_silu": recompute}
    found = []
    for backend in ("pytorch", "triton"):
        config = dataclasses.replace(CONFIG, elementwise_backend=backend, **changes)
        torch.manual_seed(0)
        layer = HSTULayer(config)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        for owner, linear in ((layer.input, layer.input.uvqk), (layer.output, layer.output.proj)):
            owner.engine = engine_of("linear", linear.in_features, linear.out_features)
        layer.to(DEVICE)
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(32, config.hidden_size, generator=draw).to(DEVICE).requires_grad_()
        out = layer(make_sequence(x)).values_TD
        out.square().sum().backward()
        found.append({"out": out, "dx": x.grad} | {n: p.grad for n, p in layer.named_parameters()})
        assert layer.input.engine.state.amax.all() and layer.output.engine.state.amax.all()
    for name, wanted in found[0].items():
        # a value near the middle of two FP8 neighbours may go either way
        difference = (found[1][name] - wanted).norm() / wanted.norm()
        assert difference < 1e-2, name
