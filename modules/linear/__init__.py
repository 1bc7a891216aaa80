"""The linear layers of an HSTU layer, fused with what stands around them.

Parameters are float32 and the arithmetic runs in the dtype of the rows. Padding that a kernel needs
would live inside these modules: T rows in, T rows out, T = 0 included.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ops.gated_norm import gated_norm
from ops.norm import layer_norm


class NormLinear(nn.Module):
    """x_TD -> layer norm -> linear -> uvqk_TX. Parameters: norm.*, uvqk.*."""

    def __init__(self, hidden_size: int, out_features: int, *, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, eps=eps)
        self.uvqk = nn.Linear(hidden_size, out_features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from torch's default generator: normal(0, 0.02), biases zero."""
        self.norm.reset_parameters()
        nn.init.normal_(self.uvqk.weight, std=0.02)
        nn.init.zeros_(self.uvqk.bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return uvqk_TX in the dtype of x."""
        norm = self.norm
        normed = layer_norm(x_TD, norm.weight, bias_D=norm.bias, eps=norm.eps)
        return _linear(normed, self.uvqk)


class GatedNormLinear(nn.Module):
    """attn, u, x -> x + linear(dropout(layer_norm(attn) * u)). Parameters: norm.*, proj.*."""

    def __init__(self, in_features: int, hidden_size: int, *, eps: float, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_features, eps=eps)
        self.proj = nn.Linear(in_features, hidden_size)
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from torch's default generator: Xavier uniform, biases zero."""
        self.norm.reset_parameters()
        nn.init.xavier_uniform_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, attn_THV: Tensor, u_THV: Tensor, x_TD: Tensor) -> Tensor:
        """Return the layer's output (T, D) in the dtype of x."""
        gated = gated_norm(
            attn_THV,
            u_THV,
            weight=self.norm.weight,
            bias=self.norm.bias,
            eps=self.norm.eps,
            dropout=self.dropout,
            training=self.training,
        )
        return x_TD + _linear(gated, self.proj)


def _linear(x: Tensor, linear: nn.Linear) -> Tensor:
    return F.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))


__all__ = ["GatedNormLinear", "NormLinear"]
