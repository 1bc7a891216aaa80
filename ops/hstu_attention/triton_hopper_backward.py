"""The backward kernel for Hopper in Gluon: warp-specialised, persistent; plain causal rule only.

A program owns 128 keys at a time: two consumer warpgroups hold dK and dV of 64 keys each, a
producer warp brings q and dO, 64 rows at a time, from the diagonal to the user's end. For tile i

    S^T = k q^T,  dP^T = v dO^T   ->   P^T, dS^T   ->   dV += P^T dO,  dK += dS^T q
    dQ_i-1 = dS_i-1 k                 64 rows x half of the columns for each warpgroup

dS goes through shared memory, because dQ sums over the keys of both warpgroups. It is read one
tile late, so the two need not meet inside a tile: one computes while the other multiplies. dQ is
added to an FP32 buffer without its constant factor (`triton_backward.cast_kernel`).

Only tiles on the diagonal and a last, partial one are masked; their rows past the end of the user
are set to zero in shared memory first, for TMA brings whatever lies there.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

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

from ops.hstu_attention.triton_hopper import (
    _block,
    _descriptor,
    _num_multiprocessors,
    _num_steps,
    _zero_tail,
    is_plain,
)
from ops.hstu_attention.triton_kernels import Rule

KEYS = 128
_BACKWARD_TILES = {128: (2,)}  # head dim: stages


@gluon.jit
def _first_key(row0, n):
    """The schedule's block counted from the end: the key block with that much work."""
    return (n + 127) // 128 * 128 - 128 - row0


@gluon.jit
def _producer(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    do_head_stride,
    table_ptr,
    offsets_ptr,
    num_blocks,
    total,
    smem,
    bars,
    STAGES: gl.constexpr,
):
    q_smem, k_smem, v_smem, do_smem, _ = smem
    full, free, kv_full, kv_free, _, _ = bars
    count = 0
    for step in range(_num_steps(total)):
        head, start, n, row0 = _block(step, table_ptr, offsets_ptr, num_blocks)
        key0 = _first_key(row0, n)
        first = start.to(gl.int32) + key0
        mbarrier.wait(kv_free, (step & 1) ^ 1)
        mbarrier.expect(kv_full, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
        for group in gl.static_range(2):
            row = first + group * 64
            tma.async_copy_global_to_shared(
                k_desc, [row, head * k_head_stride], kv_full, k_smem.index(group)
            )
            tma.async_copy_global_to_shared(
                v_desc, [row, head * v_head_stride], kv_full, v_smem.index(group)
            )
        for tile in range((n - key0 + 63) // 64):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
            row = first + tile * 64
            tma.async_copy_global_to_shared(
                q_desc, [row, head * q_head_stride], full.index(stage), q_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                do_desc, [row, head * do_head_stride], full.index(stage), do_smem.index(stage)
            )
            count += 1


@gluon.jit
def _zero_rows_past(tile, num_valid):
    """Zero the rows of a (64, width) tile in shared memory from num_valid on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    values = tile.load(layout)
    tile.store(gl.where(row < num_valid, values, gl.zeros_like(values)))


@gluon.jit
def _rows_gradient(
    dq_base,
    dq_stride,
    row0,
    n,
    ds_smem,
    k_smem,
    ds_full,
    ds_free,
    count,
    GROUP: gl.constexpr,
    A: gl.constexpr,
):
    """Add this warpgroup's half of the columns of dQ of one tile to the FP32 buffer."""
    half: gl.constexpr = A // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, half, 16])
    add_layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    buffer = count & 1
    mbarrier.wait(ds_full.index(buffer), count // 2 & 1)
    dq = gl.zeros([64, half], gl.float32, layout)
    for other in gl.static_range(2):
        dq = warpgroup_mma(
            ds_smem.index(buffer * 2 + other).permute((1, 0)),
            k_smem.index(other).slice(GROUP * half, half, dim=1),
            dq,
            use_acc=other > 0,
            is_async=True,
        )
    dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
    mbarrier.arrive(ds_free.index(buffer), count=1)
    dq = gl.convert_layout(dq, add_layout)
    row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, add_layout))
    col = GROUP * half + gl.arange(0, half, layout=gl.SliceLayout(0, add_layout))
    ptrs = dq_base + row.to(gl.int64)[:, None] * dq_stride + col[None, :]
    gl.atomic_add(ptrs, dq, mask=(row < n)[:, None], sem="relaxed")


@gluon.jit
def _tanh(h):
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _store_keys(base, stride, key0, n, grad, dtype: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    grad = gl.convert_layout(grad.to(dtype), layout)
    row = key0 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    ptrs = base + row.to(gl.int64)[:, None] * stride + col
    gl.store(ptrs, grad, mask=(row < n)[:, None])


@gluon.jit
def _consumer(
    dq_acc_ptr,
    dk_ptr,
    dv_ptr,
    num_heads,
    scaling_seqlen,
    half_alpha,
    table_ptr,
    offsets_ptr,
    num_blocks,
    total,
    smem,
    bars,
    GROUP: gl.constexpr,
    A: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
):
    q_smem, k_smem, v_smem, do_smem, ds_smem = smem
    full, free, kv_full, kv_free, ds_full, ds_free = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    if SCALE_IS_POINTER:
        inverse_scale = 1.0 / gl.load(scaling_seqlen).to(gl.float32)
    else:
        inverse_scale = 1.0 / scaling_seqlen
    stride = num_heads * A
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    col = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    row = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))[None, :]
    count = 0
    steps = _num_steps(total)
    for step in range(steps):
        head, start, n, row0 = _block(step, table_ptr, offsets_ptr, num_blocks)
        key0 = _first_key(row0, n)
        shift = start * stride + head.to(gl.int64) * A
        dq_base = dq_acc_ptr + shift
        mbarrier.wait(kv_full, step & 1)
        if key0 + GROUP * 64 + 64 > n:
            _zero_rows_past(k_smem.index(GROUP), n - key0 - GROUP * 64)
            fence_async_shared()
            gl.thread_barrier()
        k = k_smem.index(GROUP)
        v = v_smem.index(GROUP)
        dk = gl.zeros([64, A], gl.float32, o_layout)
        dv = gl.zeros([64, A], gl.float32, o_layout)
        tiles = (n - key0 + 63) // 64
        for tile in range(tiles):
            first = key0 + tile * 64
            stage = count % STAGES
            q = q_smem.index(stage)
            do = do_smem.index(stage)
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            if first + 64 > n:
                _zero_rows_past(q, n - first)
                _zero_rows_past(do, n - first)
                fence_async_shared()
                gl.thread_barrier()
            s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            s, dp = warpgroup_mma_wait(num_outstanding=0, deps=(s, dp))
            h = s * half_alpha
            t = _tanh(h)
            p = h + h * t
            ds = dp * (1.0 + t + h * (1.0 - t * t))
            if (tile < 2) | (first + 64 > n):
                seen = (col <= tile * 64 + row) & (first + row < n)
                p = gl.where(seen, p, 0.0)
                ds = gl.where(seen, ds, 0.0)
            ds = ds.to(dtype)
            p = gl.convert_layout(p.to(dtype), p_layout)
            dv = warpgroup_mma(p, do, dv, is_async=True)
            mbarrier.wait(ds_free.index(count & 1), (count // 2 & 1) ^ 1)
            ds_smem.index((count & 1) * 2 + GROUP).store(ds)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ds_full.index(count & 1), count=1)
            ds = gl.convert_layout(ds, p_layout)
            dk = warpgroup_mma(ds, q, dk, is_async=True)
            if tile > 0:
                _rows_gradient(
                    dq_base, stride, first - 64, n, ds_smem, k_smem, ds_full, ds_free, count - 1,
                    GROUP, A,
                )  # fmt: skip
            dk, dv, p, ds = warpgroup_mma_wait(num_outstanding=0, deps=(dk, dv, p, ds))
            mbarrier.arrive(free.index(stage), count=1)
            count += 1
        _rows_gradient(
            dq_base, stride, key0 + (tiles - 1) * 64, n, ds_smem, k_smem, ds_full, ds_free,
            count - 1, GROUP, A,
        )  # fmt: skip
        mbarrier.arrive(kv_free, count=1)
        own = key0 + GROUP * 64
        _store_keys(dv_ptr + shift, stride, own, n, dv * inverse_scale, dtype, A)
        _store_keys(dk_ptr + shift, stride, own, n, dk * (half_alpha * inverse_scale), dtype, A)


@gluon.jit(do_not_specialize=["num_rows", "num_users", "num_heads"])
def keys_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_acc_ptr,
    dk_ptr,
    dv_ptr,
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
    do_head_stride,
    A: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
):
    """dK and dV of all key blocks, their shares of dQ, and zeros past the last offset.

    dk, dv and dq_acc are contiguous (T, H, A).
    """
    end = gl.load(offsets_ptr + num_users).to(gl.int64)
    _zero_tail(dk_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    _zero_tail(dv_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    num_blocks = gl.load(table_ptr)
    total = num_blocks * num_heads
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 64, A], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 64, A], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [2, 64, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 64, A], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [4, 64, 64], ds_layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    kv_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    ds_free = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for buffer in gl.static_range(2):
        mbarrier.init(ds_full.index(buffer), count=2)
        mbarrier.init(ds_free.index(buffer), count=2)
    fence_async_shared()
    half_alpha = 0.5 * alpha
    smem = (q_smem, k_smem, v_smem, do_smem, ds_smem)
    bars = (full, free, kv_full, kv_free, ds_full, ds_free)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    dq_acc_ptr, dk_ptr, dv_ptr, num_heads, scaling_seqlen, half_alpha, table_ptr,
                    offsets_ptr, num_blocks, total, smem, bars, 0, A, STAGES, SCALE_IS_POINTER,
                ),
            ),
            (
                _consumer,
                (
                    dq_acc_ptr, dk_ptr, dv_ptr, num_heads, scaling_seqlen, half_alpha, table_ptr,
                    offsets_ptr, num_blocks, total, smem, bars, 1, A, STAGES, SCALE_IS_POINTER,
                ),
            ),
            (
                _producer,
                (
                    q_desc, k_desc, v_desc, do_desc, q_head_stride, k_head_stride, v_head_stride,
                    do_head_stride, table_ptr, offsets_ptr, num_blocks, total, smem, bars, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def can_backward(q: Tensor, v: Tensor, rule: Rule) -> bool:
    """Whether `launch_backward` takes such a call (strides aside)."""
    return is_plain(q, v, rule) and q.shape[2] in _BACKWARD_TILES


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    sums_and_grads: tuple[Tensor, Tensor, Tensor],
    scaling_seqlen: float | Tensor,
    seq_offsets: Tensor,
    table: Tensor,
) -> bool:
    """Fill dK and dV and add to the sums of dQ; False when TMA cannot walk an input.

    Args:
        sums_and_grads: FP32 sums of dQ, zero at first; dK; dV; all contiguous (T, H, A).
        table: schedule of blocks of KEYS rows.
    """
    num_rows, num_heads, width = q.shape
    (stages,) = _BACKWARD_TILES[width]
    descriptors = [_descriptor(x, 64) for x in (q, k, v, grad_out)]
    if any(descriptor is None for descriptor in descriptors):
        return False
    keys_kernel[(_num_multiprocessors(q.device),)](
        *descriptors,
        *sums_and_grads,
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
        grad_out.stride(1),
        A=width,
        STAGES=stages,
        SCALE_IS_POINTER=isinstance(scaling_seqlen, Tensor),
        num_warps=4,
    )
    return True
