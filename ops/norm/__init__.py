"""Layer normalisation with statistics in float32 (float64 for float64 rows)."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x_TD: Tensor, weight_D: Tensor, *, bias_D: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in x's dtype.

    Rows and parameters of different dtypes meet in the parameters' dtype (float32 parameters
    under bfloat16 rows), so half-precision rows keep float32 statistics.
    """
    normed = F.layer_norm(x_TD.to(weight_D.dtype), x_TD.shape[-1:], weight_D, bias_D, eps)
    return normed.to(x_TD.dtype)
