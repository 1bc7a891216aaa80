"""Quantisation against loops over blocks, and what no input may break."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.quantize import FP8_MAX, GRANULARITIES, dequantize, quantize, scale_from_amax

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}
# Rounding to nearest: half a step, relative above the smallest normal number, else absolute.
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
SMALLEST_HALF_STEP = {E4M3: 2.0**-10, E5M2: 2.0**-17}
HOSTILE = (0, 1, 7, 15, 16, 17, 31, 129)


def blocks_of(granularity: str, num_rows: int, width: int) -> list[tuple[slice, slice]]:
    rows, columns = {"tensor": (num_rows, width), "rows": (1, width), **BLOCKS}[granularity]
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, num_rows, max(rows, 1))
        for column in range(0, width, columns)
    ]


def by_loops(x: Tensor, dtype: torch.dtype, granularity: str) -> Tensor:
    """What is left of x, block by block."""
    out = torch.zeros(x.shape)
    for where in blocks_of(granularity, *x.shape):
        amax = x[where].float().abs().max()
        scale = float(FP8_MAX[dtype] / amax) if amax else 1.0
        if granularity == "1x32":
            scale = 2.0 ** math.floor(math.log2(scale))
        out[where] = (x[where].float() * scale).to(dtype).float() / scale
    return out


def rows(num_rows: int, width: int = 48, *, seed: int = 0) -> Tensor:
    """Rows and columns of very different size."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=draw)
    return x * 10.0 ** torch.randint(-2, 3, (num_rows, 1), generator=draw)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("width", [16, 48, 144, 200])
def test_every_block_has_its_own_scale(granularity: str, width: int, dtype: torch.dtype) -> None:
    x = rows(131, width)
    quantized = quantize(x, dtype, granularity=granularity)
    assert quantized.values.dtype == dtype and quantized.values.shape == x.shape
    assert quantized.scale_inv.dtype == torch.float32
    torch.testing.assert_close(
        dequantize(quantized), by_loops(x, dtype, granularity), rtol=1e-6, atol=0
    )
    expected = {
        "tensor": (1,),
        "rows": (131, 1),
        "1x128": (131, -(-width // 128)),
        "128x128": (2, -(-width // 128)),
        "1x32": (131, -(-width // 32)),
    }
    assert quantized.scale_inv.shape == expected[granularity]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("num_rows", HOSTILE)
def test_any_number_of_rows(num_rows: int, granularity: str, dtype: torch.dtype) -> None:
    x = rows(num_rows).bfloat16()
    quantized = quantize(x, dtype, granularity=granularity)
    assert quantized.values.shape == (num_rows, 48)
    error = (dequantize(quantized) - x.float()).abs()
    for where in blocks_of(granularity, num_rows, 48):
        amax = x[where].float().abs().max()
        step = 2 * amax / FP8_MAX[dtype] * SMALLEST_HALF_STEP[dtype]
        bound = torch.maximum(HALF_STEP[dtype] * x[where].float().abs(), step)
        assert (error[where] <= bound * 1.0001).all()
    assert torch.isfinite(quantized.scale_inv).all() and (quantized.scale_inv > 0).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_and_tiny_values(granularity: str, dtype: torch.dtype) -> None:
    with_zero_row = rows(16, 16)
    with_zero_row[3] = 0
    with_tiny = torch.zeros(16, 16)
    with_tiny[2, 5], with_tiny[4, 4] = 1e-40, -1e-40
    for x in (torch.zeros(16, 16), with_zero_row, with_tiny, torch.full((16, 16), 1e-38)):
        quantized = quantize(x, dtype, granularity=granularity)
        scale_inv, restored = quantized.scale_inv, dequantize(quantized)
        assert torch.isfinite(scale_inv).all() and (scale_inv >= 2.0**-126).all()
        assert torch.isfinite(1 / scale_inv).all()
        assert torch.isfinite(restored).all()
        assert (restored[x == 0] == 0).all()
    # a row of zeros takes nothing from the others
    restored = dequantize(quantize(with_zero_row, dtype, granularity=granularity))
    torch.testing.assert_close(restored, by_loops(with_zero_row, dtype, granularity))
    # no floor on scales: what is small throughout keeps its digits
    small = rows(16, 16).double() * 1e-30
    restored = dequantize(quantize(small, dtype, granularity=granularity)).double()
    assert (restored - small).norm() < 0.1 * small.norm()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_nan_stays_one_and_in_its_block(granularity: str) -> None:
    x = rows(140, 150)
    x[130, 140] = math.nan
    quantized = quantize(x, E4M3, granularity=granularity)
    restored = dequantize(quantized)
    assert restored[130, 140].isnan()
    for where in blocks_of(granularity, 140, 150):
        if not x[where].isnan().any():
            assert not restored[where].isnan().any()
    assert quantized.scale_inv.isnan().sum() == 1


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_infinity_is_not_hidden(granularity: str) -> None:
    x = rows(4, 16)
    x[1, 2] = -math.inf
    quantized = quantize(x, E4M3, granularity=granularity)
    assert (quantized.scale_inv > 0).all()
    assert dequantize(quantized)[1, 2] < -1e38


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_a_given_scale_saturates_on_both_sides(dtype: torch.dtype) -> None:
    largest = FP8_MAX[dtype]
    x = torch.tensor([[1e9, -1e9, math.inf, -math.inf, 0.5, 0.0, math.nan, largest / 2]])
    quantized = quantize(x, dtype, scale=torch.tensor([2.0]))
    assert quantized.scale_inv.tolist() == [0.5]
    values = quantized.values.float()[0].tolist()
    assert values[:6] == [largest, -largest, largest, -largest, 1.0, 0.0]
    assert math.isnan(values[6]) and values[7] == largest
    # a scalar serves as well
    again = quantize(x, dtype, scale=torch.tensor(2.0))
    assert torch.equal(again.values.view(torch.uint8), quantized.values.view(torch.uint8))
    assert again.scale_inv.shape == (1,)


def test_rounding_is_to_nearest_even() -> None:
    x = torch.tensor([[1.0625, 1.1875, 17.0, 19.0, 448.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10]])
    values = quantize(x, E4M3, scale=torch.ones(1)).values.float()
    assert values.tolist() == [[1.0, 1.25, 16.0, 20.0, 448.0, 2.0**-9, 0.0, 2.0**-8]]


def test_the_value_in_its_own_dtype_is_rounded() -> None:
    x = rows(33)
    half = x.bfloat16()
    for granularity in GRANULARITIES:
        mine, other = (quantize(v, E4M3, granularity=granularity) for v in (half, half.float()))
        assert torch.equal(dequantize(mine), dequantize(other))
        assert not torch.equal(
            dequantize(mine), dequantize(quantize(x, E4M3, granularity="tensor"))
        )


def test_microscaling_uses_powers_of_two_and_never_saturates() -> None:
    x = rows(64, 96)
    quantized = quantize(x, E4M3, granularity="1x32")
    mantissa, _ = torch.frexp(quantized.scale_inv)
    assert (mantissa == 0.5).all()
    largest = quantized.values.float().abs().view(64, 3, 32).amax(-1)
    assert (largest > 448 / 2 - 16).all()  # nor is a bit of range given away
    limit = FP8_MAX[E4M3] * quantized.scale_inv
    assert (x.abs().view(64, 3, 32).amax(-1) <= limit).all()


@pytest.mark.parametrize("margin", [0, 1, 3])
def test_margin_leaves_headroom(margin: int) -> None:
    amax = torch.tensor([0.0, 2.0, 448.0, 1e-42, 3e38, math.inf, math.nan])
    scale = scale_from_amax(amax, E4M3, margin=margin)
    assert scale[:3].tolist() == [1.0, 224 / 2**margin, 1.0 / 2**margin]
    assert scale[3] == 2.0**126 and 0 < scale[4] < 1e-35
    assert scale[5] == 2.0**-126 and scale[6].isnan()
    x = rows(5)
    largest = quantize(x, E4M3, margin=margin).values.float().abs().max()
    assert largest == 448 / 2**margin


def test_one_largest_value_for_each_operand() -> None:
    scale = scale_from_amax(torch.tensor([4.0, 4.0]), torch.tensor([448.0, 57344.0]))
    assert scale.tolist() == [112.0, 14336.0]


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="granularity.*'columns'"):
        quantize(rows(2), E4M3, granularity="columns")
    with pytest.raises(ValueError, match="scale.*'rows'"):
        quantize(rows(2), E4M3, granularity="rows", scale=torch.ones(1))
