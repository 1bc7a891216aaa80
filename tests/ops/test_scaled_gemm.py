"""Scaled products against their definition, for every pair of granularities they have."""

import pytest
import torch

from ops.quantize import quantize
from ops.scaled_gemm import reference, scaled_gemm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRS = [("tensor", "tensor"), ("rows", "rows"), ("1x128", "1x128"), ("1x128", "128x128")]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("left", "right"), PAIRS)
@pytest.mark.parametrize(("num_rows", "width"), [(4, 16), (132, 272)])
def test_agrees_with_the_definition(
    num_rows: int, width: int, left: str, right: str, out_dtype: torch.dtype
) -> None:
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("rows and blocks need compute capability 9.0")
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, width, generator=draw) * torch.logspace(-2, 2, width)
    # a GPU has block products of E4M3 alone
    dtype = E4M3 if "128" in left else E5M2
    a = quantize(rows.to(DEVICE), dtype, granularity=left)
    b = quantize(torch.randn(160, width, generator=draw).to(DEVICE), E4M3, granularity=right)
    bias = torch.randn(160, generator=draw).to(DEVICE, out_dtype)
    actual = scaled_gemm(a, b, out_dtype=out_dtype, bias_N=bias)
    expected = reference(a, b, out_dtype=torch.float32, bias_N=bias)
    assert actual.dtype == out_dtype and actual.shape == (num_rows, 160)
    error = (actual.float() - expected).norm() / expected.norm()
    # products by rows come in BF16 alone
    assert error < (1e-3 if out_dtype == torch.float32 and left != "rows" else 4e-3)


def test_a_pair_without_product() -> None:
    a = quantize(torch.ones(16, 32), E4M3, granularity="rows")
    b = quantize(torch.ones(16, 32), E4M3)
    with pytest.raises(NotImplementedError, match="rows x tensor"):
        scaled_gemm(a, b, out_dtype=torch.float32)
