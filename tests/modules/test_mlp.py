from __future__ import annotations

import pytest
import torch

from modules.linear.emulated import EmulatedEngine
from modules.linear.recipe import LinearRecipe
from modules.mlp import MLP


def test_logits_are_float32_whatever_comes_in() -> None:
    head = MLP(8, [16, 5], activation="gelu", dropout=0.1).eval()
    logits = head(torch.randn(3, 8).bfloat16())
    assert (logits.shape, logits.dtype) == ((3, 5), torch.float32)


def test_no_activation_after_the_last_layer() -> None:
    head = MLP(4, [3])
    assert (head(torch.randn(64, 4)) < 0).any()


def test_bias_can_be_left_out() -> None:
    assert MLP(4, [3], bias=False)(torch.zeros(1, 4)).abs().sum() == 0


@pytest.mark.parametrize(
    ("widths", "activation", "text"), [([], "relu", "widths"), ([3], "tanh", "activation")]
)
def test_bad_arguments_are_refused(widths: list[int], activation: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MLP(4, widths, activation=activation)


def with_engine(index: int, **fields: bool) -> MLP:
    """A head of 32 -> 16 -> 48 -> 5 whose linear at `index` is rounded to FP8."""
    torch.manual_seed(0)
    head = MLP(32, [16, 48, 5])
    recipe = LinearRecipe(
        backend="emulated", scaling="tensorwise", grad_dtype=torch.float8_e5m2, **fields
    )
    linear = head.layers[index]
    assert isinstance(linear, torch.nn.Linear)
    engine = EmulatedEngine(
        name=f"head.layers.{index}",
        in_features=linear.in_features,
        out_features=linear.out_features,
        recipe=recipe,
        state=None,
    )
    head.attach(index, engine)
    assert head.engine_of(linear) is engine
    assert [head.engine_of(head.layers[i]) for i in (0, 3, 6) if i != index] == [None, None]
    return head


@pytest.mark.parametrize("index", [0, 3])
def test_one_linear_in_fp8(index: int) -> None:
    head, x = with_engine(index), torch.randn(7, 32, requires_grad=True)
    logits = head(x)
    engine = head.engine_of(head.layers[index])
    wanted = x
    for place, layer in enumerate(head.layers):
        is_fp8 = place == index
        wanted = engine.linear(wanted, layer.weight, layer.bias) if is_fp8 else layer(wanted)
    assert torch.equal(logits, wanted) and logits.dtype == torch.float32
    assert not torch.equal(logits, head.layers(x))
    logits.sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in head.parameters())
    # parameters are those of a head without FP8, and it evaluates as one unless asked to
    assert list(head.state_dict()) == list(MLP(32, [16, 48, 5]).state_dict())
    head.eval()
    assert torch.equal(head(x), head.layers(x))
    assert not torch.equal(with_engine(index, fp8_eval=True).eval()(x), head(x))
