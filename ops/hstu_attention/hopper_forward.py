"""The forward kernel for Hopper in Gluon (`hopper_kernels`): every mask, no bias.

A program owns 128 rows of one user and one head at a time, 64 of them a warpgroup, which overlaps
the product P v of one tile of keys with the silu of the next:

    S_t = q k_t^T  |  O += P_t-1 v_t-1   ->   wait for S_t   ->   P_t = silu(S_t)   ->   wait for O

This goes on across blocks: the first scores of a block are computed beside the last product of the
block before, where q has two PLACES. So k of one tile and v of the tile before are used together
and share a stage of the ring. A program begins with the end of a block of no rows.
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
    put_back,
    seen_by_rows,
    store_rows,
    tell,
    wait_for_tile,
    zero_rows_past,
    zero_tail,
)
from ops.hstu_attention.triton_kernels import (
    _inverse_scale,
    _keys_of_rows,
    _tanh,
)
from ops.hstu_attention.triton_schedule import COUNTERS

COUNTER = gl.constexpr(COUNTERS["forward"])


@gluon.jit
def _producer(
    descriptors, head_strides, structure, board, smem, bars, KEYS: gl.constexpr,
    STAGES: gl.constexpr, PLACES: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc = descriptors
    q_head_stride, k_head_stride, v_head_stride = head_strides
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, k_smem, v_smem = smem
    q_full, q_free, full, free = bars
    k_bytes: gl.constexpr = k_desc.block_type.nbytes
    v_bytes: gl.constexpr = v_desc.block_type.nbytes
    counter_ptr = table_ptr + COUNTER
    count = 0
    step = 0
    v_row = 0
    v_column = 0
    index, head, level, start, n, c, m = draw_block(counter_ptr, structure, RULE)
    tell(0, board, head, level, start, n, c, m)
    while n >= 0:
        index, next_head, next_level, next_start, next_n, next_c, next_m = draw_block(
            counter_ptr, structure, RULE
        )
        tell(step + 1, board, next_head, next_level, next_start, next_n, next_c, next_m)
        row0 = level * 128
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
            row0, n, c, m, group_size, window, 128, KEYS, RULE
        )
        num_masked = num_front + num_main + num_candidate
        first = start
        for tile in range(num_masked + num_full):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), k_bytes + v_bytes, pred=count > 0)
            mbarrier.expect(full.index(stage), k_bytes, pred=count == 0)
            key0, _ = first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            tma.async_copy_global_to_shared(
                k_desc, [first + key0, head * k_head_stride], full.index(stage), k_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                v_desc, [v_row, v_column], full.index(stage), v_smem.index(stage), pred=count > 0
            )
            v_row = first + key0
            v_column = head * v_head_stride
            count += 1
            if tile == 0:
                # not before k: the consumers free a place of q after the product with this v
                slot = step % PLACES
                mbarrier.wait(q_free.index(slot), (step // PLACES & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), 2 * q_desc.block_type.nbytes)
                for group in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        q_desc,
                        [first + row0 + group * 64, head * q_head_stride],
                        q_full.index(slot),
                        q_smem.index(slot * 2 + group),
                    )
        head = next_head
        level = next_level
        start = next_start
        n = next_n
        c = next_c
        m = next_m
        step += 1
    stage = count % STAGES
    mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1, pred=count > 0)
    mbarrier.expect(full.index(stage), v_bytes, pred=count > 0)
    tma.async_copy_global_to_shared(
        v_desc, [v_row, v_column], full.index(stage), v_smem.index(stage), pred=count > 0
    )
    put_back(counter_ptr, index, total)


@gluon.jit
def _weights(h):
    """silu(2 h)."""
    return h + h * _tanh(h, True)


@gluon.jit
def _store(o, q, outputs, head, start, row0, n, V: gl.constexpr):
    """Store 64 rows of O by way of the place of q, which has been read."""
    out_ptr, out_stride, out_head_stride, _, _ = outputs
    q.store(o.to(q.dtype))
    base = out_ptr + start.to(gl.int64) * out_stride + head.to(gl.int64) * out_head_stride
    store_rows(base, out_stride, row0, n, q, V)
    fence_async_shared()


@gluon.jit
def _consumer(
    outputs, group_size, window, board, smem, bars, GROUP: gl.constexpr, V: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    out_ptr, out_stride, out_head_stride, scaling_seqlen, half_alpha = outputs
    q_smem, k_smem, v_smem = smem
    q_full, q_free, full, free = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    s_zero = gl.zeros([64, KEYS], gl.float32, s_layout)
    row_in_block = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    col_in_tile = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))[None, :]
    # the block of no rows
    head = gl.to_tensor(0)
    level = gl.to_tensor(0)
    start = gl.to_tensor(0)
    n = gl.to_tensor(0)
    c = gl.to_tensor(0)
    m = gl.to_tensor(0)
    key0 = gl.to_tensor(0)
    tiles = gl.to_tensor(1)
    num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
        n, n, c, m, group_size, window, 128, KEYS, RULE
    )
    num_masked = gl.to_tensor(0)
    p = gl.zeros([64, KEYS], dtype, p_layout)
    count = 0
    step = 0
    while n >= 0:
        row = level * 128 + row_in_block
        own = (step + 2 * PLACES - 1) % PLACES
        q = q_smem.index(own * 2 + GROUP)
        o = gl.zeros([64, V], gl.float32, o_layout)
        for tile in range(1, tiles):
            stage = count % STAGES
            if key0 + KEYS > n:
                zero_rows_past(v_smem.index(stage), n - key0, KEYS)
            s = warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), s_zero, use_acc=False, is_async=True
            )
            o = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            key0, end = first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            h = s * half_alpha
            if tile < num_masked:
                col = key0 + col_in_tile
                seen = seen_by_rows(row, col, end, c, m, group_size, window, RULE)
                h = hide(h, seen)
            p_next = _weights(h)
            wait_for_tile(full, count + 1, True, STAGES)
            # p_next among them: else its work is moved behind the wait and overlaps nothing
            o, p, p_next = warpgroup_mma_wait(num_outstanding=0, deps=(o, p, p_next))
            mbarrier.arrive(free.index(stage), count=1)
            p = gl.convert_layout(p_next.to(dtype), p_layout)
            count += 1

        next_head, next_level, next_start, next_n, next_c, next_m = hear(step, board)
        slot = step % PLACES
        stage = count % STAGES
        if count == 0:
            wait_for_tile(full, count, next_n >= 0, STAGES)
        if key0 + KEYS > n:
            zero_rows_past(v_smem.index(stage), n - key0, KEYS)
        if PLACES == 1:
            o = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
            o, p = warpgroup_mma_wait(num_outstanding=0, deps=(o, p))
            if n > 0:
                _store(o * inverse_scale, q, outputs, head, start, level * 128 + GROUP * 64, n, V)
                mbarrier.arrive(q_free.index(own), count=1)
        mbarrier.wait(q_full.index(slot), step // PLACES & 1, pred=next_n >= 0)
        # after the last block these scores are of whatever lies there, and nobody uses them
        s = warpgroup_mma(
            q_smem.index(slot * 2 + GROUP),
            k_smem.index(stage).permute((1, 0)),
            s_zero,
            use_acc=False,
            is_async=True,
        )
        if PLACES == 2:
            o = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        else:
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        row0 = next_level * 128
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
            row0, next_n, next_c, next_m, group_size, window, 128, KEYS, RULE
        )
        num_masked = num_front + num_main + num_candidate
        tiles = num_masked + num_full
        key0, end = first_key(
            0, num_masked, num_front, main_start, num_main, candidate_start, next_m, next_n, KEYS,
            RULE,
        )  # fmt: skip
        h = s * half_alpha
        if num_masked > 0:
            col = key0 + col_in_tile
            row = row0 + row_in_block
            seen = seen_by_rows(row, col, end, next_c, next_m, group_size, window, RULE)
            h = hide(h, seen)
        p_next = _weights(h)
        wait_for_tile(full, count + 1, next_n >= 0, STAGES)
        if PLACES == 2:
            o, p, p_next = warpgroup_mma_wait(num_outstanding=0, deps=(o, p, p_next))
            if n > 0:
                _store(o * inverse_scale, q, outputs, head, start, level * 128 + GROUP * 64, n, V)
                mbarrier.arrive(q_free.index(own), count=1)
        mbarrier.arrive(free.index(stage), count=1)
        count += 1
        p = gl.convert_layout(p_next.to(dtype), p_layout)
        head = next_head
        level = next_level
        start = next_start
        n = next_n
        c = next_c
        m = next_m
        step += 1


@gluon.jit(do_not_specialize=["num_rows", "num_users", "num_heads", "group_size", "window"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
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
    out_stride,
    out_head_stride,
    A: gl.constexpr,
    V: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    PLACES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
    RULE: gl.constexpr,
):
    """O of all blocks of 128 rows, and the zeros past the last offset."""
    first = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(out_ptr, out_stride, out_head_stride, first, num_rows, num_heads, V)
    total = gl.load(table_ptr) * num_heads
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2 * PLACES, 64, A], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, V], v_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for slot in gl.static_range(PLACES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_free.index(slot), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    board = new_board()
    fence_async_shared()
    outputs = (out_ptr, out_stride, out_head_stride, scaling_seqlen, 0.5 * alpha)
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    )  # fmt: skip
    smem = (q_smem, k_smem, v_smem)
    bars = (q_full, q_free, full, free)
    descriptors = (q_desc, k_desc, v_desc)
    head_strides = (q_head_stride, k_head_stride, v_head_stride)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    outputs, group_size, window, board, smem, bars, 0, V, KEYS, STAGES,
                    PLACES, SCALE_IS_POINTER, RULE,
                ),
            ),
            (
                _consumer,
                (
                    outputs, group_size, window, board, smem, bars, 1, V, KEYS, STAGES,
                    PLACES, SCALE_IS_POINTER, RULE,
                ),
            ),
            (
                _producer,
                (
                    descriptors, head_strides, structure, board, smem, bars, KEYS, STAGES, PLACES,
                    RULE,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
