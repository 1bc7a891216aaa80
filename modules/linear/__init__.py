"""The linear layers of an HSTU layer, fused with what stands around them.

Parameters are float32 and the arithmetic runs in the dtype of the rows, or in FP8 where an engine
is attached (`modules.linear.plan`). Padding that a kernel needs lives inside: T rows in, T rows
out, T = 0 included.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modules.linear.engine import LinearEngine
from modules.linear.fused import GatedNormLinearFunction, NormLinearFunction
from ops.gated_norm import gated_norm
from ops.norm import is_triton, layer_norm


class NormLinear(nn.Module):
    """x_TD -> layer norm -> linear -> uvqk_TX. Parameters: norm.*, uvqk.*.

    Args:
        hidden_size: D.
        out_features: X.
        eps: of the norm.
        backend: "pytorch" or "triton", of what is not a matrix product.
        recompute_norm: while training, compute the normalised rows again in the backward pass
            instead of keeping them; the matrix product is not run again, but by an FP8 engine that
            has no fused norm (native rowwise and blockwise, emulated).
    """

    def __init__(
        self,
        hidden_size: int,
        out_features: int,
        *,
        eps: float,
        backend: str = "pytorch",
        recompute_norm: bool = False,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, eps=eps)
        self.uvqk = nn.Linear(hidden_size, out_features)
        self.backend = backend
        self.uses_triton = is_triton(backend)
        self.recompute_norm = recompute_norm
        self.engine: LinearEngine | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from torch's default generator: normal(0, 0.02), biases zero."""
        self.norm.reset_parameters()
        nn.init.normal_(self.uvqk.weight, std=0.02)
        nn.init.zeros_(self.uvqk.bias)

    @property
    def left_bias(self) -> nn.Parameter | None:
        """Return the bias that `forward` leaves to whoever reads uvqk next; None: it is added.

        In Triton SiLU adds it: then its gradient is a by-product of SiLU's.
        """
        return self.uvqk.bias if self.uses_triton else None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return uvqk_TX in the dtype of x, less `left_bias`, and x for the residual.

        Whoever adds the residual takes it from here: its gradient then joins that of the norm in
        one pass.
        """
        norm = self.norm
        if self.engine is not None and self.engine.is_active:
            return self.engine.norm_linear(
                x_TD,
                norm,
                weight=self.uvqk.weight,
                bias=None if self.uses_triton else self.uvqk.bias,
                backend=self.backend,
                recompute_norm=self.recompute_norm,
            )
        if self.uses_triton:
            return NormLinearFunction.apply(
                x_TD,
                norm.weight,
                norm.bias,
                self.uvqk.weight,
                norm.eps,
                self.recompute_norm and self.training,
            )
        if self.recompute_norm and self.training:
            # the linear's input is the last tensor kept, so its GEMM is not run again
            return checkpoint(self._plain, x_TD, use_reentrant=False), x_TD
        return self._plain(x_TD), x_TD

    def _plain(self, x_TD: Tensor) -> Tensor:
        norm = self.norm
        normed = layer_norm(x_TD, norm.weight, bias_D=norm.bias, eps=norm.eps)
        return _linear(normed, self.uvqk)


class GatedNormLinear(nn.Module):
    """attn, u, x -> x + linear(dropout(layer_norm(attn) * u)). Parameters: norm.*, proj.*.

    Args:
        in_features: H * V.
        hidden_size: D.
        eps: of the norm.
        dropout: probability of zeroing a gated entry while training.
        backend: "pytorch" or "triton", of what is not a matrix product.
    """

    def __init__(
        self,
        in_features: int,
        hidden_size: int,
        *,
        eps: float,
        dropout: float,
        backend: str = "pytorch",
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_features, eps=eps)
        self.proj = nn.Linear(in_features, hidden_size)
        self.dropout = dropout
        self.backend = backend
        self.uses_triton = is_triton(backend)
        self.engine: LinearEngine | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from torch's default generator: Xavier uniform, biases zero."""
        self.norm.reset_parameters()
        nn.init.xavier_uniform_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(
        self, attn_THV: Tensor, u_THV: Tensor, x_TD: Tensor, *, u_bias_HV: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output (T, D) in the dtype of x.

        u_bias_HV: u is a pre-activation (`ops.gated_norm`).
        """
        norm, proj = self.norm, self.proj
        dropout = self.dropout if self.training else 0.0
        if self.engine is not None and self.engine.is_active:
            return self.engine.gated_norm_linear(
                attn_THV,
                u_THV,
                x_TD,
                norm=norm,
                weight=proj.weight,
                bias=proj.bias,
                u_bias_HV=u_bias_HV,
                dropout=dropout,
                backend=self.backend,
            )
        if self.uses_triton:
            return GatedNormLinearFunction.apply(
                attn_THV,
                u_THV,
                u_bias_HV,
                norm.weight,
                norm.bias,
                proj.weight,
                proj.bias,
                x_TD,
                norm.eps,
                dropout,
            )
        gated = gated_norm(
            attn_THV,
            u_THV,
            weight=norm.weight,
            bias=norm.bias,
            eps=norm.eps,
            u_bias_HV=u_bias_HV,
            dropout=dropout,
            training=self.training,
        )
        return x_TD + _linear(gated, proj)


def _linear(x: Tensor, linear: nn.Linear) -> Tensor:
    return F.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))


__all__ = ["GatedNormLinear", "NormLinear"]
