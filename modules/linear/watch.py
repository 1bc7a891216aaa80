"""A look at what FP8 does to the operands of linears: on request, and free on all other steps.

Engines tell `observe` of every operand they quantise. It returns at once unless a `Watch` is
active; then everything is gathered on the device, and read once, by `Watch.figures`.

One Watch at a time, for all threads: backward passes on a GPU run in threads of their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ops.quantize import Quantized, block_of, dequantize

_watch: "Watch | None" = None

_CHUNK_ROWS = 4096
"""Rows measured at a time, a multiple of any block's: what is made on the way stays this small."""


@dataclass(frozen=True, kw_only=True)
class OperandFigures:
    """What became of one operand of a linear in the steps that were watched."""

    module: str
    """Name of the linear."""
    operand: str
    """"x" (rows), "w" (weight) or "dy" (gradient of the output)."""
    amax: float
    """Largest magnitude before the cast; NaN or infinite where one value was."""
    scale: float
    """What values are multiplied by before the cast; the smallest one where there are several."""
    num_values: int
    """Values that are not zero."""
    num_underflowed: int
    """Of these, how many became zero."""
    num_saturated: int
    """Of these, how many were cut to the largest magnitude, beyond rounding."""

    @property
    def underflow_percent(self) -> float:
        """Share of the values that are not zero."""
        return 100 * self.num_underflowed / max(self.num_values, 1)

    @property
    def saturated_percent(self) -> float:
        """Share of the values that are not zero."""
        return 100 * self.num_saturated / max(self.num_values, 1)


class Watch:
    """Gathers while it is entered; recomputation and parts of a step add to the same operand."""

    def __init__(self) -> None:
        self._gathered: dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]] = {}

    def __enter__(self) -> Self:
        global _watch
        assert _watch is None, "a Watch is active already"
        _watch = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _watch
        _watch = None

    def add(self, name: str, operand: str, values: Tensor, quantized: Quantized) -> None:
        """Take in one operand; see `observe`."""
        found = _measure(values, quantized)
        before = self._gathered.get((name, operand))
        if before is not None:
            found = _merged([before, found])
        self._gathered[name, operand] = found

    def figures(self) -> list[OperandFigures]:
        """Return all operands seen, in the order they were first seen. Waits for the device."""
        if not self._gathered:
            return []
        rows = torch.stack(
            [
                torch.cat([amax.view(1), scale.view(1), counts])
                for amax, scale, counts in self._gathered.values()
            ]
        ).tolist()
        return [
            OperandFigures(
                module=name,
                operand=operand,
                amax=row[0],
                scale=row[1],
                num_values=int(row[2]),
                num_underflowed=int(row[3]),
                num_saturated=int(row[4]),
            )
            for (name, operand), row in zip(self._gathered, rows, strict=True)
        ]


def is_watched() -> bool:
    """Return whether `observe` would look; what it is told of may cost time to make."""
    return _watch is not None


def observe(name: str, operand: str, values: Tensor, quantized: Quantized) -> None:
    """Tell the active Watch of an operand; nothing happens where there is none.

    Args:
        name: of the linear's module.
        operand: "x", "w" or "dy".
        values: what was quantised, 2-D, any floating dtype; rows of padding may be missing. Without
            values there is nothing to tell, not even a scale.
        quantized: what it became, in the orientation of `values`.
    """
    if _watch is not None and values.numel() > 0:
        _watch.add(name, operand, values, quantized)


@torch.no_grad()
def _measure(values: Tensor, quantized: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Return amax, smallest scale, and counts (3,): not zero, became zero, saturated; float64."""
    chunks = []
    for start in range(0, values.shape[0], _CHUNK_ROWS):
        end = min(start + _CHUNK_ROWS, values.shape[0])
        chunks.append(_measure_chunk(values[start:end], _rows_of(quantized, start, end)))
    return _merged(chunks)


def _measure_chunk(values: Tensor, quantized: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    magnitude = values.abs().float()
    restored = dequantize(quantized).abs()
    is_value = magnitude != 0
    is_saturated = magnitude > restored * _rounding_at_the_top(quantized.values.dtype)
    is_saturated &= restored != 0
    is_saturated &= _is_largest(quantized.values)
    counts = [is_value.sum(), ((restored == 0) & is_value).sum(), is_saturated.sum()]
    scale = quantized.scale_inv.amax().double().reciprocal()
    return magnitude.amax().double(), scale, torch.stack(counts).double()


def _merged(found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    amaxes, scales, counts = zip(*found, strict=True)
    return torch.stack(amaxes).amax(), torch.stack(scales).amin(), torch.stack(counts).sum(0)


def _rows_of(quantized: Quantized, start: int, end: int) -> Quantized:
    """A view of rows; start lies where a block begins."""
    scale_inv = quantized.scale_inv
    if quantized.granularity != "tensor":
        rows, _ = block_of(quantized.granularity, *quantized.values.shape)
        scale_inv = scale_inv[start // rows : -(-end // rows)]
    return Quantized(
        values=quantized.values[start:end],
        scale_inv=scale_inv,
        granularity=quantized.granularity,
    )


def _rounding_at_the_top(dtype: torch.dtype) -> float:
    """How far above the largest number of an FP8 type a value may lie that is rounded to it."""
    limits = torch.finfo(dtype)
    spacing = limits.eps * 2 ** math.floor(math.log2(limits.max))
    return 1 + spacing / 2 / limits.max


def _is_largest(values: Tensor) -> Tensor:
    return values.float().abs() == torch.finfo(values.dtype).max


__all__ = ["OperandFigures", "Watch", "is_watched", "observe"]
