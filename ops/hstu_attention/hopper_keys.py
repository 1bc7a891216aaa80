"""dK and dV on Hopper in Gluon (`hopper_kernels`), head dims 64 and 128: every mask, no bias.

A program owns 128 keys of one user and one head at a time: dK and dV of 64 keys in the registers of
each warpgroup, while rows of q and dO go by, 64 at a time. Scores are transposed (keys x rows), so
that P^T and dS^T are left operands straight from registers. A warpgroup's round, by turns:

    dV += P^T_t-1 dO_t-1   dK += dS^T_t-1 q_t-1   S^T_t = k q_t^T   dP^T_t = v dO_t^T

and then, while the other one has its turn, P_t and dS_t.

dQ has a kernel of its own (`hopper_rows`). Two kernels compute the scores twice (seven products,
not five), and so need no sum of dQ over programs: no FP32 buffer, no atomics, no exchange between
warpgroups, the same bits every run.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ops.hstu_attention.hopper_kernels import (
    draw_block,
    first_row,
    hear,
    hide,
    new_board,
    put_back,
    seen_by_columns,
    store_rows,
    tell,
    times_slopes,
    wait_for_tile,
    weights_and_slopes,
    zero_rows_past,
    zero_tail,
)
from ops.hstu_attention.triton_kernels import _inverse_scale, _rows_of_keys
from ops.hstu_attention.triton_schedule import COUNTERS

COUNTER = gl.constexpr(COUNTERS["keys"])


@gluon.jit
def _producer(
    descriptors, head_strides, structure, board, smem, bars, STAGES: gl.constexpr,
    RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc = descriptors
    q_head_stride, k_head_stride, v_head_stride, do_head_stride = head_strides
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, k_smem, v_smem, do_smem = smem
    own_full, own_free, full, free, turn = bars
    counter_ptr = table_ptr + COUNTER
    count = 0
    step = 0
    index, head, level, start, n, c, m = draw_block(counter_ptr, structure, RULE)
    tell(0, board, head, level, start, n, c, m)
    while n >= 0:
        index, next_head, next_level, next_start, next_n, next_c, next_m = draw_block(
            counter_ptr, structure, RULE
        )
        tell(step + 1, board, next_head, next_level, next_start, next_n, next_c, next_m)
        key0 = ((n + 127) // 128 - 1 - level) * 128
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            _rows_of_keys(key0, n, c, m, group_size, window, 64, 128, RULE)
        )
        num_masked = num_front + num_around + num_last
        mbarrier.wait(own_free, (step & 1) ^ 1)
        mbarrier.expect(own_full, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
        for group in gl.static_range(2):
            row = start + key0 + group * 64
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
            row = start + first_row(
                tile, num_masked, num_front, masked_start, num_around, full_start, last_start
            )
            tma.async_copy_global_to_shared(
                q_desc, [row, head * q_head_stride], full.index(stage), q_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                do_desc, [row, head * do_head_stride], full.index(stage), do_smem.index(stage)
            )
            count += 1
        head = next_head
        level = next_level
        start = next_start
        n = next_n
        c = next_c
        m = next_m
        step += 1
    put_back(counter_ptr, index, total)


@gluon.jit
def _consumer(
    outputs, group_size, window, board, smem, bars, GROUP: gl.constexpr, A: gl.constexpr,
    STAGES: gl.constexpr, SCALE_IS_POINTER: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    dk_ptr, dv_ptr, num_heads, scaling_seqlen, half_alpha = outputs
    q_smem, k_smem, v_smem, do_smem = smem
    own_full, own_free, full, free, turn = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    col_in_block = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    row_in_tile = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))[None, :]
    k = k_smem.index(GROUP)
    v = v_smem.index(GROUP)
    count = 0
    rounds = 0
    step = 0
    head, level, start, n, c, m = hear(0, board)
    while n >= 0:
        key0 = ((n + 127) // 128 - 1 - level) * 128
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            _rows_of_keys(key0, n, c, m, group_size, window, 64, 128, RULE)
        )
        num_masked = num_front + num_around + num_last
        tiles = num_masked + num_full
        mbarrier.wait(own_full, step & 1)
        dk = gl.zeros([64, A], gl.float32, o_layout)
        dv = gl.zeros([64, A], gl.float32, o_layout)
        row0 = first_row(0, num_masked, num_front, masked_start, num_around, full_start, last_start)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        if row0 + 64 > n:
            zero_rows_past(q_smem.index(stage), n - row0, 64)
            zero_rows_past(do_smem.index(stage), n - row0, 64)
        q_t = q_smem.index(stage).permute((1, 0))
        do_t = do_smem.index(stage).permute((1, 0))
        s = warpgroup_mma(k, q_t, zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, do_t, zero, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(num_outstanding=0, deps=(s, dp))
        h = s * half_alpha
        if num_masked > 0:
            row = row0 + row_in_tile
            col = key0 + col_in_block
            seen = seen_by_columns(row, col, n, c, m, group_size, window, RULE)
            h = hide(h, seen)
        p, slope = weights_and_slopes(h)
        ds = gl.convert_layout(times_slopes(dp, slope), p_layout)
        p = gl.convert_layout(p, p_layout)
        wait_for_tile(full, count + 1, tiles > 1, STAGES)
        for tile in range(1, tiles):
            row0 = first_row(
                tile, num_masked, num_front, masked_start, num_around, full_start, last_start
            )
            before = count % STAGES
            stage = (count + 1) % STAGES
            if row0 + 64 > n:
                zero_rows_past(q_smem.index(stage), n - row0, 64)
                zero_rows_past(do_smem.index(stage), n - row0, 64)
            mbarrier.wait(turn.index(GROUP), (rounds & 1) ^ (1 - GROUP))
            dv = warpgroup_mma(p, do_smem.index(before), dv, is_async=True)
            dk = warpgroup_mma(ds, q_smem.index(before), dk, is_async=True)
            dv, dk, p, ds = warpgroup_mma_wait(num_outstanding=0, deps=(dv, dk, p, ds))
            q_t = q_smem.index(stage).permute((1, 0))
            do_t = do_smem.index(stage).permute((1, 0))
            s = warpgroup_mma(k, q_t, zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do_t, zero, use_acc=False, is_async=True)
            mbarrier.arrive(turn.index(1 - GROUP), count=1)
            rounds += 1
            mbarrier.arrive(free.index(before), count=1)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            h = s * half_alpha
            if tile < num_masked:
                row = row0 + row_in_tile
                col = key0 + col_in_block
                seen = seen_by_columns(row, col, n, c, m, group_size, window, RULE)
                h = hide(h, seen)
            p, slope = weights_and_slopes(h)
            wait_for_tile(full, count + 2, tile + 1 < tiles, STAGES)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
            ds = gl.convert_layout(times_slopes(dp, slope), p_layout)
            p = gl.convert_layout(p, p_layout)
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
    STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
    RULE: gl.constexpr,
):
    """dK and dV (T, H, A), contiguous, of all blocks of 128 keys; zeros past the last offset."""
    end = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(dk_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    zero_tail(dv_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    total = gl.load(table_ptr) * num_heads
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 64, A], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 64, A], do_desc.layout)
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
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
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
                _consumer,
                (
                    outputs, group_size, window, board, smem, bars, 0, A, STAGES,
                    SCALE_IS_POINTER, RULE,
                ),
            ),
            (
                _consumer,
                (
                    outputs, group_size, window, board, smem, bars, 1, A, STAGES,
                    SCALE_IS_POINTER, RULE,
                ),
            ),
            (
                _producer,
                (descriptors, head_strides, structure, board, smem, bars, STAGES, RULE),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
