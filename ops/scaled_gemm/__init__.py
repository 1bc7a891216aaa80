"""Products of FP8 matrices along their last dimensions, with the scales taken off: a @ b^T.

On a GPU cuBLASLt's scaled products through torch; FP8 tensor cores before Blackwell want both
operands contiguous along the contraction, which is how they are passed here. On a CPU the same for
one scale a tensor or row, for tests; `reference` has every granularity.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.quantize import Quantized, dequantize

_BLOCKS = {"1x128": "BlockWise1x128", "128x128": "BlockWise128x128"}


def scaled_gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    bias_N: Tensor | None = None,
) -> Tensor:
    """Return a @ b^T + bias, (M, N) in `out_dtype`, from scales as `ops.quantize` lays them out.

    Args:
        a: (M, K), granularity "tensor", "rows" or "1x128"; K a multiple of 16.
        b: (N, K), of the same granularity, or "128x128" beside "1x128"; N a multiple of 16.
        out_dtype: see `multiply`, as for the others.
        fast_accum: let tensor cores keep sums in fewer bits than FP32.
        bias_N: in `out_dtype`.

    Raises:
        NotImplementedError: granularities that no product here has.
    """
    pair = (a.granularity, b.granularity)
    if pair not in (
        ("tensor", "tensor"),
        ("rows", "rows"),
        ("1x128", "1x128"),
        ("1x128", "128x128"),
    ):
        raise NotImplementedError(
            f"scaled_gemm multiplies tensor x tensor, rows x rows, 1x128 x 1x128 and "
            f"1x128 x 128x128, got {pair[0]} x {pair[1]}; quantise with one of these"
        )
    return multiply(
        a.values,
        b.values,
        scale_a=_laid_out(a),
        scale_b=_laid_out(b),
        out_dtype=out_dtype,
        fast_accum=fast_accum,
        bias_N=bias_N,
        granularity_b=b.granularity,
    )


def reference(
    a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias_N: Tensor | None = None
) -> Tensor:
    """Return what `scaled_gemm` returns, by its definition, in float32; any granularity."""
    product = dequantize(a) @ dequantize(b).t()
    return (product if bias_N is None else product + bias_N.float()).to(out_dtype)


def multiply(
    a_MK: Tensor,
    b_NK: Tensor,
    *,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias_N: Tensor | None = None,
    granularity_b: str = "tensor",
) -> Tensor:
    """Return (a * scale_a) @ (b * scale_b)^T + bias, (M, N) in `out_dtype`.

    Args:
        a_MK: FP8, contiguous; M at least 1, K a multiple of 16. M a multiple of 4 for blocks.
        b_NK: FP8, contiguous; N a multiple of 16. Not both float8_e5m2.
        scale_a: float32: (1,); rows: (M, 1); blocks: (M, ceil(K / 128)), strides (1, M).
        scale_b: (1,); rows: (N, 1); "1x128": (N, ceil(K / 128)), strides (1, N); "128x128":
            (L, ceil(N / 128)), strides (1, L), L = ceil(K / 128) rounded up to 4.
        out_dtype: bfloat16, float16 or float32.
        fast_accum: let tensor cores keep sums in fewer bits than FP32; blocks never do.
        bias_N: in `out_dtype`.
        granularity_b: "tensor", "rows", "1x128" or "128x128"; a has "1x128" beside blocks.
    """
    if granularity_b in _BLOCKS:
        product = _multiply_blocks(a_MK, b_NK, scale_a, scale_b, granularity_b, out_dtype)
        return product if bias_N is None else product.add_(bias_N)
    is_rows = granularity_b == "rows"
    # products by rows come in BF16 alone, and no product adds a float32 bias
    found = torch.bfloat16 if is_rows else out_dtype
    is_fused = bias_N is not None and bias_N.dtype == found != torch.float32
    product = torch._scaled_mm(
        a_MK,
        b_NK.t(),
        scale_a,
        scale_b.t() if is_rows else scale_b,
        bias=bias_N if is_fused else None,
        out_dtype=found,
        use_fast_accum=fast_accum,
    )
    if found != out_dtype:
        product = product.to(out_dtype)
    return product if is_fused or bias_N is None else product.add_(bias_N)


def _multiply_blocks(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    granularity_b: str,
    out_dtype: torch.dtype,
) -> Tensor:
    if not a_MK.is_cuda:  # torch has no such product there
        return _dequantised_product(a_MK, b_NK, scale_a, scale_b, granularity_b).to(out_dtype)
    found = torch.bfloat16 if out_dtype == torch.float16 else out_dtype
    product = F.scaled_mm(
        a_MK,
        b_NK.t(),
        scale_a,
        F.ScalingType.BlockWise1x128,
        scale_b,
        getattr(F.ScalingType, _BLOCKS[granularity_b]),
        output_dtype=found,
    )
    return product if found == out_dtype else product.to(out_dtype)


def _dequantised_product(
    a_MK: Tensor, b_NK: Tensor, scale_a: Tensor, scale_b: Tensor, granularity_b: str
) -> Tensor:
    if granularity_b == "128x128":
        blocks = -(-b_NK.shape[1] // 128)
        scale_b = scale_b[:blocks].t()
    a = Quantized(values=a_MK, scale_inv=scale_a.contiguous(), granularity="1x128")
    b = Quantized(values=b_NK, scale_inv=scale_b.contiguous(), granularity=granularity_b)
    return dequantize(a) @ dequantize(b).t()


def _laid_out(operand: Quantized) -> Tensor:
    """Return scale_inv as `multiply` takes it."""
    scale_inv = operand.scale_inv
    if operand.granularity == "1x128":
        return scale_inv.t().contiguous().t()
    if operand.granularity == "128x128":
        missing = -scale_inv.shape[1] % 4
        return F.pad(scale_inv, (0, missing)).t()
    return scale_inv


__all__ = ["multiply", "reference", "scaled_gemm"]
