from __future__ import annotations

import pytest
import torch

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
