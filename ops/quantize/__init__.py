"""FP8 quantisation: values times a scale, saturated, rounded to nearest even.

    codes = cast(clamp(x * scale, -fp8_max, fp8_max))          x ~ codes * scale_inv

A scale is fp8_max over the largest magnitude of the values that share it:

    tensor      all of them                      scale_inv (1,)
    rows        a row                            (T, 1)
    1x128       128 neighbours of a row          (T, ceil(K / 128))
    128x128     a square                         (ceil(T / 128), ceil(K / 128))
    1x32        32 neighbours of a row, a power of two (MXFP8's E8M0)      (T, ceil(K / 32))

Scales are finite and positive: values that are all zero get 1, and no floor flushes small ones
(a scale ends at 2**126, where its reciprocal is still a normal number). Zeros stay exact, infinity
saturates, NaN stays NaN. Arithmetic is float32; what is rounded is the value in the dtype given.
Formats and recipes: FP8 formats for deep learning, arXiv 2209.05433; DeepSeek-V3, arXiv 2412.19437
(1x128 and 128x128); OCP microscaling formats 1.0 (1x32).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite value of a format."""

GRANULARITIES = ("tensor", "rows", "1x128", "128x128", "1x32")

_LARGEST_SCALE = 2.0**126


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A matrix in FP8 and what takes its scales off."""

    values: Tensor
    """(T, K), float8_e4m3fn or float8_e5m2."""
    scale_inv: Tensor
    """float32, shape by granularity (module docstring)."""
    granularity: str


def dequantize(quantized: Quantized) -> Tensor:
    """Return the values (T, K) in float32, scales taken off."""
    values = quantized.values.float()
    if quantized.granularity == "tensor":
        return values * quantized.scale_inv
    num_rows, width = values.shape
    rows, columns = block_of(quantized.granularity, num_rows, width)
    spread = quantized.scale_inv.repeat_interleave(rows, 0)[:num_rows]
    return values * spread.repeat_interleave(columns, 1)[:, :width]


def scale_from_amax(
    amax: Tensor, fp8_max: float | Tensor | torch.dtype, *, margin: int = 0
) -> Tensor:
    """Return the scale of values up to amax: fp8_max / (amax * 2**margin), float32, NaN for NaN.

    Args:
        amax: any shape, never negative.
        fp8_max: of the format, or the format.
        margin: leaves 2**margin of headroom.
    """
    largest = FP8_MAX[fp8_max] if isinstance(fp8_max, torch.dtype) else fp8_max
    amax = amax.float()
    scale = (largest / (amax * 2.0**margin)).clamp(1.0 / _LARGEST_SCALE, _LARGEST_SCALE)
    return torch.where(amax == 0, 1.0, scale)


def block_of(granularity: str, num_rows: int, width: int) -> tuple[int, int]:
    """Return rows and columns that share a scale.

    Raises:
        ValueError: an unknown granularity.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {GRANULARITIES}, got {granularity!r}")
    if granularity == "tensor":
        return max(num_rows, 1), max(width, 1)
    if granularity == "rows":
        return 1, max(width, 1)
    rows, columns = granularity.split("x")
    return int(rows), int(columns)


def quantize(
    x_TK: Tensor,
    fp8_dtype: torch.dtype,
    *,
    granularity: str = "tensor",
    scale: Tensor | None = None,
    margin: int = 0,
) -> Quantized:
    """Return the rows in FP8, in plain PyTorch; see the module docstring.

    Args:
        x_TK: (T, K) in any floating dtype; T = 0 gives scales of 1.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        granularity: which values share a scale.
        scale: (1,) or scalar, with granularity "tensor": used instead of that of the present
            maximum (delayed scaling).
        margin: leaves 2**margin of headroom in scales that are made here.

    Raises:
        ValueError: an unknown granularity, or a scale with another one than "tensor".
    """
    from ops.quantize import reference

    if scale is not None and granularity != "tensor":
        raise ValueError(f'a scale is given for granularity "tensor" alone, got {granularity!r}')
    return reference.quantize(x_TK, fp8_dtype, granularity=granularity, scale=scale, margin=margin)


__all__ = [
    "FP8_MAX",
    "GRANULARITIES",
    "Quantized",
    "block_of",
    "dequantize",
    "quantize",
    "scale_from_amax",
]
