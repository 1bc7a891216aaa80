"""What the Gluon kernels for Hopper share: who owns which block, tails, tiles, descriptors.

A kernel is persistent, one program a multiprocessor. Its producer warp draws the next block of the
schedule (longest first) from a counter, tells the consumers through shared memory, and brings tiles
through TMA, while two consumer warpgroups compute, so that one's silu runs under the other's matrix
products. Drawing matters: blocks dealt out beforehand left a third of the device idle.

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ops.hstu_attention.triton_schedule import HEADER

GROUP_ROWS = 64
"""Rows of scores that a consumer warpgroup owns."""
BLOCK_ROWS = 2 * GROUP_ROWS


@gluon.jit
def draw(counter_ptr):
    """The number of the next block nobody owns yet."""
    return gl.atomic_add(counter_ptr, 1, sem="relaxed")


@gluon.jit
def put_back(counter_ptr, index, total):
    """Reset the counter for the next launch: by the program that drew last of all.

    Each program stops at the first number past the end, so these are total, total + 1, ...
    """
    if index == total + gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)


@gluon.jit
def block_of_index(index, table_ptr, num_blocks):
    """Head, user and level of a block of the schedule, which runs once a head."""
    item = index % num_blocks
    user = gl.load(table_ptr + HEADER + 2 * item)
    level = gl.load(table_ptr + HEADER + 2 * item + 1)
    return index // num_blocks, user, level


@gluon.jit
def tell(step, board, head, level, start, n, c, m):
    """The producer's word to the consumers: what block this step is; n < 0 ends the kernel."""
    words, told, heard = board
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    slot = step % 2
    mbarrier.wait(heard.index(slot), (step // 2 & 1) ^ 1)
    i = gl.arange(0, 8, layout=layout)
    word = gl.where(i == 0, head, gl.where(i == 1, level, gl.where(i == 2, start, n)))
    word = gl.where(i == 4, c, gl.where(i == 5, m, word))
    words.index(slot).store(word)
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def hear(step, board):
    """A consumer's side of `tell`: head, level, start, n, c, m, all int32."""
    words, told, heard = board
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    slot = step % 2
    mbarrier.wait(told.index(slot), step // 2 & 1)
    word = words.index(slot).load(layout)
    mbarrier.arrive(heard.index(slot), count=1)
    # every thread holds all eight words: these sums pick one, at no cost
    i = gl.arange(0, 8, layout=layout)
    zero = gl.zeros_like(word)
    head = gl.sum(gl.where(i == 0, word, zero), 0)
    level = gl.sum(gl.where(i == 1, word, zero), 0)
    start = gl.sum(gl.where(i == 2, word, zero), 0)
    n = gl.sum(gl.where(i == 3, word, zero), 0)
    c = gl.sum(gl.where(i == 4, word, zero), 0)
    m = gl.sum(gl.where(i == 5, word, zero), 0)
    return head, level, start, n, c, m


@gluon.jit
def new_board():
    """Shared memory of `tell` and `hear`."""
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    words = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for slot in gl.static_range(2):
        mbarrier.init(told.index(slot), count=1)
        mbarrier.init(heard.index(slot), count=2)
    return words, told, heard


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
