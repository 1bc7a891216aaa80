"""Quantisation in plain PyTorch: the oracle of the kernels and the arithmetic of `emulated`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.quantize import FP8_MAX, Quantized, block_of, scale_from_amax


def quantize(
    x_TK: Tensor, fp8_dtype: torch.dtype, *, granularity: str, scale: Tensor | None, margin: int
) -> Quantized:
    """Return the rows in FP8; see `ops.quantize.quantize`."""
    x = x_TK.float()
    num_rows, width = x.shape
    if scale is None:
        rows, columns = block_of(granularity, num_rows, width)
        amax = _block_maxima(x, rows, columns)
        scale = scale_from_amax(amax, fp8_dtype, margin=margin)
        if granularity == "1x32":
            scale = _power_of_two_below(scale)
        spread = scale.repeat_interleave(rows, 0)[:num_rows]
        spread = spread.repeat_interleave(columns, 1)[:, :width]
    else:
        scale = spread = scale.reshape(1).float()
    largest = FP8_MAX[fp8_dtype]
    values = (x * spread).clamp(-largest, largest).to(fp8_dtype)
    scale_inv = 1.0 / scale
    if granularity == "tensor":
        scale_inv = scale_inv.reshape(-1)[:1] if scale_inv.numel() else scale_inv.new_ones(1)
    return Quantized(values=values, scale_inv=scale_inv, granularity=granularity)


def _block_maxima(x: Tensor, rows: int, columns: int) -> Tensor:
    """Largest magnitude of each rows x columns block, NaN where there is one."""
    num_rows, width = x.shape
    padded = F.pad(x.abs(), (0, -width % columns, 0, -num_rows % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    if not blocks.numel():
        return x.new_zeros(blocks.shape[0], blocks.shape[2])
    return blocks.amax((1, 3))


def _power_of_two_below(scale: Tensor) -> Tensor:
    """The largest power of two up to each scale, exactly; NaN stays."""
    mantissa, exponent = torch.frexp(scale)
    power = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return torch.where(mantissa.isnan(), mantissa, power)
