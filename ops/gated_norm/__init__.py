"""The gate behind HSTU attention: normalise, multiply by u, drop out (arXiv 2402.17152, eq. 3)."""

from torch import Tensor

from ops.dropout import dropout as dropout_rows
from ops.norm import layer_norm


def gated_norm(
    attn_THV: Tensor,
    u_THV: Tensor,
    *,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Return dropout(layer_norm(attn) * u) as (T, H * V), normalised over all heads of a token.

    Args:
        attn_THV: attention output; u_THV has its shape and may be strided.
        weight: (H * V,), as is bias.
        dropout: probability of zeroing an entry while training.
    """
    normed = layer_norm(attn_THV.flatten(1), weight, bias_D=bias, eps=eps)
    gated = normed * u_THV.flatten(1)
    return dropout_rows(gated, dropout) if training else gated
