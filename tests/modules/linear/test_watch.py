"""What a Watch says of operands, by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import modules.linear.watch as watch_module
from modules.linear.watch import OperandFigures, Watch, is_watched, observe
from ops.quantize import Quantized, quantize

GRANULARITIES = ["tensor", "rows", "1x128", "128x128", "1x32"]
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


@pytest.mark.parametrize("granularity", GRANULARITIES)
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


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_rows_are_no_values(granularity: str) -> None:
    """Nor are they a scale: that of nothing, 1, would be the smallest below."""
    none, some = torch.zeros(0, 16), torch.full((3, 16), 2.0**-3)
    with Watch() as watch:
        observe("never", "x", none, quantize(none, E4M3, granularity=granularity))
        observe("a", "x", none, quantize(none, E4M3, granularity=granularity))
    assert watch.figures() == []
    with watch:
        observe("a", "x", some, quantize(some, E4M3, granularity=granularity))
        observe("a", "x", none, quantize(none, E4M3, granularity=granularity))
    (found,) = watch.figures()
    assert (found.module, found.amax, found.num_values) == ("a", 2.0**-3, 48)
    assert found.scale > 1000


@pytest.mark.parametrize("rows_padded", [0, 70])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_chunks_of_rows_add_up(
    granularity: str, rows_padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of an operand are the same in one piece and in pieces, wherever they stand out."""
    values = torch.randn(600, 160, generator=torch.Generator().manual_seed(2))
    values[:, ::7] *= 1e-6
    values[300:, ::9] = 0
    values[520, 3] = 50.0
    padded = torch.cat([values, torch.full((rows_padded, 160), 1e-3)])
    quantized = quantize(padded, E4M3, granularity=granularity)
    # as if scales were of a step before: some values saturate
    quantized = dataclasses.replace(quantized, scale_inv=quantized.scale_inv / 2)
    whole = look(values, quantized)
    assert whole.num_saturated > 0 and whole.amax == 50.0
    monkeypatch.setattr(watch_module, "_CHUNK_ROWS", 128)
    assert look(values, quantized) == whole


class LargestMade(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation made, views aside."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and tensor._base is None:
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return made


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nothing_is_made_as_large_as_the_operand(granularity: str) -> None:
    values = torch.ones(4 * 4096 + 5, 128, dtype=torch.bfloat16)
    quantized = quantize(values, E4M3, granularity=granularity)
    with Watch() as watch, LargestMade() as largest:
        observe("a", "x", values, quantized)
    assert 0 < largest.num_bytes <= 4096 * 128 * 4
    (found,) = watch.figures()
    assert found.num_values == values.numel()


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
