from __future__ import annotations

import pytest
import torch

from ops.dropout import dropout


@pytest.mark.parametrize("probability", [0.1, 0.4, 0.9])
def test_share_scale_and_gradient(probability: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(501, 401, requires_grad=True)
    y = dropout(x, probability)
    kept = y != 0
    share = float(kept.float().mean())
    assert share == pytest.approx(1 - probability, abs=4 * (0.25 / x.numel()) ** 0.5)
    assert torch.allclose(y[kept], torch.tensor(1 / (1 - probability)))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_neighbours_are_independent() -> None:
    """Two entries share a word of the generator; they must not share their fate."""
    torch.manual_seed(0)
    kept = (dropout(torch.ones(100_000, 2), 0.5) != 0).float()
    both = float((kept[:, 0] * kept[:, 1]).mean())
    assert both == pytest.approx(0.25, abs=0.01)


def test_same_seed_same_mask_next_call_another() -> None:
    x = torch.ones(1000)
    torch.manual_seed(1)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_none_and_nothing() -> None:
    x = torch.randn(3)
    assert dropout(x, 0.0) is x
    assert dropout(torch.zeros(0, 4), 0.5).shape == (0, 4)
    assert dropout(torch.ones(3, dtype=torch.bfloat16), 0.5).dtype == torch.bfloat16
