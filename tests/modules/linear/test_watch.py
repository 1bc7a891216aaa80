"""What a Watch says of operands, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from modules.linear.watch import OperandFigures, Watch, is_watched, observe
from ops.quantize import Quantized, quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def look(values: Tensor, quantized: Quantized) -> OperandFigures:
    with Watch() as watch:
        observe("layer", "x", values, quantized)
    (figures,) = watch.figures()
    return figures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_of_values_by_hand(dtype: torch.dtype) -> None:
    """Scale 2: 448 is the largest, half a step below 2**-9 goes to zero."""
    values = torch.tensor([[0.0, 1.0, -224.0, 231.0, 240.0, -500.0, 2.0**-12, -(2.0**-10)]])
    found = look(values.to(dtype), quantize(values.to(dtype), E4M3, scale=torch.tensor([2.0])))
    assert (found.module, found.operand) == ("layer", "x")
    assert (found.amax, found.scale) == (500.0, 2.0)
    # 462 is rounded to 448; 480 and 1000 are cut
    assert (found.num_values, found.num_underflowed, found.num_saturated) == (7, 1, 2)
    assert found.underflow_percent == pytest.approx(100 / 7)
    assert found.saturated_percent == pytest.approx(200 / 7)


def test_gradients_round_to_their_own_largest() -> None:
    values = torch.tensor([[57344.0, 61000.0, -62000.0, 1e6]])
    found = look(values, quantize(values, E5M2, scale=torch.tensor([1.0])))
    assert found.num_saturated == 2


@pytest.mark.parametrize("granularity", ["tensor", "rows", "1x128", "128x128", "1x32"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_present_scales_saturate_nothing(granularity: str, dtype: torch.dtype) -> None:
    values = torch.randn(37, 160, generator=torch.Generator().manual_seed(1)) * 1e-3
    values[5] = 0
    quantized = quantize(values, dtype, granularity=granularity)
    found = look(values, quantized)
    assert found.num_saturated == 0
    assert found.num_values == 36 * 160
    assert found.amax == values.abs().max().item()
    assert found.scale == pytest.approx(1 / quantized.scale_inv.max().item())


def test_rows_of_padding_are_not_counted() -> None:
    values = torch.ones(3, 16)
    padded = quantize(torch.cat([values, torch.zeros(13, 16)]), E4M3)
    assert look(values, padded).num_values == 48


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    values = torch.tensor([[1.0, bad, 0.0, 2.0]])
    found = look(values, quantize(values, E4M3, scale=torch.tensor([1.0])))
    assert not math.isfinite(found.amax)
    assert found.num_underflowed == 0


def test_no_rows_are_no_values() -> None:
    found = look(torch.zeros(0, 16), quantize(torch.zeros(0, 16), E4M3))
    assert (found.amax, found.num_values, found.underflow_percent) == (0.0, 0, 0.0)


def test_looks_at_one_operand_add_up() -> None:
    few, many = torch.full((1, 4), 3.0), torch.full((2, 4), 500.0)
    with Watch() as watch:
        observe("a", "x", few, quantize(few, E4M3, scale=torch.tensor([1.0])))
        observe("a", "dy", few, quantize(few, E4M3))
        observe("a", "x", many, quantize(many, E4M3, scale=torch.tensor([0.25])))
        observe("a", "x", many, quantize(many, E4M3, scale=torch.tensor([1.0])))
    first, second = watch.figures()
    assert (first.operand, second.operand) == ("x", "dy")
    assert (first.amax, first.scale, first.num_values, first.num_saturated) == (500.0, 0.25, 20, 8)


def test_nobody_looks_without_a_watch() -> None:
    values = torch.ones(1, 4)
    watch = Watch()
    observe("a", "x", values, quantize(values, E4M3))
    assert watch.figures() == []
    with pytest.raises(ZeroDivisionError), watch:
        assert is_watched()
        raise ZeroDivisionError
    assert not is_watched()
