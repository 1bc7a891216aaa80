"""When the native engine casts its weight: before each use, or once while the weight is held."""

import pytest
import torch
from torch import nn

import tests.ops.quantize_kernels  # noqa: F401  the kernels, for this machine
from modules.linear.native import NativeEngine
from modules.linear.recipe import LinearRecipe
from tests.ops.triton_cases import DEVICE, INTERPRETED


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def engine() -> NativeEngine:
    recipe = LinearRecipe(backend="native", scaling="tensorwise", grad_dtype=torch.float8_e5m2)
    return NativeEngine(name="proj", in_features=32, out_features=48, recipe=recipe, state=None)


@pytest.fixture
def weight() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(48, 32, device=DEVICE))


def test_an_update_past_the_version_count_is_seen(
    engine: NativeEngine, weight: nn.Parameter
) -> None:
    """Fused optimizers update weights without telling autograd: a stale copy would never learn."""
    x = torch.randn(16, 32, device=DEVICE)
    before = engine.linear(x, weight, None)
    version = weight._version
    weight.data.mul_(-1.0)
    assert weight._version == version
    torch.testing.assert_close(engine.linear(x, weight, None), -before)


def test_a_held_weight_is_cast_once_and_again_in_the_next_step(
    engine: NativeEngine, weight: nn.Parameter, monkeypatch: pytest.MonkeyPatch
) -> None:
    casts = []
    cast_weight = engine.scheme.cast_weight
    monkeypatch.setattr(
        engine.scheme, "cast_weight", lambda *a, **k: casts.append(1) or cast_weight(*a, **k)
    )
    x = torch.randn(16, 32, device=DEVICE)
    for step in (1, 2):
        engine.hold_weights(True)
        for _ in range(3):
            engine.linear(x, weight, None)
        engine.hold_weights(False)
        assert len(casts) == step
