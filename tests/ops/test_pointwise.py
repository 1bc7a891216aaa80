"""silu_split, layer_norm and gated_norm against the formulas."""

import pytest
import torch

from ops.gated_norm import gated_norm
from ops.norm import layer_norm
from ops.silu_split import silu_split


def test_silu_split_is_head_major() -> None:
    num_heads, attention_dim, linear_dim = 2, 3, 4
    uvqk = torch.randn(5, 28, dtype=torch.float64, requires_grad=True)
    u, v, q, k = silu_split(uvqk, num_heads, attention_dim=attention_dim, linear_dim=linear_dim)
    activated = uvqk * torch.sigmoid(uvqk)
    for head in range(num_heads):
        block = activated[:, head * 14 : (head + 1) * 14]
        expected = block.split([4, 4, 3, 3], dim=1)
        for part, want in zip((u, v, q, k), expected, strict=True):
            torch.testing.assert_close(part[:, head], want)
    (grad,) = torch.autograd.grad(u.sum() + 2 * v.sum() + 3 * q.sum() + 4 * k.sum(), uvqk)
    weights = torch.tensor([1.0] * 4 + [2.0] * 4 + [3.0] * 3 + [4.0] * 3, dtype=torch.float64)
    (expected_grad,) = torch.autograd.grad((activated * weights.repeat(2)).sum(), uvqk)
    torch.testing.assert_close(grad, expected_grad)


def test_silu_split_refuses_another_width() -> None:
    with pytest.raises(ValueError, match="= 28.*got .5, 27."):
        silu_split(torch.zeros(5, 27), 2, attention_dim=3, linear_dim=4)


def test_layer_norm_keeps_float32_statistics_under_bfloat16_rows() -> None:
    x = (torch.randn(4, 64) * 3 + 100).bfloat16()
    weight, bias = torch.randn(64), torch.randn(64)
    wide = x.double()
    mean, variance = wide.mean(1, keepdim=True), wide.var(1, unbiased=False, keepdim=True)
    expected = (wide - mean) / torch.sqrt(variance + 1e-5) * weight + bias
    out = layer_norm(x, weight, bias_D=bias, eps=1e-5)
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_gated_norm() -> None:
    attn = torch.randn(5, 2, 3, dtype=torch.float64)
    u = torch.randn(5, 2, 8, dtype=torch.float64)[..., :3]
    weight, bias = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    flat = attn.reshape(5, 6)
    mean, variance = flat.mean(1, keepdim=True), flat.var(1, unbiased=False, keepdim=True)
    normed = (flat - mean) / torch.sqrt(variance + 1e-5) * weight + bias
    expected = normed * u.reshape(5, 6)
    out = gated_norm(attn, u, weight=weight, bias=bias, eps=1e-5, dropout=0.5)
    torch.testing.assert_close(out, expected)
    dropped = gated_norm(attn, u, weight=weight, bias=bias, eps=1e-5, dropout=0.5, training=True)
    kept = dropped != 0
    assert 0 < int(kept.sum()) < kept.numel()
    torch.testing.assert_close(dropped[kept], 2 * expected[kept])


def test_no_rows() -> None:
    attn = torch.zeros(0, 2, 3, requires_grad=True)
    weight = torch.ones(6, requires_grad=True)
    gated_norm(attn, attn, weight=weight, bias=torch.zeros(6), eps=1e-5).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6))
