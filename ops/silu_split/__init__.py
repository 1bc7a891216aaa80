"""SiLU of the fused projection and its split into u, v, q and k."""

import torch.nn.functional as F
from torch import Tensor


def silu_split(
    uvqk_TX: Tensor, num_heads: int, *, attention_dim: int, linear_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return u_THV, v_THV, q_THA, k_THA after SiLU: views of one tensor, strided.

    X is head-major, H blocks of [u | v | q | k] with widths V, V, A, A, so a contiguous cut of X
    is a cut by heads.

    Raises:
        ValueError: X is not H * (2 V + 2 A).
    """
    width = 2 * (linear_dim + attention_dim)
    if uvqk_TX.dim() != 2 or uvqk_TX.shape[1] != num_heads * width:
        raise ValueError(
            f"uvqk must be (T, num_heads * 2 * (linear_dim + attention_dim) = "
            f"{num_heads * width}), got {tuple(uvqk_TX.shape)}"
        )
    # one split, not four slices: its backward writes the gradient of all four once
    heads_THW = F.silu(uvqk_TX).view(-1, num_heads, width)
    u, v, q, k = heads_THW.split([linear_dim, linear_dim, attention_dim, attention_dim], dim=-1)
    return u, v, q, k
