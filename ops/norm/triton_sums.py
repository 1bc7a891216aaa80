"""Column sums in Triton: of rows, and of the partial sums that persistent kernels leave behind.

Rows are read once at the speed of a copy; sums are FP32 and bit-equal from run to run.
"""

# ruff: noqa: ANN001  a kernel's arguments are device values without a Python type

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.norm.triton_rows import INTERPRETED, check_rows, column_sums, num_processors
from ops.triton_launch import cdiv, launch, next_power_of_2

_PROGRAMS = 4  # a multiprocessor
_TILE_BYTES = 4096
_STAGES = 4
_PARTIAL_TILE = (256, 16)


def sum_rows(x_TD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the sums over the rows, (D,), rounded from FP32 to `dtype`. No autograd.

    Args:
        x_TD: contiguous; zeros come from no row.
        dtype: of the sums.

    Raises:
        NotImplementedError: a dtype of x, or more rows, than the kernel has.
    """
    check_rows("sum_rows", x_TD, 1)  # columns are cut into tiles, so any width runs
    num_rows, width = x_TD.shape
    if not num_rows:
        return x_TD.new_zeros(width, dtype=dtype)
    columns = min(256, max(16, next_power_of_2(width)))
    rows = 16 if INTERPRETED else _TILE_BYTES // (columns * x_TD.element_size())
    blocks, num_tiles = cdiv(width, columns), cdiv(num_rows, rows)
    chunks = max(1, min(num_tiles, _PROGRAMS * num_processors(x_TD.device) // blocks))
    partial = torch.empty((chunks, width), dtype=torch.float32, device=x_TD.device)
    launch(
        _rows_kernel,
        (chunks * blocks,),
        {
            "x_ptr": x_TD,
            "partial_ptr": partial,
            "num_rows": num_rows,
            "num_tiles": num_tiles,
            "num_chunks": chunks,
            "D": width,
            "ROWS": rows,
            "COLS": columns,
            "STAGES": 1 if INTERPRETED else _STAGES,
        },
        num_warps=4,
    )
    return sum_partials(partial, dtype=dtype)


def sum_partials(partial_PD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the sums over P programs, (D,) in `dtype`; P at least 1, contiguous float32."""
    programs, width = partial_PD.shape
    out = torch.empty(width, dtype=dtype, device=partial_PD.device)
    rows, columns = _PARTIAL_TILE
    launch(
        _partials_kernel,
        (cdiv(width, columns),),
        {
            "partial_ptr": partial_PD,
            "out_ptr": out,
            "programs": programs,
            "width": width,
            "ROWS": rows,
            "COLS": columns,
        },
        num_warps=8,
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_chunks"])
def _rows_kernel(
    x_ptr,
    partial_ptr,
    num_rows,
    num_tiles,
    num_chunks,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program owns a column tile and the row tiles chunk, chunk + chunks, ..."""
    blocks: tl.constexpr = (D + COLS - 1) // COLS
    chunk = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * COLS + tl.arange(0, COLS)
    sums = tl.full([ROWS, COLS], 0.0, tl.float32)
    for tile in tl.range(chunk, num_tiles, num_chunks, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = row < num_rows
        if D % COLS != 0:
            mask = mask & (col < D)[None, :]
        place = x_ptr + row.to(tl.int64) * D + col[None, :]
        sums += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(partial_ptr + chunk.to(tl.int64) * D + col, column_sums(sums), mask=col < D)


@triton.jit(do_not_specialize=["programs"])
def _partials_kernel(partial_ptr, out_ptr, programs, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    sums = tl.full([ROWS, COLS], 0.0, tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < programs) & (col < width)[None, :]
        place = partial_ptr + row.to(tl.int64) * width + col[None, :]
        sums += tl.load(place, mask=mask, other=0.0)
    total = column_sums(sums).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + col, total, mask=col < width)
