"""The forward kernel for Hopper in Gluon: warp-specialised, persistent; the plain causal rule only.

One producer warp fetches q, k and v through TMA; two consumer warpgroups own 64 rows each and run
apart, so that one's silu overlaps the other's matrix products, and inside a warpgroup the product
P v of one tile overlaps the silu of the next:

    S_j+1 = q k_j+1^T  |  O += P_j v_j  ->  wait for S  ->  P_j+1 = silu(S_j+1)  ->  wait for O

A program walks the schedule there and back (block c, then 2 G - 1 - c, 2 G + c, ...; G programs):
longest first, evenly filled. Tiles come from the diagonal down to key 0, so only the first one or
two of a block are masked. TMA does not know where a user ends: a first tile that reaches past the
end has its rows of v set to zero in shared memory (zero times NaN would be NaN); columns past the
end fall to the mask, rows past the end are not stored.

Notation and numerics: `triton_kernels`. It cannot run in the interpreter; the tested base is
`triton_forward`, whose results it must equal to the same bounds.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ops.hstu_attention.triton_kernels import Rule

WARPGROUP_ROWS = 64
NUM_CONSUMERS = 2
ROWS = WARPGROUP_ROWS * NUM_CONSUMERS


@gluon.jit
def _num_steps(total):
    """How many blocks this program owns."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    rounds = total // programs
    last = gl.where(rounds % 2 == 0, own, programs - 1 - own)
    return rounds + (last < total % programs).to(gl.int32)


@gluon.jit
def _block(step, table_ptr, offsets_ptr, num_blocks):
    """Head, first packed row of the user, its length, and first row of the block in it."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    index = step * programs + gl.where(step % 2 == 0, own, programs - 1 - own)
    head = index // gl.maximum(num_blocks, 1)
    item = index % gl.maximum(num_blocks, 1)
    user = gl.load(table_ptr + 1 + 2 * item, mask=item < num_blocks, other=0)
    row0 = gl.load(table_ptr + 2 + 2 * item, mask=item < num_blocks, other=0) * 128
    start = gl.load(offsets_ptr + user).to(gl.int64)
    n = (gl.load(offsets_ptr + user + 1).to(gl.int64) - start).to(gl.int32)
    return head, start, n, row0


@gluon.jit
def _num_tiles(row0, n, KEYS: gl.constexpr):
    return (gl.minimum(row0 + 128, n) + KEYS - 1) // KEYS


@gluon.jit
def _producer(
    q_desc,
    k_desc,
    v_desc,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    table_ptr,
    offsets_ptr,
    num_blocks,
    total,
    q_smem,
    k_smem,
    v_smem,
    q_full,
    q_free,
    k_full,
    k_free,
    v_full,
    v_free,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    count = 0
    for step in range(_num_steps(total)):
        head, start, n, row0 = _block(step, table_ptr, offsets_ptr, num_blocks)
        first = start.to(gl.int32)
        mbarrier.wait(q_free, (step & 1) ^ 1)
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        for group in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc,
                [first + row0 + group * 64, head * q_head_stride],
                q_full,
                q_smem.index(group),
            )
        tiles = _num_tiles(row0, n, KEYS)
        for tile in range(tiles):
            key0 = first + (tiles - 1 - tile) * KEYS
            stage = count % STAGES
            free_phase = (count // STAGES & 1) ^ 1
            mbarrier.wait(k_free.index(stage), free_phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [key0, head * k_head_stride], k_full.index(stage), k_smem.index(stage)
            )
            mbarrier.wait(v_free.index(stage), free_phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [key0, head * v_head_stride], v_full.index(stage), v_smem.index(stage)
            )
            count += 1


@gluon.jit
def _silu_of_double(h):
    t = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=gl.float32, is_pure=True, pack=1
    )
    return h + h * t


@gluon.jit
def _zero_rows_past(v_tile, num_valid, KEYS: gl.constexpr, V: gl.constexpr):
    """Zero the rows of a tile in shared memory from num_valid on; both warpgroups may do it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))[:, None]
    values = v_tile.load(layout)
    v_tile.store(gl.where(row < num_valid, values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _consumer(
    out_ptr,
    out_stride,
    out_head_stride,
    scaling_seqlen,
    half_alpha,
    table_ptr,
    offsets_ptr,
    num_blocks,
    total,
    q_smem,
    k_smem,
    v_smem,
    q_full,
    q_free,
    k_full,
    k_free,
    v_full,
    v_free,
    GROUP: gl.constexpr,
    A: gl.constexpr,
    V: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
):
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if SCALE_IS_POINTER:
        inverse_scale = 1.0 / gl.load(scaling_seqlen).to(gl.float32)
    else:
        inverse_scale = 1.0 / scaling_seqlen
    q = q_smem.index(GROUP)
    s_zero = gl.zeros([64, KEYS], gl.float32, s_layout)
    row = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    col = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))[None, :]
    count = 0
    steps = _num_steps(total)
    head, start, n, row0 = _block(0, table_ptr, offsets_ptr, num_blocks)
    for step in range(steps):
        following = gl.minimum(step + 1, steps - 1)
        next_head, next_start, next_n, next_row0 = _block(
            following, table_ptr, offsets_ptr, num_blocks
        )
        tiles = _num_tiles(row0, n, KEYS)
        key0 = (tiles - 1) * KEYS
        mbarrier.wait(q_full, step & 1)
        mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
        s = warpgroup_mma(
            q, k_smem.index(count % STAGES).permute((1, 0)), s_zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(k_free.index(count % STAGES), count=1)
        p = _silu_of_double(s * half_alpha)
        p = gl.where(key0 + col <= row0 + row, p, 0.0)
        p = gl.convert_layout(p.to(dtype), p_layout)
        if key0 + KEYS > n:
            mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
            _zero_rows_past(v_smem.index(count % STAGES), n - key0, KEYS, V)
        o = gl.zeros([64, V], gl.float32, o_layout)
        for _ in range(1, tiles):
            stage = (count + 1) % STAGES
            phase = (count + 1) // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), s_zero, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
            o = warpgroup_mma(p, v_smem.index(count % STAGES), o, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            mbarrier.arrive(k_free.index(stage), count=1)
            key0 -= KEYS
            p_next = _silu_of_double(s * half_alpha)
            # tiles of less than 128 keys: the first warpgroup's diagonal lies in the second one
            if (KEYS < 128) and (key0 + KEYS > row0 + GROUP * 64):
                p_next = gl.where(key0 + col <= row0 + row, p_next, 0.0)
            p_next = p_next.to(dtype)
            o, p = warpgroup_mma_wait(num_outstanding=0, deps=(o, p))
            mbarrier.arrive(v_free.index(count % STAGES), count=1)
            p = gl.convert_layout(p_next, p_layout)
            count += 1
        mbarrier.arrive(q_free, count=1)
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        o = warpgroup_mma(p, v_smem.index(count % STAGES), o, is_async=True)
        o, p = warpgroup_mma_wait(num_outstanding=0, deps=(o, p))
        mbarrier.arrive(v_free.index(count % STAGES), count=1)
        count += 1
        o = gl.convert_layout((o * inverse_scale).to(dtype), store_layout)
        out_row = row0 + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, store_layout))
        out_col = gl.arange(0, V, layout=gl.SliceLayout(0, store_layout))[None, :]
        out_base = out_ptr + start * out_stride + head.to(gl.int64) * out_head_stride
        gl.store(
            out_base + out_row.to(gl.int64)[:, None] * out_stride + out_col,
            o,
            mask=(out_row < n)[:, None],
        )
        head, start, n, row0 = next_head, next_start, next_n, next_row0


@gluon.jit
def _zero_tail(out_ptr, out_stride, out_head_stride, first, num_rows, num_heads, V: gl.constexpr):
    """Zeros in the rows past the last offset, blocks of them dealt to the programs."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    blocks = ((num_rows - first + 63) // 64).to(gl.int32)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, V, layout=gl.SliceLayout(0, layout))[None, :]
    zeros = gl.zeros([64, V], out_ptr.dtype.element_ty, layout)
    for index in range(gl.program_id(0), blocks * num_heads, gl.num_programs(0)):
        rows = first + (index // num_heads) * 64 + row
        base = out_ptr + (index % num_heads).to(gl.int64) * out_head_stride
        gl.store(base + rows[:, None] * out_stride + col, zeros, mask=(rows < num_rows)[:, None])


@gluon.jit(do_not_specialize=["num_rows", "num_users", "num_heads"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    offsets_ptr,
    table_ptr,
    scaling_seqlen,
    alpha,
    num_rows,
    num_users,
    num_heads,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    out_stride,
    out_head_stride,
    A: gl.constexpr,
    V: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
):
    """O of all row blocks of ROWS rows, and the zeros past the last offset."""
    first = gl.load(offsets_ptr + num_users).to(gl.int64)
    _zero_tail(out_ptr, out_stride, out_head_stride, first, num_rows, num_heads, V)
    num_blocks = gl.load(table_ptr)
    total = num_blocks * num_heads
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, A], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, V], v_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    half_alpha = 0.5 * alpha
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    out_ptr, out_stride, out_head_stride, scaling_seqlen, half_alpha, table_ptr,
                    offsets_ptr, num_blocks, total, q_smem, k_smem, v_smem, q_full, q_free, k_full,
                    k_free, v_full, v_free, 0, A, V, KEYS, STAGES, SCALE_IS_POINTER,
                ),
            ),
            (
                _consumer,
                (
                    out_ptr, out_stride, out_head_stride, scaling_seqlen, half_alpha, table_ptr,
                    offsets_ptr, num_blocks, total, q_smem, k_smem, v_smem, q_full, q_free, k_full,
                    k_free, v_full, v_free, 1, A, V, KEYS, STAGES, SCALE_IS_POINTER,
                ),
            ),
            (
                _producer,
                (
                    q_desc, k_desc, v_desc, q_head_stride, k_head_stride, v_head_stride, table_ptr,
                    offsets_ptr, num_blocks, total, q_smem, k_smem, v_smem, q_full, q_free, k_full,
                    k_free, v_full, v_free, KEYS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# head dim: keys of a tile, stages of k and v (shared memory of the last: 208 KiB)
_FORWARD_TILES = {64: (128, 3), 128: (128, 2), 256: (64, 2)}


def can_forward(q: Tensor, v: Tensor, rule: Rule) -> bool:
    """Whether `launch_forward` takes such a call (strides aside)."""
    return is_plain(q, v, rule) and q.shape[2] in _FORWARD_TILES


def is_plain(q: Tensor, v: Tensor, rule: Rule) -> bool:
    """Causal and nothing else, one head dim, 16 bits, on Hopper."""
    plain = Rule(
        causal=True,
        has_contextuals=False,
        contextual_rows_see_all=False,
        has_candidates=False,
        has_window=False,
        has_position_bias=False,
        has_time_bias=False,
    )
    is_16_bit = q.dtype in (torch.bfloat16, torch.float16)
    return rule == plain and is_16_bit and v.shape == q.shape and _capability(q.device) == 9


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    scaling_seqlen: float | Tensor,
    seq_offsets: Tensor,
    table: Tensor,
) -> bool:
    """Fill out (T, H, V); False when TMA cannot walk q, k or v and nothing was done.

    Args:
        table: schedule of blocks of ROWS rows.
    """
    num_rows, num_heads, width = q.shape
    keys, stages = _FORWARD_TILES[width]
    descriptors = [_descriptor(x, rows) for x, rows in ((q, WARPGROUP_ROWS), (k, keys), (v, keys))]
    if any(descriptor is None for descriptor in descriptors):
        return False
    forward_kernel[(_num_multiprocessors(q.device),)](
        *descriptors,
        out,
        seq_offsets,
        table,
        scaling_seqlen,
        width**-0.5,
        num_rows,
        seq_offsets.numel() - 1,
        num_heads,
        q.stride(1),
        k.stride(1),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        A=width,
        V=width,
        KEYS=keys,
        STAGES=stages,
        SCALE_IS_POINTER=isinstance(scaling_seqlen, Tensor),
        num_warps=4,
    )
    return True


def _descriptor(x_THA: Tensor, block_rows: int) -> TensorDescriptor | None:
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
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
