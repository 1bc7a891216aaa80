"""What the row kernels share: tile sizes, loads and stores of rows, sums.

A row kernel holds ROWS whole rows of D entries at a time, padded to a power of two, in registers.
Kernels with parameter gradients are persistent: a fixed number of programs walk over the row tiles
in steps of that number, keep their sums in FP32 and write one partial sum each. Which rows a
program sums, and in what order, depends only on T, D and the kind of GPU, so gradients are
bit-equal from run to run.

Only core builtins of triton.language are used: the functions of its own library are not callable in
the interpreter when something else imported triton first.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.norm import refuse_unsupported
from ops.triton_launch import next_power_of_2

INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """Tile of a row kernel and how many programs walk over such tiles."""

    block: int
    """D as a power of two."""
    rows: int
    warps: int
    programs: int | None
    """Programs a multiprocessor; None: one a row tile."""
    stages: int
    """Row tiles in flight, the one that is computed included."""

    def split(self, num_rows: int, device: torch.device) -> tuple[int, int]:
        """Return the number of programs and that of row tiles."""
        num_tiles = -(-num_rows // self.rows)
        if self.programs is None:
            return num_tiles, num_tiles
        return min(num_tiles, self.programs * num_processors(device)), num_tiles


# Measured at these widths: rows, warps, programs a multiprocessor, stages. A thread holds 8 or 16
# neighbours of a row: 16-byte accesses, and sums over a tile's rows that stay inside a thread.
_TILES: dict[tuple[str, int], tuple[int, int, int | None, int]] = {
    ("norm_forward", 512): (8, 2, None, 1),
    ("norm_forward", 1024): (4, 4, None, 1),
    ("norm_backward", 512): (4, 2, 8, 1),
    ("norm_backward", 1024): (1, 4, 4, 4),
    ("gate_forward", 512): (4, 4, 6, 3),
    ("gate_forward", 1024): (2, 4, 6, 3),
    # Philox needs the registers that rows in flight would take
    ("gate_forward_dropout", 512): (1, 1, None, 1),
    ("gate_forward_dropout", 1024): (1, 2, None, 1),
    ("gate_backward", 512): (2, 4, 4, 4),
    ("gate_backward", 1024): (1, 4, 4, 4),
    ("gate_backward_dropout", 512): (2, 2, 6, 3),
    ("gate_backward_dropout", 1024): (1, 4, 4, 4),
}


@functools.cache
def row_tiles(kernel: str, width: int, element_bytes: int) -> RowTiles:
    """Return the tile of a kernel of `_TILES` for rows of `width` entries.

    Other widths get the nearest entry's number of entries a tile; where that is less than one row,
    more warps.
    """
    block = max(16, next_power_of_2(width))
    measured = 512 if block <= 512 else 1024
    rows, warps, programs, stages = _TILES[kernel, measured]
    if INTERPRETED:
        return RowTiles(block=block, rows=16, warps=4, programs=programs and 2, stages=1)
    growth = max(1, block // (rows * measured))
    row_bytes = block * element_bytes
    return RowTiles(
        block=block,
        rows=max(1, min(64, rows * measured // block)),
        warps=min(16, warps * growth),
        programs=programs and max(1, programs // growth),
        # up to four tensors wait in shared memory, which has 227 KiB
        stages=min(stages, 4 if row_bytes <= 8192 else 3 if row_bytes <= 16384 else 2),
    )


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 in the interpreter."""
    if INTERPRETED:
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_rows(op: str, x: Tensor, width: int) -> None:
    """Raise NotImplementedError for rows that the kernels do not have."""
    reason = refuse_unsupported(width, dtype=x.dtype)
    if reason is None and x.shape[0] > 2**30:
        reason = f"at most 2**30 rows, got {x.shape[0]}"
    if reason is not None:
        raise NotImplementedError(
            f'{op}(backend = "triton"): {reason}; choose another value or backend = "pytorch"'
        )


@triton.jit
def load_rows(ptr, row, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows (ROWS, BLOCK_D) of a contiguous (num_rows, D) matrix in FP32; zeros outside."""
    col = tl.arange(0, BLOCK_D)[None, :]
    mask = row[:, None] < num_rows
    if BLOCK_D != D:
        mask = mask & (col < D)
    return tl.load(ptr + row.to(tl.int64)[:, None] * D + col, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, row, num_rows, tile, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write rows, rounded to the matrix's dtype."""
    col = tl.arange(0, BLOCK_D)[None, :]
    mask = row[:, None] < num_rows
    if BLOCK_D != D:
        mask = mask & (col < D)
    tile = tile.to(ptr.dtype.element_ty)
    tl.store(ptr + row.to(tl.int64)[:, None] * D + col, tile, mask=mask)


@triton.jit
def load_vector(ptr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A parameter as one FP32 row (1, BLOCK_D); zeros past D."""
    col = tl.arange(0, BLOCK_D)[None, :]
    if BLOCK_D == D:
        return tl.load(ptr + col).to(tl.float32)
    else:
        return tl.load(ptr + col, mask=col < D, other=0.0).to(tl.float32)


@triton.jit
def column_sums(tile):
    """Sums over the rows of a tile, (BLOCK_D,)."""
    return tl.reduce(tile, 0, tl.standard._sum_combine)


@triton.jit
def row_sums(tile):
    """Sums along the rows, (ROWS, 1)."""
    return tl.reduce(tile, 1, tl.standard._sum_combine)[:, None]


@triton.jit
def standardise(x, stats_ptr, row, num_rows, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(x - mean) / sqrt(variance + eps); mean and its reciprocal root go to stats (2, num_rows)."""
    mean = row_sums(x) * (1.0 / D)
    centred = x - mean
    if BLOCK_D != D:
        centred = tl.where(tl.arange(0, BLOCK_D)[None, :] < D, centred, 0.0)
    rstd = tl.rsqrt(row_sums(centred * centred) * (1.0 / D) + eps)
    place = stats_ptr + row.to(tl.int64)[:, None]
    tl.store(place, mean, mask=row[:, None] < num_rows)
    tl.store(place + num_rows, rstd, mask=row[:, None] < num_rows)
    return centred * rstd


@triton.jit
def load_stats(stats_ptr, row, num_rows):
    """Mean and reciprocal root of the variance of rows, (ROWS, 1) each."""
    place = stats_ptr + row.to(tl.int64)
    mean = tl.load(place, mask=row < num_rows, other=0.0)
    rstd = tl.load(place + num_rows, mask=row < num_rows, other=0.0)
    return mean[:, None], rstd[:, None]
