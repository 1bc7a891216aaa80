"""The backward kernels for Hopper in Gluon (`hopper_kernels`): every mask, no bias.

    keys_kernel   a program owns 128 keys: dK and dV of 64 keys in the registers of each warpgroup,
                  rows of q and dO go by. Scores are transposed (keys x rows), so P^T and dS^T are
                  left operands straight from registers.
    rows_kernel   a program owns 128 rows: dQ of 64 rows in the registers of each warpgroup, keys
                  and values go by.

Two kernels compute the scores twice (seven products, not five), and so need no sum of dQ over
programs: no FP32 buffer, no atomics, no exchange between warpgroups, the same bits every run.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

from typing import Any

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

from ops.hstu_attention.hopper_forward import _first_key
from ops.hstu_attention.hopper_kernels import (
    GROUP_ROWS,
    block_of_index,
    descriptor,
    draw,
    hear,
    is_hopper,
    new_board,
    num_multiprocessors,
    put_back,
    store_rows,
    tell,
    zero_rows_past,
    zero_tail,
)
from ops.hstu_attention.triton_kernels import (
    Rule,
    _inverse_scale,
    _keys_of_rows,
    _rows_of_keys,
    _tanh,
    _user_shape,
    _visible,
)
from ops.hstu_attention.triton_schedule import COUNTERS

KEYS_COUNTER = gl.constexpr(COUNTERS["keys"])
ROWS_COUNTER = gl.constexpr(COUNTERS["rows"])
USE_TURNS = True
# head dim: rows of a tile and stages of keys_kernel, keys of a tile and stages of rows_kernel
_TILES = {64: (64, 4, 64, 4), 128: (64, 4, 64, 4)}


@gluon.jit
def _first_row(
    tile, num_masked, num_front, masked_start, num_around, full_start, last_start,
    ROWS: gl.constexpr,
):  # fmt: skip
    """First row of a tile of keys_kernel; the masked ones come first: front, diagonal, last."""
    around = masked_start + (tile - num_front) * ROWS
    row0 = gl.where(tile < num_front, tile * ROWS, around)
    row0 = gl.where(tile >= num_front + num_around, last_start, row0)
    return gl.where(tile < num_masked, row0, full_start + (tile - num_masked) * ROWS)


@gluon.jit
def _weights_and_slope(h):
    """silu(2 h) and 2 silu'(2 h)."""
    t = _tanh(h, True)
    return h + h * t, 1.0 + t + h * (1.0 - t * t)


@gluon.jit
def _keys_producer(
    descriptors, head_strides, structure, board, smem, bars, ROWS: gl.constexpr, STAGES: gl.constexpr,
    RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc = descriptors
    q_head_stride, k_head_stride, v_head_stride, do_head_stride = head_strides
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_blocks, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, k_smem, v_smem, do_smem = smem
    own_full, own_free, full, free, turn = bars
    counter_ptr = table_ptr + KEYS_COUNTER
    count = 0
    step = 0
    index = draw(counter_ptr)
    while index < total:
        head, user, level = block_of_index(index, table_ptr, num_blocks)
        start, n, c, m = _user_shape(offsets_ptr, contextuals_ptr, candidates_ptr, user, RULE)
        key0 = ((n + 127) // 128 - 1 - level) * 128
        tell(step, board, head, level, start.to(gl.int32), n, c, m)
        index = draw(counter_ptr)
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            _rows_of_keys(key0, n, c, m, group_size, window, ROWS, 128, RULE)
        )
        num_masked = num_front + num_around + num_last
        first = start.to(gl.int32)
        mbarrier.wait(own_free, (step & 1) ^ 1)
        mbarrier.expect(own_full, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
        for group in gl.static_range(2):
            row = first + key0 + group * 64
            tma.async_copy_global_to_shared(
                k_desc, [row, head * k_head_stride], own_full, k_smem.index(group)
            )
            tma.async_copy_global_to_shared(
                v_desc, [row, head * v_head_stride], own_full, v_smem.index(group)
            )
        for tile in range(num_masked + num_full):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
            row = first + _first_row(
                tile, num_masked, num_front, masked_start, num_around, full_start, last_start, ROWS
            )
            tma.async_copy_global_to_shared(
                q_desc, [row, head * q_head_stride], full.index(stage), q_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                do_desc, [row, head * do_head_stride], full.index(stage), do_smem.index(stage)
            )
            count += 1
        step += 1
    tell(step, board, 0, 0, 0, -1, 0, 0)
    put_back(counter_ptr, index, total)


@gluon.jit
def _keys_consumer(
    outputs, group_size, window, board, smem, bars, GROUP: gl.constexpr, A: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, SCALE_IS_POINTER: gl.constexpr, RULE: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    dk_ptr, dv_ptr, num_heads, scaling_seqlen, half_alpha = outputs
    q_smem, k_smem, v_smem, do_smem = smem
    own_full, own_free, full, free, turn = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    zero = gl.zeros([64, ROWS], gl.float32, s_layout)
    col_in_block = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    row_in_tile = gl.arange(0, ROWS, layout=gl.SliceLayout(0, s_layout))[None, :]
    k = k_smem.index(GROUP)
    v = v_smem.index(GROUP)
    count = 0
    rounds = 0
    step = 0
    head, level, start, n, c, m = hear(0, board)
    while n >= 0:
        key0 = ((n + 127) // 128 - 1 - level) * 128
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            _rows_of_keys(key0, n, c, m, group_size, window, ROWS, 128, RULE)
        )
        num_masked = num_front + num_around + num_last
        tiles = num_masked + num_full
        mbarrier.wait(own_full, step & 1)
        dk = gl.zeros([64, A], gl.float32, o_layout)
        dv = gl.zeros([64, A], gl.float32, o_layout)
        row0 = _first_row(
            0, num_masked, num_front, masked_start, num_around, full_start, last_start, ROWS
        )
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        if row0 + ROWS > n:
            zero_rows_past(q_smem.index(stage), n - row0, ROWS)
            zero_rows_past(do_smem.index(stage), n - row0, ROWS)
        q_t = q_smem.index(stage).permute((1, 0))
        do_t = do_smem.index(stage).permute((1, 0))
        s = warpgroup_mma(k, q_t, zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, do_t, zero, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(num_outstanding=0, deps=(s, dp))
        p, slope = _weights_and_slope(s * half_alpha)
        ds = dp * slope
        if num_masked > 0:
            row = row0 + row_in_tile
            seen = _visible(row, key0 + col_in_block, c, m, group_size, window, RULE)
            seen = seen & (row < n)
            p = gl.where(seen, p, 0.0)
            ds = gl.where(seen, ds, 0.0)
        p = gl.convert_layout(p.to(dtype), p_layout)
        ds = gl.convert_layout(ds.to(dtype), p_layout)
        for tile in range(1, tiles):
            row0 = _first_row(
                tile, num_masked, num_front, masked_start, num_around, full_start, last_start, ROWS
            )
            before = count % STAGES
            stage = (count + 1) % STAGES
            mbarrier.wait(full.index(stage), (count + 1) // STAGES & 1)
            if row0 + ROWS > n:
                zero_rows_past(q_smem.index(stage), n - row0, ROWS)
                zero_rows_past(do_smem.index(stage), n - row0, ROWS)
            if TURNS:
                mbarrier.wait(turn.index(GROUP), (rounds & 1) ^ (1 - GROUP))
            dv = warpgroup_mma(p, do_smem.index(before), dv, is_async=True)
            dk = warpgroup_mma(ds, q_smem.index(before), dk, is_async=True)
            dv, dk, p, ds = warpgroup_mma_wait(num_outstanding=0, deps=(dv, dk, p, ds))
            q_t = q_smem.index(stage).permute((1, 0))
            do_t = do_smem.index(stage).permute((1, 0))
            s = warpgroup_mma(k, q_t, zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do_t, zero, use_acc=False, is_async=True)
            if TURNS:
                mbarrier.arrive(turn.index(1 - GROUP), count=1)
                rounds += 1
            mbarrier.arrive(free.index(before), count=1)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            p_next, slope = _weights_and_slope(s * half_alpha)
            # p_next and slope among them: else their work is moved behind the wait
            dp, p_next, slope = warpgroup_mma_wait(num_outstanding=0, deps=(dp, p_next, slope))
            ds_next = dp * slope
            if tile < num_masked:
                row = row0 + row_in_tile
                seen = _visible(row, key0 + col_in_block, c, m, group_size, window, RULE)
                seen = seen & (row < n)
                p_next = gl.where(seen, p_next, 0.0)
                ds_next = gl.where(seen, ds_next, 0.0)
            p = gl.convert_layout(p_next.to(dtype), p_layout)
            ds = gl.convert_layout(ds_next.to(dtype), p_layout)
            count += 1
        stage = count % STAGES
        dv = warpgroup_mma(p, do_smem.index(stage), dv, is_async=True)
        dk = warpgroup_mma(ds, q_smem.index(stage), dk, is_async=True)
        dk, dv, p, ds = warpgroup_mma_wait(num_outstanding=0, deps=(dk, dv, p, ds))
        mbarrier.arrive(free.index(stage), count=1)
        count += 1
        shift = start.to(gl.int64) * stride + head.to(gl.int64) * A
        k.store((dk * (half_alpha * inverse_scale)).to(dtype))  # k and v have been read
        v.store((dv * inverse_scale).to(dtype))
        store_rows(dk_ptr + shift, stride, key0 + GROUP * 64, n, k, A)
        store_rows(dv_ptr + shift, stride, key0 + GROUP * 64, n, v, A)
        fence_async_shared()
        mbarrier.arrive(own_free, count=1)
        step += 1
        head, level, start, n, c, m = hear(step, board)


@gluon.jit(do_not_specialize=["num_rows", "num_users", "num_heads", "group_size", "window"])
def keys_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dk_ptr,
    dv_ptr,
    offsets_ptr,
    contextuals_ptr,
    candidates_ptr,
    table_ptr,
    scaling_seqlen,
    alpha,
    num_rows,
    num_users,
    num_heads,
    group_size,
    window,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    do_head_stride,
    A: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
    RULE: gl.constexpr,
    TURNS: gl.constexpr,
):
    """dK and dV (T, H, A), contiguous, of all blocks of 128 keys; zeros past the last offset."""
    end = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(dk_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    zero_tail(dv_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    num_blocks = gl.load(table_ptr)
    total = num_blocks * num_heads
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, A], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, A], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [2, 64, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 64, A], v_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    own_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    mbarrier.init(own_full, count=1)
    mbarrier.init(own_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    board = new_board()
    fence_async_shared()
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_blocks, total, group_size,
        window,
    )  # fmt: skip
    smem = (q_smem, k_smem, v_smem, do_smem)
    bars = (own_full, own_free, full, free, turn)
    outputs = (dk_ptr, dv_ptr, num_heads, scaling_seqlen, 0.5 * alpha)
    descriptors = (q_desc, k_desc, v_desc, do_desc)
    head_strides = (q_head_stride, k_head_stride, v_head_stride, do_head_stride)
    gl.warp_specialize(
        [
            (
                _keys_consumer,
                (
                    outputs, group_size, window, board, smem, bars, 0, A, ROWS, STAGES,
                    SCALE_IS_POINTER, RULE, TURNS,
                ),
            ),
            (
                _keys_consumer,
                (
                    outputs, group_size, window, board, smem, bars, 1, A, ROWS, STAGES,
                    SCALE_IS_POINTER, RULE, TURNS,
                ),
            ),
            (
                _keys_producer,
                (descriptors, head_strides, structure, board, smem, bars, ROWS, STAGES, RULE),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _rows_producer(
    descriptors, head_strides, structure, board, smem, bars, KEYS: gl.constexpr, STAGES: gl.constexpr,
    RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc = descriptors
    q_head_stride, k_head_stride, v_head_stride, do_head_stride = head_strides
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_blocks, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, k_smem, v_smem, do_smem = smem
    own_full, own_free, full, free, turn = bars
    counter_ptr = table_ptr + ROWS_COUNTER
    count = 0
    step = 0
    index = draw(counter_ptr)
    while index < total:
        head, user, level = block_of_index(index, table_ptr, num_blocks)
        start, n, c, m = _user_shape(offsets_ptr, contextuals_ptr, candidates_ptr, user, RULE)
        row0 = level * 128
        tell(step, board, head, level, start.to(gl.int32), n, c, m)
        index = draw(counter_ptr)
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
            row0, n, c, m, group_size, window, 128, KEYS, RULE
        )
        num_masked = num_front + num_main + num_candidate
        first = start.to(gl.int32)
        mbarrier.wait(own_free, (step & 1) ^ 1)
        mbarrier.expect(own_full, 2 * q_desc.block_type.nbytes + 2 * do_desc.block_type.nbytes)
        for group in gl.static_range(2):
            row = first + row0 + group * 64
            tma.async_copy_global_to_shared(
                q_desc, [row, head * q_head_stride], own_full, q_smem.index(group)
            )
            tma.async_copy_global_to_shared(
                do_desc, [row, head * do_head_stride], own_full, do_smem.index(group)
            )
        for tile in range(num_masked + num_full):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            key0, _ = _first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            tma.async_copy_global_to_shared(
                k_desc, [first + key0, head * k_head_stride], full.index(stage), k_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                v_desc, [first + key0, head * v_head_stride], full.index(stage), v_smem.index(stage)
            )
            count += 1
        step += 1
    tell(step, board, 0, 0, 0, -1, 0, 0)
    put_back(counter_ptr, index, total)


@gluon.jit
def _rows_consumer(
    outputs, group_size, window, board, smem, bars, GROUP: gl.constexpr, A: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, SCALE_IS_POINTER: gl.constexpr, RULE: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    dq_ptr, num_heads, scaling_seqlen, half_alpha = outputs
    q_smem, k_smem, v_smem, do_smem = smem
    own_full, own_free, full, free, turn = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    zero = gl.zeros([64, KEYS], gl.float32, s_layout)
    row_in_block = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    col_in_tile = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))[None, :]
    q = q_smem.index(GROUP)
    do = do_smem.index(GROUP)
    count = 0
    rounds = 0
    step = 0
    head, level, start, n, c, m = hear(0, board)
    while n >= 0:
        row0 = level * 128
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
            row0, n, c, m, group_size, window, 128, KEYS, RULE
        )
        num_masked = num_front + num_main + num_candidate
        row = row0 + row_in_block
        mbarrier.wait(own_full, step & 1)
        dq = gl.zeros([64, A], gl.float32, o_layout)
        stage = count % STAGES
        key0, end = _first_key(
            0, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
        )
        k = k_smem.index(stage)
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        if key0 + KEYS > n:
            zero_rows_past(k, n - key0, KEYS)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        v_t = v_smem.index(stage).permute((1, 0))
        dp = warpgroup_mma(do, v_t, zero, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(num_outstanding=0, deps=(s, dp))
        _, slope = _weights_and_slope(s * half_alpha)
        ds = dp * slope
        if num_masked > 0:
            col = key0 + col_in_tile
            seen = _visible(row, col, c, m, group_size, window, RULE) & (col < end)
            ds = gl.where(seen, ds, 0.0)
        ds = gl.convert_layout(ds.to(dtype), p_layout)
        for tile in range(1, num_masked + num_full):
            key0, end = _first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            before = k_smem.index(count % STAGES)
            stage = (count + 1) % STAGES
            k = k_smem.index(stage)
            mbarrier.wait(full.index(stage), (count + 1) // STAGES & 1)
            if key0 + KEYS > n:
                zero_rows_past(k, n - key0, KEYS)
            if TURNS:
                mbarrier.wait(turn.index(GROUP), (rounds & 1) ^ (1 - GROUP))
            s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            dq = warpgroup_mma(ds, before, dq, is_async=True)
            v_t = v_smem.index(stage).permute((1, 0))
            dp = warpgroup_mma(do, v_t, zero, use_acc=False, is_async=True)
            if TURNS:
                mbarrier.arrive(turn.index(1 - GROUP), count=1)
                rounds += 1
            s = warpgroup_mma_wait(num_outstanding=2, deps=(s,))
            _, slope = _weights_and_slope(s * half_alpha)
            # slope among them: else its work is moved behind the wait
            dq, dp, ds, slope = warpgroup_mma_wait(num_outstanding=0, deps=(dq, dp, ds, slope))
            mbarrier.arrive(free.index(count % STAGES), count=1)
            ds_next = dp * slope
            if tile < num_masked:
                col = key0 + col_in_tile
                seen = _visible(row, col, c, m, group_size, window, RULE) & (col < end)
                ds_next = gl.where(seen, ds_next, 0.0)
            ds = gl.convert_layout(ds_next.to(dtype), p_layout)
            count += 1
        dq = warpgroup_mma(ds, k_smem.index(count % STAGES), dq, is_async=True)
        dq, ds = warpgroup_mma_wait(num_outstanding=0, deps=(dq, ds))
        mbarrier.arrive(free.index(count % STAGES), count=1)
        count += 1
        shift = start.to(gl.int64) * stride + head.to(gl.int64) * A
        q.store((dq * (half_alpha * inverse_scale)).to(dtype))  # q has been read
        store_rows(dq_ptr + shift, stride, row0 + GROUP * 64, n, q, A)
        fence_async_shared()
        mbarrier.arrive(own_free, count=1)
        step += 1
        head, level, start, n, c, m = hear(step, board)


@gluon.jit(do_not_specialize=["num_rows", "num_users", "num_heads", "group_size", "window"])
def rows_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_ptr,
    offsets_ptr,
    contextuals_ptr,
    candidates_ptr,
    table_ptr,
    scaling_seqlen,
    alpha,
    num_rows,
    num_users,
    num_heads,
    group_size,
    window,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    do_head_stride,
    A: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
    RULE: gl.constexpr,
    TURNS: gl.constexpr,
):
    """dQ (T, H, A), contiguous, of all blocks of 128 rows; zeros past the last offset."""
    end = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(dq_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    num_blocks = gl.load(table_ptr)
    total = num_blocks * num_heads
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, A], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [2, 64, A], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, A], v_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    own_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    mbarrier.init(own_full, count=1)
    mbarrier.init(own_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    board = new_board()
    fence_async_shared()
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_blocks, total, group_size,
        window,
    )  # fmt: skip
    smem = (q_smem, k_smem, v_smem, do_smem)
    bars = (own_full, own_free, full, free, turn)
    outputs = (dq_ptr, num_heads, scaling_seqlen, 0.5 * alpha)
    descriptors = (q_desc, k_desc, v_desc, do_desc)
    head_strides = (q_head_stride, k_head_stride, v_head_stride, do_head_stride)
    gl.warp_specialize(
        [
            (
                _rows_consumer,
                (
                    outputs, group_size, window, board, smem, bars, 0, A, KEYS, STAGES,
                    SCALE_IS_POINTER, RULE, TURNS,
                ),
            ),
            (
                _rows_consumer,
                (
                    outputs, group_size, window, board, smem, bars, 1, A, KEYS, STAGES,
                    SCALE_IS_POINTER, RULE, TURNS,
                ),
            ),
            (
                _rows_producer,
                (descriptors, head_strides, structure, board, smem, bars, KEYS, STAGES, RULE),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def can_backward(q: Tensor, v: Tensor, rule: Rule) -> bool:
    """Whether `launch_backward` takes such a call (strides aside)."""
    is_16_bit = q.dtype in (torch.bfloat16, torch.float16)
    has_bias = rule.has_position_bias or rule.has_time_bias
    fits = v.shape == q.shape and q.shape[2] in _TILES
    return fits and is_16_bit and not has_bias and is_hopper(q.device)


def launch_backward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    *,
    batch: dict[str, Any],
    rule: Rule,
) -> bool:
    """Fill dQ, dK and dV (T, H, A), contiguous; False when TMA cannot walk an input.

    Args:
        inputs: q, k, v, dO.
        outputs: dQ, dK, dV.
        batch: the structure of the batch, schedule of blocks of BLOCK_ROWS rows included.
    """
    num_rows, num_heads, width = inputs[0].shape
    rows, row_stages, keys, key_stages = _TILES[width]
    q, k, v, do = (descriptor(x, GROUP_ROWS) for x in inputs)
    if q is None or k is None or v is None or do is None:
        return False
    names = ("q_head_stride", "k_head_stride", "v_head_stride", "do_head_stride")
    arguments = {
        "num_heads": num_heads,
        **{name: x.stride(1) for name, x in zip(names, inputs, strict=True)},
        "A": width,
        "SCALE_IS_POINTER": isinstance(batch["scaling_seqlen"], Tensor),
        "RULE": rule,
        "TURNS": USE_TURNS,
        "num_warps": 4,
        **batch,
    }
    dq, dk, dv = outputs
    grid = (num_multiprocessors(inputs[0].device),)
    keys_kernel[grid](q, k, v, do, dk, dv, ROWS=rows, STAGES=row_stages, **arguments)
    rows_kernel[grid](q, k, v, do, dq, KEYS=keys, STAGES=key_stages, **arguments)
    return True
