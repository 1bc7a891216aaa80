"""dK and dV on Hopper in Gluon at head dim 256, where one gradient of a tile fills the registers.

A program owns 64 keys of one user and one head at a time. One warpgroup computes S^T and holds dV,
the other computes dP^T and holds dK; the slope of silu goes from the one to the other through
shared memory. Else as `hopper_keys`.
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
    q_smem, k_smem, v_smem, do_smem, slope_smem = smem
    own_full, own_free, full, free, slope_full, slope_free = bars
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
        key0 = ((n + 63) // 64 - 1 - level) * 64
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            _rows_of_keys(key0, n, c, m, group_size, window, 64, 64, RULE)
        )
        num_masked = num_front + num_around + num_last
        first = start
        mbarrier.wait(own_free, (step & 1) ^ 1)
        mbarrier.expect(own_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_desc, [first + key0, head * k_head_stride], own_full, k_smem
        )
        tma.async_copy_global_to_shared(
            v_desc, [first + key0, head * v_head_stride], own_full, v_smem
        )
        for tile in range(num_masked + num_full):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
            row = first + first_row(
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
def _weights_consumer(
    outputs, group_size, window, board, smem, bars, A: gl.constexpr, STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """S^T and dV."""
    dv_ptr, num_heads, scaling_seqlen, half_alpha = outputs
    q_smem, k_smem, v_smem, do_smem, slope_smem = smem
    own_full, own_free, full, free, slope_full, slope_free = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    col_in_block = gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    row_in_tile = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))[None, :]
    count = 0
    step = 0
    head, level, start, n, c, m = hear(0, board)
    while n >= 0:
        key0 = ((n + 63) // 64 - 1 - level) * 64
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            _rows_of_keys(key0, n, c, m, group_size, window, 64, 64, RULE)
        )
        num_masked = num_front + num_around + num_last
        mbarrier.wait(own_full, step & 1)
        dv = gl.zeros([64, A], gl.float32, o_layout)
        for tile in range(num_masked + num_full):
            row0 = first_row(
                tile, num_masked, num_front, masked_start, num_around, full_start, last_start
            )
            stage = count % STAGES
            q = q_smem.index(stage)
            do = do_smem.index(stage)
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            if row0 + 64 > n:
                zero_rows_past(q, n - row0, 64)
                zero_rows_past(do, n - row0, 64)
            s = warpgroup_mma(k_smem, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            h = s * half_alpha
            if tile < num_masked:
                row = row0 + row_in_tile
                col = key0 + col_in_block
                seen = seen_by_columns(row, col, n, c, m, group_size, window, RULE)
                h = hide(h, seen)
            p, slope = weights_and_slopes(h)
            slot = count % 2
            mbarrier.wait(slope_free.index(slot), (count // 2 & 1) ^ 1)
            slope_smem.index(slot).store(slope)
            mbarrier.arrive(slope_full.index(slot), count=1)
            p = gl.convert_layout(p, p_layout)
            dv = warpgroup_mma(p, do, dv, is_async=True)
            dv, p = warpgroup_mma_wait(num_outstanding=0, deps=(dv, p))
            mbarrier.arrive(free.index(stage), count=1)
            count += 1
        shift = start.to(gl.int64) * stride + head.to(gl.int64) * A
        k_smem.store((dv * inverse_scale).to(dtype))  # this warpgroup alone reads k
        store_rows(dv_ptr + shift, stride, key0, n, k_smem, A)
        fence_async_shared()
        mbarrier.arrive(own_free, count=1)
        step += 1
        head, level, start, n, c, m = hear(step, board)


@gluon.jit
def _slopes_consumer(
    outputs, group_size, window, board, smem, bars, A: gl.constexpr, STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """dP^T and dK."""
    dk_ptr, num_heads, scaling_seqlen, half_alpha = outputs
    q_smem, k_smem, v_smem, do_smem, slope_smem = smem
    own_full, own_free, full, free, slope_full, slope_free = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    count = 0
    step = 0
    head, level, start, n, c, m = hear(0, board)
    while n >= 0:
        key0 = ((n + 63) // 64 - 1 - level) * 64
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            _rows_of_keys(key0, n, c, m, group_size, window, 64, 64, RULE)
        )
        num_masked = num_front + num_around + num_last
        mbarrier.wait(own_full, step & 1)
        dk = gl.zeros([64, A], gl.float32, o_layout)
        for tile in range(num_masked + num_full):
            row0 = first_row(
                tile, num_masked, num_front, masked_start, num_around, full_start, last_start
            )
            stage = count % STAGES
            q = q_smem.index(stage)
            do = do_smem.index(stage)
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            if row0 + 64 > n:
                zero_rows_past(q, n - row0, 64)
                zero_rows_past(do, n - row0, 64)
            dp = warpgroup_mma(v_smem, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            slot = count % 2
            mbarrier.wait(slope_full.index(slot), count // 2 & 1)
            slope = slope_smem.index(slot).load(s_layout)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
            mbarrier.arrive(slope_free.index(slot), count=1)
            ds = gl.convert_layout(times_slopes(dp, slope), p_layout)
            dk = warpgroup_mma(ds, q, dk, is_async=True)
            dk, ds = warpgroup_mma_wait(num_outstanding=0, deps=(dk, ds))
            mbarrier.arrive(free.index(stage), count=1)
            count += 1
        shift = start.to(gl.int64) * stride + head.to(gl.int64) * A
        v_smem.store((dk * (half_alpha * inverse_scale)).to(dtype))  # nobody else reads v
        store_rows(dk_ptr + shift, stride, key0, n, v_smem, A)
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
    """dK and dV (T, H, A), contiguous, of all blocks of 64 keys; zeros past the last offset."""
    end = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(dk_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    zero_tail(dv_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    total = gl.load(table_ptr) * num_heads
    dtype: gl.constexpr = q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 64, A], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 64, A], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [64, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [64, A], v_desc.layout)
    slope_smem = gl.allocate_shared_memory(dtype, [2, 64, 64], s_layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    own_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    slope_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    slope_free = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(own_full, count=1)
    mbarrier.init(own_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for slot in gl.static_range(2):
        mbarrier.init(slope_full.index(slot), count=1)
        mbarrier.init(slope_free.index(slot), count=1)
    board = new_board()
    fence_async_shared()
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    )  # fmt: skip
    smem = (q_smem, k_smem, v_smem, do_smem, slope_smem)
    bars = (own_full, own_free, full, free, slope_full, slope_free)
    half_alpha = 0.5 * alpha
    descriptors = (q_desc, k_desc, v_desc, do_desc)
    head_strides = (q_head_stride, k_head_stride, v_head_stride, do_head_stride)
    gl.warp_specialize(
        [
            (
                _weights_consumer,
                (
                    (dv_ptr, num_heads, scaling_seqlen, half_alpha), group_size, window, board,
                    smem, bars, A, STAGES, SCALE_IS_POINTER, RULE,
                ),
            ),
            (
                _slopes_consumer,
                (
                    (dk_ptr, num_heads, scaling_seqlen, half_alpha), group_size, window, board,
                    smem, bars, A, STAGES, SCALE_IS_POINTER, RULE,
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
