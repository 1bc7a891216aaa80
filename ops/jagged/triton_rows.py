"""`take_rows` in one launch each way, and the tiles of kernels that move rows.

Limits: float32, bfloat16 and float16; D up to 8192; the index rises.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_WIDTH = 8192
_TILE = 4096  # elements that a program of 4 warps holds: 32 a thread
_BLOCK = 32  # rows of the gradient that share a search for their entries
_FAN = 128  # entries that a step of the search looks at


def check_rows(rows: Tensor, *, name: str) -> None:
    """Raise ValueError unless rows are (N, D) of a dtype and width that the kernels have."""
    width = rows.shape[1] if rows.dim() == 2 else None
    if width is None or width > _MAX_WIDTH or rows.dtype not in _DTYPES or rows.stride(1) != 1:
        raise ValueError(
            f'{name}(backend = "triton") needs rows (N, D) of float32, bfloat16 or float16, with '
            f"D <= {_MAX_WIDTH} and neighbouring columns in memory, got {tuple(rows.shape)} of "
            f'{rows.dtype} with strides {rows.stride()}; use backend = "pytorch"'
        )


def tile_of(width: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile for rows of this width, and the warps it needs."""
    cols = max(16, triton.next_power_of_2(width))
    return max(1, min(_BLOCK, _TILE // cols)), cols, 4 if cols <= _TILE else 8


def take_rows(rows_TD: Tensor, index_N: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return rows_TD[index_N] in `dtype`; see `ops.jagged.take_rows`."""
    check_rows(rows_TD, name="take_rows")
    if index_N.device.type == "cpu" and bool((torch.diff(index_N) <= 0).any()):
        raise ValueError('take_rows(backend = "triton") needs an index that rises')
    return _TakeRows.apply(rows_TD, index_N, dtype)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, index_N: Tensor, dtype: torch.dtype) -> Tensor:
        index_N = index_N.contiguous()
        ctx.save_for_backward(index_N)
        ctx.shape, ctx.dtype = rows_TD.shape, rows_TD.dtype
        num_taken, width = index_N.numel(), rows_TD.shape[1]
        out_ND = torch.empty(num_taken, width, dtype=dtype, device=rows_TD.device)
        if out_ND.numel():
            rows, cols, warps = tile_of(width)
            take_kernel[(triton.cdiv(num_taken, rows),)](
                rows_TD,
                index_N,
                out_ND,
                rows_TD.stride(0),
                num_taken,
                rows_TD.shape[0],
                D=width,
                ROWS=rows,
                COLS=cols,
                num_warps=warps,
            )
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (index_N,) = ctx.saved_tensors
        if grad_ND.stride(1) != 1:
            grad_ND = grad_ND.contiguous()
        grad_TD = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad_ND.device)
        num_rows, width = ctx.shape
        if grad_TD.numel():
            rows, cols, warps = tile_of(width)
            put_kernel[(triton.cdiv(num_rows, _BLOCK),)](
                grad_ND,
                index_N,
                grad_TD,
                grad_ND.stride(0),
                index_N.numel(),
                num_rows,
                D=width,
                ROWS=rows,
                COLS=cols,
                BLOCK=_BLOCK,
                FAN=_FAN,
                LEVELS=_levels(index_N.numel()),
                num_warps=warps,
            )
        return grad_TD, None, None


def _levels(num_entries: int) -> int:
    """Return how many steps the search takes: FAN ** steps >= entries."""
    levels = 1
    while _FAN**levels < num_entries:
        levels += 1
    return levels


# tl.sum and tl.cumsum are kernels of their own, which the interpreter cannot call unless it was
# chosen before triton was first imported
@triton.jit
def axis_sum(x, AXIS: tl.constexpr):
    """Sum over an axis."""
    return tl.reduce(x, AXIS, tl.standard._sum_combine)


@triton.jit
def running_sum(x):
    """Sums of x[0], x[0] + x[1], ..."""
    return tl.associative_scan(x, 0, tl.standard._sum_combine)


@triton.jit(
    debug=True,
    do_not_specialize=["num_taken", "num_rows"],
    do_not_specialize_on_alignment=["index_ptr"],
)
def take_kernel(
    rows_ptr,
    index_ptr,
    out_ptr,
    stride,
    num_taken,
    num_rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Copy ROWS rows."""
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_entry = entry < num_taken
    col = tl.arange(0, COLS)[None, :]
    mask = is_entry[:, None] & (col < D)
    index = tl.load(index_ptr + entry, mask=is_entry, other=0).to(tl.int64)
    after = tl.load(index_ptr + entry + 1, mask=entry + 1 < num_taken, other=0).to(tl.int64)
    after = tl.where(entry + 1 < num_taken, after, num_rows)
    in_order = (index >= 0) & (index < after) & (after <= num_rows)
    tl.device_assert(in_order | (is_entry == 0), "take_rows: the index must rise inside the rows")
    x = tl.load(rows_ptr + index[:, None] * stride + col, mask=mask, other=0.0)
    tl.store(out_ptr + entry[:, None] * D + col, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _first_entry(index_ptr, num_taken, row, FAN: tl.constexpr, LEVELS: tl.constexpr):
    """How many entries of a rising index lie below `row`: FAN pivots a step, then between two."""
    lane = tl.arange(0, FAN)
    first = row * 0
    for level in tl.static_range(LEVELS):
        step = FAN ** (LEVELS - 1 - level)
        pivot = first + (lane + 1) * step - 1
        is_entry = pivot < num_taken
        value = tl.load(index_ptr + pivot, mask=is_entry, other=0)
        first += step * axis_sum((is_entry & (value < row)).to(tl.int64), 0)
    return first


@triton.jit(
    do_not_specialize=["num_taken", "num_rows"],
    do_not_specialize_on_alignment=["index_ptr"],
)
def put_kernel(
    grad_ptr,
    index_ptr,
    out_ptr,
    stride,
    num_taken,
    num_rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAN: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Write BLOCK rows of the gradient: those of the index copied, the others zero."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    first = _first_entry(index_ptr, num_taken, begin, FAN, LEVELS)
    entry = first + tl.arange(0, BLOCK)
    wanted = tl.load(index_ptr + entry, mask=entry < num_taken, other=0)
    wanted = tl.where(entry < num_taken, wanted, num_rows)[None, :]
    col = tl.arange(0, COLS)[None, :]
    for step in range(0, BLOCK, ROWS):
        row = begin + step + tl.arange(0, ROWS)
        is_row = row < num_rows
        place = first + axis_sum((wanted < row[:, None]).to(tl.int64), 1)
        is_taken = axis_sum((wanted == row[:, None]).to(tl.int32), 1) > 0
        source = grad_ptr + place[:, None] * stride + col
        x = tl.load(source, mask=(is_row & is_taken)[:, None] & (col < D), other=0.0)
        mask = is_row[:, None] & (col < D)
        tl.store(out_ptr + row[:, None] * D + col, x.to(out_ptr.dtype.element_ty), mask=mask)
