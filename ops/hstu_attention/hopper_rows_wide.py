"""dQ on Hopper in Gluon at head dim 256: as `hopper_rows`, with less in shared memory.

Two stages of keys and one of values fit beside q and dO, so a tile's products are not computed
beside those of the tile before.
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
    first_key,
    hear,
    hide,
    new_board,
    nothing,
    put_back,
    seen_by_rows,
    slopes,
    store_rows,
    tell,
    times_slopes,
    zero_rows_past,
    zero_tail,
)
from ops.hstu_attention.triton_kernels import _inverse_scale, _keys_of_rows
from ops.hstu_attention.triton_schedule import COUNTERS

COUNTER = gl.constexpr(COUNTERS["rows"])


@gluon.jit
def _producer(
    descriptors, head_strides, structure, board, smem, bars, RULE: gl.constexpr
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc = descriptors
    q_head_stride, k_head_stride, v_head_stride, do_head_stride = head_strides
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, k_smem, v_smem, do_smem = smem
    own_full, own_free, k_full, k_free, v_full, v_free, turn = bars
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
        row0 = level * 128
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
            row0, n, c, m, group_size, window, 128, 64, RULE
        )
        num_masked = num_front + num_main + num_candidate
        first = start
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
            stage = count % 2
            key0, _ = first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, 64, RULE
            )
            mbarrier.wait(k_free.index(stage), (count // 2 & 1) ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc,
                [first + key0, head * k_head_stride],
                k_full.index(stage),
                k_smem.index(stage),
            )
            mbarrier.wait(v_free, (count & 1) ^ 1)
            mbarrier.expect(v_full, v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [first + key0, head * v_head_stride], v_full, v_smem.index(0)
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
    SCALE_IS_POINTER: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    dq_ptr, num_heads, scaling_seqlen, half_alpha = outputs
    q_smem, k_smem, v_smem, do_smem = smem
    own_full, own_free, k_full, k_free, v_full, v_free, turn = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    row_in_block = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    col_in_tile = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))[None, :]
    count = 0
    step = 0
    head, level, start, n, c, m = hear(0, board)
    while n >= 0:
        row0 = level * 128
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
            row0, n, c, m, group_size, window, 128, 64, RULE
        )
        num_masked = num_front + num_main + num_candidate
        mbarrier.wait(own_full, step & 1)
        dq = gl.zeros([64, A], gl.float32, o_layout)
        for tile in range(num_masked + num_full):
            key0, end = first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, 64, RULE
            )
            stage = count % 2
            k = k_smem.index(stage)
            q = q_smem.index(GROUP + nothing())
            do = do_smem.index(GROUP + nothing())
            v = v_smem.index(nothing())
            mbarrier.wait(k_full.index(stage), count // 2 & 1)
            mbarrier.wait(v_full, count & 1)
            if key0 + 64 > n:
                zero_rows_past(k, n - key0, 64)
                zero_rows_past(v, n - key0, 64)
            mbarrier.wait(turn.index(GROUP), (count & 1) ^ (1 - GROUP))
            s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.arrive(turn.index(1 - GROUP), count=1)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            h = s * half_alpha
            if tile < num_masked:
                col = key0 + col_in_tile
                row = row0 + row_in_block
                seen = seen_by_rows(row, col, end, c, m, group_size, window, RULE)
                h = hide(h, seen)
            slope = slopes(h)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
            mbarrier.arrive(v_free, count=1)
            ds = gl.convert_layout(times_slopes(dp, slope), p_layout)
            dq = warpgroup_mma(ds, k, dq, is_async=True)
            dq, ds = warpgroup_mma_wait(num_outstanding=0, deps=(dq, ds))
            mbarrier.arrive(k_free.index(stage), count=1)
            count += 1
        shift = start.to(gl.int64) * stride + head.to(gl.int64) * A
        q = q_smem.index(GROUP)
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
    SCALE_IS_POINTER: gl.constexpr,
    RULE: gl.constexpr,
):
    """dQ (T, H, A), contiguous, of all blocks of 128 rows; zeros past the last offset."""
    end = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(dq_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    total = gl.load(table_ptr) * num_heads
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, A], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [2, 64, A], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [2, 64, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 64, A], v_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    own_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    v_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_free = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(own_full, count=1)
    mbarrier.init(own_free, count=2)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_free, count=2)
    for slot in gl.static_range(2):
        mbarrier.init(turn.index(slot), count=1)
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=2)
    board = new_board()
    fence_async_shared()
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    )  # fmt: skip
    smem = (q_smem, k_smem, v_smem, do_smem)
    bars = (own_full, own_free, k_full, k_free, v_full, v_free, turn)
    outputs = (dq_ptr, num_heads, scaling_seqlen, 0.5 * alpha)
    descriptors = (q_desc, k_desc, v_desc, do_desc)
    head_strides = (q_head_stride, k_head_stride, v_head_stride, do_head_stride)
    gl.warp_specialize(
        [
            (
                _consumer,
                (outputs, group_size, window, board, smem, bars, 0, A, SCALE_IS_POINTER, RULE),
            ),
            (
                _consumer,
                (outputs, group_size, window, board, smem, bars, 1, A, SCALE_IS_POINTER, RULE),
            ),
            (_producer, (descriptors, head_strides, structure, board, smem, bars, RULE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
