"""SiLU of the fused projection and its split into u, v, q and k."""

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from ops.norm import is_triton
from ops.silu_split.recompute import RecomputedActivation

if TYPE_CHECKING:
    from ops.silu_split.triton_fp8 import GradientTarget

__all__ = ["RecomputedActivation", "silu_split"]


def silu_split(
    uvqk_TX: Tensor,
    num_heads: int,
    *,
    attention_dim: int,
    linear_dim: int,
    bias_X: Tensor | None = None,
    activates_u: bool = True,
    gradient_target: "GradientTarget | None" = None,
    backend: str = "pytorch",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return u_THV, v_THV, q_THA, k_THA after SiLU: views of one tensor, strided.

    X is head-major, H blocks of [u | v | q | k] with widths V, V, A, A, so a contiguous cut of X
    is a cut by heads.

    Args:
        uvqk_TX: the projection.
        num_heads: H.
        attention_dim: A.
        linear_dim: V.
        bias_X: added to the projection first; None for a projection that has its bias.
        activates_u: False hands u out as it lies in uvqk, for a gate that adds bias and SiLU
            itself: u is not written, read and kept once more. The gradient that comes back for
            u must then be that of uvqk + bias; the bias's share of it is added here, not there.
        gradient_target: takes the projection's gradient in FP8; autograd gets a placeholder. For
            rows in Triton only.
        backend: "pytorch", or "triton", where the bias gradient costs no pass of its own.

    Raises:
        ValueError: X is not H * (2 V + 2 A); an unknown backend.
        NotImplementedError: a dtype, activates_u = False or a gradient_target that the backend
            does not have.
    """
    width = 2 * (linear_dim + attention_dim)
    if uvqk_TX.dim() != 2 or uvqk_TX.shape[1] != num_heads * width:
        raise ValueError(
            f"uvqk must be (T, num_heads * 2 * (linear_dim + attention_dim) = "
            f"{num_heads * width}), got {tuple(uvqk_TX.shape)}"
        )
    if is_triton(backend):
        from ops.silu_split import triton_impl  # not at the top: triton may be absent

        return triton_impl.silu_split(
            uvqk_TX,
            num_heads,
            attention_dim=attention_dim,
            linear_dim=linear_dim,
            bias_X=bias_X,
            activates_u=activates_u,
            gradient_target=gradient_target,
        )
    if not activates_u:
        raise NotImplementedError('silu_split(activates_u = False) needs backend = "triton"')
    if gradient_target is not None:
        raise NotImplementedError('silu_split(gradient_target) needs backend = "triton"')
    if bias_X is not None:
        uvqk_TX = uvqk_TX + bias_X.to(uvqk_TX.dtype)
    # one split, not four slices: its backward writes the gradient of all four once
    heads_THW = F.silu(uvqk_TX).view(-1, num_heads, width)
    u, v, q, k = heads_THW.split([linear_dim, linear_dim, attention_dim, attention_dim], dim=-1)
    return u, v, q, k
