"""The gate behind HSTU attention: normalise, multiply by u, drop out (arXiv 2402.17152, eq. 3)."""

from torch import Tensor

from ops.dropout import dropout as dropout_rows
from ops.norm import is_triton, layer_norm


def gated_norm(
    attn_THV: Tensor,
    u_THV: Tensor,
    *,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    u_bias_HV: Tensor | None = None,
    dropout: float = 0.0,
    training: bool = False,
    backend: str = "pytorch",
) -> Tensor:
    """Return dropout(layer_norm(attn) * u) as (T, H * V), normalised over all heads of a token.

    Args:
        attn_THV: attention output; u_THV has its shape and may be strided.
        weight: (H * V,), as is bias.
        u_bias_HV: makes u a pre-activation: silu(u + u_bias) is the gate. Any strides; its own
            gradient is left to whoever made u (`silu_split` with activates_u = False).
        dropout: probability of zeroing an entry while training.
        backend: "pytorch", or "triton": one pass each way, its own dropout mask (as reproducible
            under torch.manual_seed, but another one).

    Raises:
        ValueError: an unknown backend.
        NotImplementedError: rows, or a u_bias_HV, that the backend does not have.
    """
    if is_triton(backend):
        from ops.gated_norm import triton_impl  # not at the top: triton may be absent

        return triton_impl.gated_norm(
            attn_THV,
            u_THV,
            weight=weight,
            bias=bias,
            eps=eps,
            u_bias_HV=u_bias_HV,
            dropout=dropout if training else 0.0,
        )
    if u_bias_HV is not None:
        raise NotImplementedError('gated_norm(u_bias_HV) needs backend = "triton"')
    normed = layer_norm(attn_THV.flatten(1), weight, bias_D=bias, eps=eps)
    gated = normed * u_THV.flatten(1)
    return dropout_rows(gated, dropout) if training else gated
