"""What the Gluon kernels for Hopper share: who owns which block, tails, tiles, descriptors.

A kernel is persistent, one program a multiprocessor. A program walks the schedule there and back
(block p, then 2 G - 1 - p, 2 G + p, ...; G programs): longest first, evenly filled. Inside, a
producer warp brings tiles through TMA while two consumer warpgroups compute, so that one's silu
runs under the other's matrix products.

TMA does not know where a user ends. A tile that reaches past the end brings rows of the next user
or of the tail: as columns or rows of scores the mask drops them, as rows of a right operand they
are zeroed in shared memory first, for zero times NaN would be NaN.

Masks, tiles a block meets, notation and numerics: `triton_kernels`. Gluon has no interpreter; the
tested base is the plain kernels, whose results these must equal to the same bounds.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GROUP_ROWS = 64
"""Rows of scores that a consumer warpgroup owns."""
BLOCK_ROWS = 2 * GROUP_ROWS


@gluon.jit
def num_steps(total):
    """How many of `total` blocks this program owns."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    rounds = total // programs
    last = gl.where(rounds % 2 == 0, own, programs - 1 - own)
    return rounds + (last < total % programs).to(gl.int32)


@gluon.jit
def block_of_step(step, table_ptr, num_blocks):
    """Head, user and level of the block that this program does in this step."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    index = step * programs + gl.where(step % 2 == 0, own, programs - 1 - own)
    head = index // gl.maximum(num_blocks, 1)
    item = index % gl.maximum(num_blocks, 1)
    user = gl.load(table_ptr + 1 + 2 * item, mask=item < num_blocks, other=0)
    level = gl.load(table_ptr + 2 + 2 * item, mask=item < num_blocks, other=0)
    return head, user, level


@gluon.jit
def zero_rows_past(tile, num_valid, ROWS: gl.constexpr):
    """Zero the rows of a tile in shared memory from num_valid on, visibly to the tensor cores.

    Both warpgroups may do it to the same tile: they write the same.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    values = tile.load(layout)
    tile.store(gl.where(row < num_valid, values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def zero_tail(out_ptr, stride, head_stride, first, num_rows, num_heads, WIDTH: gl.constexpr):
    """Zeros in the rows past the last offset, blocks of them dealt to the programs."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    blocks = ((num_rows - first + 63) // 64).to(gl.int32)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    zeros = gl.zeros([64, WIDTH], out_ptr.dtype.element_ty, layout)
    for index in range(gl.program_id(0), blocks * num_heads, gl.num_programs(0)):
        rows = first + (index // num_heads) * 64 + row
        base = out_ptr + (index % num_heads).to(gl.int64) * head_stride
        gl.store(base + rows[:, None] * stride + col, zeros, mask=(rows < num_rows)[:, None])


@gluon.jit
def store_rows(base, stride, first, end, tile, WIDTH: gl.constexpr):
    """Store a (GROUP_ROWS, WIDTH) tile in shared memory to rows [first, end), coalesced."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = tile.load(layout)
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(base + row.to(gl.int64)[:, None] * stride + col, values, mask=(row < end)[:, None])


def descriptor(x_THA: Tensor, block_rows: int) -> TensorDescriptor | None:
    """A TMA descriptor of (T, columns of all heads), None where TMA cannot walk the tensor."""
    num_rows, num_heads, width = x_THA.shape
    row_stride, head_stride, _ = x_THA.stride()
    columns = (num_heads - 1) * head_stride + width
    aligned = x_THA.data_ptr() % 16 == 0 and row_stride % 8 == 0 and head_stride % 8 == 0
    if not aligned or row_stride < columns:
        return None
    layout = _shared_layout(block_rows, width, x_THA.dtype)
    return TensorDescriptor(
        x_THA, [num_rows, columns], [row_stride, 1], [block_rows, width], layout
    )


@lru_cache(maxsize=64)
def _shared_layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, width], element)


@lru_cache(maxsize=64)
def is_hopper(device: torch.device) -> bool:
    """Whether the device has Hopper's warpgroup instructions; Blackwell has others."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=64)
def num_multiprocessors(device: torch.device) -> int:
    """How many programs fill the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
