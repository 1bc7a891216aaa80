"""What the fused quantising kernels take and give, without the kernels: triton may be absent."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRule:
    """How the values of one operand become FP8.

    scale: (1,) float32 that values are multiplied by; None: made of their present maximum.
    amax: (1,) float32 into which the maximum is folded; None: it is not recorded.
    """

    fp8_dtype: torch.dtype
    scale: Tensor | None = None
    amax: Tensor | None = None
    margin: int = 0


@dataclass(frozen=True, slots=True)
class Fp8Operand:
    """A matrix (T, K) in FP8 under one scale.

    values: (T, K), None where not asked for. transposed: (K, P), P = T rounded up, zeros past T;
    None where not asked for. scale_inv: (1,) float32 that codes are multiplied by.
    """

    values: Tensor | None
    transposed: Tensor | None
    scale_inv: Tensor
