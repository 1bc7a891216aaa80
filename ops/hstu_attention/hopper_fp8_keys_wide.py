"""dK and dV from FP8 on Hopper in Gluon at head dim 256 (`hopper_fp8_kernels`): every mask.

A program owns 128 keys of one user and one head at a time, 64 a warpgroup, while rows go by, 128 at
a time. Both gradients of 64 keys would fill a warpgroup's registers in FP32; they are kept in BF16,
two in a register. A tile's product goes into a fresh FP32 accumulator, a quarter of the head dim at
a time, and is added with the tile's scale: two roundings to BF16 for 128 rows. Beside those to E4M3
of P and dS they are small: simulated, the relative errors of dV and dK grow from .0418 and .0540 to
.0422 and .0543 with 2048 rows and from .0440 and .0537 to .0449 and .0546 with 8192. That is for
rows of dO that have no part in common. If they have one, dV's sums grow steadily, and past hundreds
of tiles stop growing: of .010 become .0115, .0130 and .0621 with 4096, 8192 and 32,768 rows. So
users of more than 8192 are for `hopper_fp8_keys_long`: a pass for each gradient, in FP32, computes
the scores once more and took 1.36 times as long. Half as many keys, as in `hopper_keys_wide`, would
want twice the bytes from the L2 cache, which FP8 does not leave the time for.

A warpgroup has the turn from there to its next scores; the other one's arithmetic runs under it.
Tiles of rows come through a ring of places of 32 KB, in the order of use: q, dO, dO^T, q^T.
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

from ops.hstu_attention.hopper_fp8_kernels import (
    draw_block,
    first_column,
    first_slot,
    hear,
    inverse_of_power,
    rows_of_keys,
    tell,
    weight_unit,
    zero_columns_past,
)
from ops.hstu_attention.hopper_fp8_wide import (
    add_to_pairs,
    bring,
    gradient_words,
    halves,
    load_scale,
    no_pairs,
    store_pairs,
    weight_and_slope_words,
    words_beside,
    zero_codes_past,
)
from ops.hstu_attention.hopper_kernels import (
    hide,
    new_board,
    nothing,
    put_back,
    seen_by_columns,
    zero_tail,
)
from ops.hstu_attention.triton_kernels import _inverse_scale
from ops.hstu_attention.triton_schedule import COUNTERS

COUNTER = gl.constexpr(COUNTERS["keys"])
BLOCK = 128
"""Rows of a block of the schedule."""
BOXES = {"q": 128, "k": 64, "v": 64, "do": 128, "qt": 128, "dot": 128}
"""Rows (transposed: columns) of a box of a descriptor."""
STAGES = 5
"""Places of 32 KB in the ring."""
ROWS = gl.constexpr(128)


@gluon.jit
def _first_row(
    tile, num_masked, num_front, masked_start, num_around, full_start, last_start
):  # fmt: skip
    """`hopper_kernels.first_row` of tiles of ROWS."""
    row0 = gl.where(tile < num_front, tile * ROWS, masked_start + (tile - num_front) * ROWS)
    row0 = gl.where(tile >= num_front + num_around, last_start, row0)
    return gl.where(tile < num_masked, row0, full_start + (tile - num_masked) * ROWS)


@gluon.jit
def _producer(
    descriptors, structure, board, smem, bars, A: gl.constexpr, STAGES: gl.constexpr,
    RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, qt_desc, dot_desc = descriptors
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    k_smem, v_smem, ring = smem
    k_full, k_free, v_full, v_free, full, free, turn = bars
    counter_ptr = table_ptr + COUNTER
    count = 0
    step = 0
    index, head, level, start, n, c, m, user = draw_block(counter_ptr, structure, RULE)
    tell(0, board, head, level, start, n, c, m, user)
    while n >= 0:
        index, next_head, next_level, next_start, next_n, next_c, next_m, next_user = draw_block(
            counter_ptr, structure, RULE
        )
        tell(step + 1, board, next_head, next_level, next_start, next_n, next_c, next_m, next_user)
        key0 = ((n + 127) // 128 - 1 - level) * 128
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            rows_of_keys(key0, n, c, m, group_size, window, ROWS, 128, RULE)
        )
        num_masked = num_front + num_around + num_last
        row = start + key0
        col = head * A
        first = first_column(start, user)
        mbarrier.wait(k_free, (step & 1) ^ 1)
        mbarrier.expect(k_full, 2 * k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row, col], k_full, k_smem.index(0))
        tma.async_copy_global_to_shared(k_desc, [row + 64, col], k_full, k_smem.index(1))
        for tile in range(num_masked + num_full):
            row0 = _first_row(
                tile, num_masked, num_front, masked_start, num_around, full_start, last_start
            )
            bring(q_desc, start + row0, col, ring, full, free, count, STAGES)
            if tile == 0:  # after q: the block before may still be stored through v's place
                mbarrier.wait(v_free, (step & 1) ^ 1)
                mbarrier.expect(v_full, 2 * v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(v_desc, [row, col], v_full, v_smem.index(0))
                tma.async_copy_global_to_shared(v_desc, [row + 64, col], v_full, v_smem.index(1))
            bring(do_desc, start + row0, col, ring, full, free, count + 1, STAGES)
            bring(dot_desc, col, first + row0, ring, full, free, count + 2, STAGES)
            bring(qt_desc, col, first + row0, ring, full, free, count + 3, STAGES)
            count += 4
        head = next_head
        level = next_level
        start = next_start
        n = next_n
        c = next_c
        m = next_m
        user = next_user
        step += 1
    put_back(counter_ptr, index, total)


@gluon.jit
def _consumer(
    outputs, scalars, scale_ptrs, group_size, window, board, smem, bars, GROUP: gl.constexpr,
    A: gl.constexpr, DO_DTYPE: gl.constexpr, STAGES: gl.constexpr, SCALE_IS_POINTER: gl.constexpr,
    SCALED: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    dk_ptr, dv_ptr, num_heads, scaling_seqlen = outputs
    half_alpha, weight_factor, slope_factor = scalars
    q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr = scale_ptrs
    k_smem, v_smem, ring = smem
    k_full, k_free, v_full, v_free, full, free, turn = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    g_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    col_in_block = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    row_in_tile = gl.arange(0, ROWS, layout=gl.SliceLayout(0, s_layout))[None, :]
    zero_s = gl.zeros([64, ROWS], gl.float32, s_layout)
    zero = gl.zeros([64, 64], gl.float32, g_layout)
    count = 0
    rounds = 0
    step = 0
    head, level, start, n, c, m, user = hear(0, board)
    while n >= 0:
        key0 = ((n + 127) // 128 - 1 - level) * 128
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            rows_of_keys(key0, n, c, m, group_size, window, ROWS, 128, RULE)
        )
        num_masked = num_front + num_around + num_last
        num_tiles = num_masked + num_full
        slot = first_slot(start, user)
        k_scale = 1.0
        q_scale = 1.0
        row0 = _first_row(
            0, num_masked, num_front, masked_start, num_around, full_start, last_start
        )
        do_scale = load_scale(do_scale_ptr, slot, row0, head, num_heads, True)
        if SCALED:
            k_scale = load_scale(k_scale_ptr, slot, key0, head, num_heads, True)
            q_scale = load_scale(q_scale_ptr, slot, row0, head, num_heads, True)
        dk = no_pairs(zero)
        dv = no_pairs(zero)
        mbarrier.wait(k_full, step & 1)
        mbarrier.wait(turn.index(GROUP), (rounds & 1) ^ (1 - GROUP))
        for tile in range(num_tiles):
            q_stage = count % STAGES
            do_stage = (count + 1) % STAGES
            dot_stage = (count + 2) % STAGES
            qt_stage = (count + 3) % STAGES
            k = k_smem.index(GROUP + nothing())
            v = v_smem.index(GROUP + nothing())
            q = ring.index(q_stage)
            do = ring.index(do_stage)._reinterpret(DO_DTYPE, [ROWS, A], ring.layout)
            mbarrier.wait(full.index(q_stage), count // STAGES & 1)
            s = warpgroup_mma(k, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            mbarrier.arrive(turn.index(1 - GROUP), count=1)
            rounds += 1
            unit = weight_unit(q_scale, k_scale, weight_factor, A, SCALED)
            half = half_alpha * (q_scale * k_scale)
            dk_factor = do_scale * q_scale
            dv_factor = do_scale * inverse_of_power(unit)
            next_row0 = _first_row(
                tile + 1, num_masked, num_front, masked_start, num_around, full_start, last_start
            )
            exists = tile + 1 < num_tiles
            do_scale = load_scale(do_scale_ptr, slot, next_row0, head, num_heads, exists)
            if SCALED:
                q_scale = load_scale(q_scale_ptr, slot, next_row0, head, num_heads, exists)
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            mbarrier.arrive(free.index(q_stage), count=1)
            mbarrier.arrive(k_free, count=1, pred=tile + 1 == num_tiles)
            h = s * half
            if tile < num_masked:
                row = row0 + row_in_tile
                col = key0 + col_in_block
                h = hide(h, seen_by_columns(row, col, n, c, m, group_size, window, RULE))
            h_low, h_high = halves(h, g_layout)
            p_low, slope = weight_and_slope_words(h_low, unit, 64, 64)
            mbarrier.wait(v_full, step & 1)
            mbarrier.wait(full.index(do_stage), (count + 1) // STAGES & 1)
            if row0 + ROWS > n:
                zero_codes_past(do, n - row0, ROWS)
            do_rows = do.slice(0, 64, dim=0).permute((1, 0))
            dp = warpgroup_mma(v, do_rows, zero, use_acc=False, is_async=True)
            # twice: the branches keep what is between them beside the product (`wait_for_tile`)
            mbarrier.wait(full.index(dot_stage), (count + 2) // STAGES & 1)
            p_high, slope_high = weight_and_slope_words(h_high, unit, 64, 64)
            mbarrier.wait(full.index(dot_stage), (count + 2) // STAGES & 1)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
            do_rows = do.slice(64, 64, dim=0).permute((1, 0))
            dp_high = warpgroup_mma(v, do_rows, zero, use_acc=False, is_async=True)
            ds = gradient_words(dp, slope, slope_factor, 64, 64)
            dp_high = warpgroup_mma_wait(num_outstanding=0, deps=(dp_high,))
            mbarrier.arrive(free.index(do_stage), count=1)
            ds = words_beside(ds, gradient_words(dp_high, slope_high, slope_factor, 64, 64))
            p = words_beside(p_low, p_high)
            do_t = ring.index(dot_stage)._reinterpret(DO_DTYPE, [A, ROWS], ring.layout)
            q_t = ring.index(qt_stage)._reinterpret(ring.dtype, [A, ROWS], ring.layout)
            mbarrier.wait(full.index(qt_stage), (count + 3) // STAGES & 1)
            if row0 + ROWS > n:
                zero_columns_past(do_t, n - row0, A, ROWS)
                zero_columns_past(q_t, n - row0, A, ROWS)
            mbarrier.wait(turn.index(GROUP), (rounds & 1) ^ (1 - GROUP))
            dv = add_to_pairs(dv, p, do_t, dv_factor, zero, ROWS)
            mbarrier.arrive(free.index(dot_stage), count=1)
            dk = add_to_pairs(dk, ds, q_t, dk_factor, zero, ROWS)
            mbarrier.arrive(free.index(qt_stage), count=1)
            row0 = next_row0
            count += 4
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
        rounds += 1
        base = start.to(gl.int64) * stride + head.to(gl.int64) * A
        first = key0 + GROUP * 64
        v = v_smem.index(GROUP)  # this warpgroup alone reads it
        store_pairs(dv_ptr + base, stride, first, n, dv, inverse_scale, v)
        factor = half_alpha * inverse_scale * inverse_of_power(slope_factor)
        if SCALED:
            factor *= load_scale(v_scale_ptr, slot, key0, head, num_heads, True)
        store_pairs(dk_ptr + base, stride, first, n, dk, factor, v)
        fence_async_shared()
        mbarrier.arrive(v_free, count=1)
        step += 1
        head, level, start, n, c, m, user = hear(step, board)


@gluon.jit(do_not_specialize=["num_rows", "num_users", "num_heads", "group_size", "window"])
def keys_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    qt_desc,
    dot_desc,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    do_scale_ptr,
    dk_ptr,
    dv_ptr,
    offsets_ptr,
    contextuals_ptr,
    candidates_ptr,
    table_ptr,
    scaling_seqlen,
    alpha,
    weight_factor,
    slope_factor,
    num_rows,
    num_users,
    num_heads,
    group_size,
    window,
    A: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
    SCALED: gl.constexpr,
    RULE: gl.constexpr,
):
    """dK and dV (T, H, A), contiguous, of all blocks of 128 keys; zeros past the last offset."""
    end = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(dk_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    zero_tail(dv_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    total = gl.load(table_ptr) * num_heads
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 64, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, 64, A], v_desc.layout)
    ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, ROWS, A], q_desc.layout)
    DO_DTYPE: gl.constexpr = do_desc.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    v_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    mbarrier.init(k_full, count=1)
    mbarrier.init(k_free, count=2)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    board = new_board()
    fence_async_shared()
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    )  # fmt: skip
    smem = (k_smem, v_smem, ring)
    bars = (k_full, k_free, v_full, v_free, full, free, turn)
    outputs = (dk_ptr, dv_ptr, num_heads, scaling_seqlen)
    scalars = (0.5 * alpha, weight_factor, 0.5 * slope_factor)  # of h, and of 2 silu'
    scale_ptrs = (q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr)
    descriptors = (q_desc, k_desc, v_desc, do_desc, qt_desc, dot_desc)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    outputs, scalars, scale_ptrs, group_size, window, board, smem, bars, 0, A,
                    DO_DTYPE, STAGES, SCALE_IS_POINTER, SCALED, RULE,
                ),
            ),
            (
                _consumer,
                (
                    outputs, scalars, scale_ptrs, group_size, window, board, smem, bars, 1, A,
                    DO_DTYPE, STAGES, SCALE_IS_POINTER, SCALED, RULE,
                ),
            ),
            (_producer, (descriptors, structure, board, smem, bars, A, STAGES, RULE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
