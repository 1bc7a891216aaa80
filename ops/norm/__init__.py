"""Layer normalisation with statistics in float32 (float64 for float64 rows)."""

import torch
import torch.nn.functional as F
from torch import Tensor

_TRITON_MAX_WIDTH = 8192
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_norm(
    x_TD: Tensor, weight_D: Tensor, *, bias_D: Tensor, eps: float, backend: str = "pytorch"
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in x's dtype.

    Rows and parameters of different dtypes meet in the parameters' dtype (float32 parameters
    under bfloat16 rows), so half-precision rows keep float32 statistics.

    Args:
        x_TD: any leading shape.
        weight_D: (D,), as is bias_D.
        bias_D: (D,).
        eps: added to the variance.
        backend: "pytorch", or "triton" (see `refuse_unsupported`).

    Raises:
        ValueError: an unknown backend.
        NotImplementedError: rows that the backend does not have.
    """
    if is_triton(backend):
        from ops.norm import triton_impl  # not at the top: triton may be absent

        return triton_impl.layer_norm(x_TD, weight_D, bias_D=bias_D, eps=eps)
    normed = F.layer_norm(x_TD.to(weight_D.dtype), x_TD.shape[-1:], weight_D, bias_D, eps)
    return normed.to(x_TD.dtype)


def is_triton(backend: str) -> bool:
    """Return whether an elementwise op runs in Triton.

    Raises:
        ValueError: neither "pytorch" nor "triton".
    """
    if backend not in ("pytorch", "triton"):
        raise ValueError(f'backend must be "pytorch" or "triton", got {backend!r}')
    return backend == "triton"


def refuse_unsupported(width: int, *, dtype: torch.dtype) -> str | None:
    """Return why the Triton row kernels (norm, gated norm) cannot run, None when they can."""
    if not 1 <= width <= _TRITON_MAX_WIDTH:
        return f"rows must be 1 to {_TRITON_MAX_WIDTH} wide for our Triton kernels, got {width}"
    if dtype not in _TRITON_DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _TRITON_DTYPES)
        return f"the dtype must be one of {names} for our Triton kernels, got {dtype}"
    return None
