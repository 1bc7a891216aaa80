"""dQ from FP8 on Hopper in Gluon at head dim 256 (`hopper_fp8_kernels`): every mask.

A program owns 128 rows of one user and one head at a time: dQ of 64 rows in the registers of each
warpgroup, while keys go by, 128 at a time.

Turns and the ring (k, v and k^T of a tile) are those of `hopper_fp8_keys_wide`; sums are in FP32.
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
    keys_of_rows,
    seen_by_rows,
    tell,
    zero_columns_past,
)
from ops.hstu_attention.hopper_fp8_wide import (
    add_product,
    bring,
    gradient_words,
    halves,
    load_scale,
    slope_words,
    store_quarters,
    words_beside,
    zero_codes_past,
)
from ops.hstu_attention.hopper_kernels import (
    first_key,
    hide,
    new_board,
    nothing,
    put_back,
    zero_tail,
)
from ops.hstu_attention.triton_kernels import _inverse_scale
from ops.hstu_attention.triton_schedule import COUNTERS

COUNTER = gl.constexpr(COUNTERS["rows"])
BLOCK = 128
"""Rows of a block of the schedule."""
BOXES = {"q": 64, "k": 128, "v": 128, "do": 64, "kt": 128}
"""Rows (transposed: columns) of a box of a descriptor."""
STAGES = 5
"""Places of 32 KB in the ring."""
KEYS = gl.constexpr(128)


@gluon.jit
def _producer(
    descriptors, structure, board, smem, bars, A: gl.constexpr, STAGES: gl.constexpr,
    RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, kt_desc = descriptors
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, do_smem, ring = smem
    q_full, q_free, do_full, do_free, full, free, turn = bars
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
        row0 = level * 128
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = keys_of_rows(
            row0, n, c, m, group_size, window, 128, KEYS, RULE
        )
        num_masked = num_front + num_main + num_candidate
        col = head * A
        row = start + row0
        first = first_column(start, user)
        mbarrier.wait(q_free, (step & 1) ^ 1)
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [row, col], q_full, q_smem.index(0))
        tma.async_copy_global_to_shared(q_desc, [row + 64, col], q_full, q_smem.index(1))
        for tile in range(num_masked + num_full):
            key0, _ = first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            bring(k_desc, start + key0, col, ring, full, free, count, STAGES)
            if tile == 0:  # after k: the block before may still be stored through dO's place
                mbarrier.wait(do_free, (step & 1) ^ 1)
                mbarrier.expect(do_full, 2 * do_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(do_desc, [row, col], do_full, do_smem.index(0))
                tma.async_copy_global_to_shared(do_desc, [row + 64, col], do_full, do_smem.index(1))
            bring(v_desc, start + key0, col, ring, full, free, count + 1, STAGES)
            bring(kt_desc, col, first + key0, ring, full, free, count + 2, STAGES)
            count += 3
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
    A: gl.constexpr, STAGES: gl.constexpr, SCALE_IS_POINTER: gl.constexpr, SCALED: gl.constexpr,
    RULE: gl.constexpr,
):  # fmt: skip
    dq_ptr, num_heads, scaling_seqlen = outputs
    half_alpha, slope_factor = scalars
    q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr = scale_ptrs
    q_smem, do_smem, ring = smem
    q_full, q_free, do_full, do_free, full, free, turn = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    g_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    zero_s = gl.zeros([64, KEYS], gl.float32, s_layout)
    zero = gl.zeros([64, 64], gl.float32, g_layout)
    row_in_block = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    col_in_tile = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))[None, :]
    count = 0
    rounds = 0
    step = 0
    head, level, start, n, c, m, user = hear(0, board)
    while n >= 0:
        row0 = level * 128
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = keys_of_rows(
            row0, n, c, m, group_size, window, 128, KEYS, RULE
        )
        num_masked = num_front + num_main + num_candidate
        num_tiles = num_masked + num_full
        slot = first_slot(start, user)
        key0, end = first_key(
            0, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
        )
        total = half_alpha * inverse_scale * inverse_of_power(slope_factor)
        total *= load_scale(do_scale_ptr, slot, row0, head, num_heads, True)
        half = half_alpha
        k_scale = 1.0
        v_scale = 1.0
        if SCALED:
            half *= load_scale(q_scale_ptr, slot, row0, head, num_heads, True)
            k_scale = load_scale(k_scale_ptr, slot, key0, head, num_heads, True)
            v_scale = load_scale(v_scale_ptr, slot, key0, head, num_heads, True)
        mbarrier.wait(q_full, step & 1)
        dq = (zero, zero, zero, zero)
        mbarrier.wait(turn.index(GROUP), (rounds & 1) ^ (1 - GROUP))
        for tile in range(num_tiles):
            k_stage = count % STAGES
            v_stage = (count + 1) % STAGES
            t_stage = (count + 2) % STAGES
            q = q_smem.index(GROUP + nothing())
            do = do_smem.index(GROUP + nothing())
            k = ring.index(k_stage)
            v = ring.index(v_stage)
            k_t = ring.index(t_stage)._reinterpret(ring.dtype, [A, KEYS], ring.layout)
            tile_half = half * k_scale
            factor = v_scale * k_scale
            next_key0, next_end = first_key(
                tile + 1, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS,
                RULE,
            )  # fmt: skip
            if SCALED:
                exists = tile + 1 < num_tiles
                k_scale = load_scale(k_scale_ptr, slot, next_key0, head, num_heads, exists)
                v_scale = load_scale(v_scale_ptr, slot, next_key0, head, num_heads, exists)
            mbarrier.wait(full.index(k_stage), count // STAGES & 1)
            s = warpgroup_mma(q, k.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            mbarrier.arrive(turn.index(1 - GROUP), count=1)
            rounds += 1
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            mbarrier.arrive(free.index(k_stage), count=1)
            mbarrier.arrive(q_free, count=1, pred=tile + 1 == num_tiles)
            h = s * tile_half
            if tile < num_masked:
                row = row0 + row_in_block
                col = key0 + col_in_tile
                h = hide(h, seen_by_rows(row, col, end, c, m, group_size, window, RULE))
            h_low, h_high = halves(h, g_layout)
            slope = slope_words(h_low, 64, 64)
            mbarrier.wait(do_full, step & 1)
            mbarrier.wait(full.index(v_stage), (count + 1) // STAGES & 1)
            if key0 + KEYS > n:
                zero_codes_past(v, n - key0, KEYS)
            v_rows = v.slice(0, 64, dim=0).permute((1, 0))
            dp = warpgroup_mma(do, v_rows, zero, use_acc=False, is_async=True)
            # twice: the branches keep what is between them beside the product (`wait_for_tile`)
            mbarrier.wait(full.index(t_stage), (count + 2) // STAGES & 1)
            slope_high = slope_words(h_high, 64, 64)
            mbarrier.wait(full.index(t_stage), (count + 2) // STAGES & 1)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
            v_rows = v.slice(64, 64, dim=0).permute((1, 0))
            dp_high = warpgroup_mma(do, v_rows, zero, use_acc=False, is_async=True)
            ds = gradient_words(dp, slope, slope_factor, 64, 64)
            dp_high = warpgroup_mma_wait(num_outstanding=0, deps=(dp_high,))
            mbarrier.arrive(free.index(v_stage), count=1)
            ds_high = gradient_words(dp_high, slope_high, slope_factor, 64, 64)
            ds = words_beside(ds, ds_high)
            if key0 + KEYS > n:
                zero_columns_past(k_t, n - key0, A, KEYS)
            mbarrier.wait(turn.index(GROUP), (rounds & 1) ^ (1 - GROUP))
            dq = add_product(dq, ds, k_t, factor, zero, KEYS)
            mbarrier.arrive(free.index(t_stage), count=1)
            key0 = next_key0
            end = next_end
            count += 3
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
        rounds += 1
        base = start.to(gl.int64) * stride + head.to(gl.int64) * A
        do = do_smem.index(GROUP)  # this warpgroup alone reads it
        store_quarters(dq_ptr + base, stride, row0 + GROUP * 64, n, dq, total, do)
        fence_async_shared()
        mbarrier.arrive(do_free, count=1)
        step += 1
        head, level, start, n, c, m, user = hear(step, board)


@gluon.jit(do_not_specialize=["num_rows", "num_users", "num_heads", "group_size", "window"])
def rows_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    kt_desc,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    do_scale_ptr,
    dq_ptr,
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
    """dQ (T, H, A), contiguous, of all blocks of 128 rows; zeros past the last offset."""
    end = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(dq_ptr, num_heads * A, A, end, num_rows, num_heads, A)
    total = gl.load(table_ptr) * num_heads
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 64, A], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [2, 64, A], do_desc.layout)
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, A], k_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    do_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    do_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    mbarrier.init(do_full, count=1)
    mbarrier.init(do_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    board = new_board()
    fence_async_shared()
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    )  # fmt: skip
    smem = (q_smem, do_smem, ring)
    bars = (q_full, q_free, do_full, do_free, full, free, turn)
    outputs = (dq_ptr, num_heads, scaling_seqlen)
    scalars = (0.5 * alpha, 0.5 * slope_factor)  # of h, and of 2 silu'
    scale_ptrs = (q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr)
    descriptors = (q_desc, k_desc, v_desc, do_desc, kt_desc)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    outputs, scalars, scale_ptrs, group_size, window, board, smem, bars, 0, A,
                    STAGES, SCALE_IS_POINTER, SCALED, RULE,
                ),
            ),
            (
                _consumer,
                (
                    outputs, scalars, scale_ptrs, group_size, window, board, smem, bars, 1, A,
                    STAGES, SCALE_IS_POINTER, SCALED, RULE,
                ),
            ),
            (_producer, (descriptors, structure, board, smem, bars, A, STAGES, RULE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
