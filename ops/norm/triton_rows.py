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

INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """Tile of a row kernel and the warps that hold it."""

    block: int
    """D as a power of two."""
    rows: int
    warps: int
    programs: int
    """Programs of a persistent kernel a multiprocessor."""
    stages: int
    """Row tiles of a persistent kernel in flight, the one that is computed included."""


def row_tiles(x_TD: Tensor, *, persistent: bool = False) -> RowTiles:
    """Return the tile for rows of D entries, the last dimension of a matrix.

    A thread holds 8 entries of a row (16 from 8192 on) in a persistent kernel, else 16: 16-byte
    accesses, and from 512 entries on the sums over a tile's rows stay inside a thread. A persistent
    kernel is a pipeline, with loads in flight ahead of the row that is computed.
    """
    block = max(16, triton.next_power_of_2(x_TD.shape[-1]))
    if INTERPRETED:
        return RowTiles(block=block, rows=16, warps=4, programs=2, stages=1)
    entries = 256 if persistent else 512  # of a warp
    warps = min(16, max(1, block // entries))
    rows = max(1, min(64, entries * warps // block))
    # up to four tensors wait in shared memory, which has 227 KiB
    stages = 4 if (row_bytes := block * x_TD.element_size()) <= 8192 else 3
    stages = stages if row_bytes <= 16384 else 2
    return RowTiles(
        block=block, rows=rows, warps=warps, programs=max(1, 16 // warps), stages=stages
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
