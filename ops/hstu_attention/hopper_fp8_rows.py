"""dQ of FP8 attention on Hopper in Gluon, head dims 64 and 128: every mask, no bias.

The walk is that of `hopper_rows`: a program owns 128 rows of one user and one head at a time, two
consumer warpgroups with 64 rows each take turns, keys go by, 64 at a time, k in both orientations.
A warpgroup's round, while the other one does its arithmetic:

    S_t = q k_t^T   dQ += dS_t-1 k_t-1   dP_t = dO v_t^T

Units, words beside a tile, FP16 arithmetic: `hopper_fp8_keys`, `hopper_fp8_backward`.
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

from ops.hstu_attention.hopper_fp8_backward import (
    as_words,
    columns_until,
    exponent_at,
    power,
    rows_until,
    slope_codes,
    slopes,
    times_power,
)
from ops.hstu_attention.hopper_fp8_kernels import (
    SCALE_ROWS,
    as_left_operand,
    draw_block,
    first_column,
    first_slot,
    hear,
    keys_of_rows,
    pick,
    seen_by_rows,
    tell,
)
from ops.hstu_attention.hopper_kernels import (
    first_key,
    hide,
    new_board,
    put_back,
    store_rows,
    wait_for_tile,
    zero_tail,
)
from ops.hstu_attention.triton_kernels import _inverse_scale
from ops.hstu_attention.triton_schedule import COUNTERS

BLOCK = 128
"""Rows of a block of the schedule."""
STAGES = 3
"""Of the tiles that go by."""
PLACES = gl.constexpr(2)
"""Of the tiles that a program owns: the next block's arrive while this one ends."""
KEYS = gl.constexpr(128)
"""Keys of such a tile."""
BOXES = {"q": 64, "k": 128, "v": 128, "do": 64, "kt": 128}
"""Rows of the boxes of a descriptor; columns of those of transposed codes."""
COUNTER = gl.constexpr(COUNTERS["rows"])


# ---- producer ------------------------------------------------------------------------------


@gluon.jit
def _unit(scales, slot0, head, num_heads, end, SCALED: gl.constexpr):
    """log2 of the largest factor s_v s_k of key blocks [0, end)."""
    _, k_scale_ptr, v_scale_ptr, _ = scales
    if SCALED:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        lane = gl.arange(0, 32, layout=layout)
        least = lane * 0 - 1000
        largest = least
        for block in range(0, end, 32):
            exists = block + lane < end
            place = (slot0 + block + lane) * num_heads + head
            e = exponent_at(k_scale_ptr, place, exists) + exponent_at(v_scale_ptr, place, exists)
            largest = gl.maximum(largest, gl.where(exists, e, least))
        return gl.max(largest, 0)
    else:
        return slot0 * 0


@gluon.jit
def _producer(
    descriptors, scales, factors, structure, board, smem, bars, A: gl.constexpr,
    STAGES: gl.constexpr, SCALED: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, kt_desc = descriptors
    q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr = scales
    half_alpha, slope_factor = factors
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, k_smem, v_smem, do_smem, kt_smem, words = smem
    own_full, own_free, full, free, turn = bars
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 4, layout=layout)
    tile_bytes: gl.constexpr = 3 * k_desc.block_type.nbytes
    counter_ptr = table_ptr + COUNTER
    count = 0
    step = 0
    index, head, level, start, n, c, m, user = draw_block(counter_ptr, structure, RULE)
    tell(0, board, head, level, start, n, c, m, user)
    while n >= 0:
        index, next_head, next_level, next_start, next_n, next_c, next_m, next_user = draw_block(
            counter_ptr, structure, RULE
        )
        tell(
            step + 1, board, next_head, next_level, next_start, next_n, next_c, next_m, next_user
        )  # fmt: skip
        row0 = level * 128
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = keys_of_rows(
            row0, n, c, m, group_size, window, 128, KEYS, RULE
        )
        num_masked = num_front + num_main + num_candidate
        slot0 = first_slot(start, user)
        column0 = first_column(start, user)
        place = (slot0 + level) * num_heads + head
        e_do = exponent_at(do_scale_ptr, place, True)
        e_q = level * 0
        if SCALED:
            e_q = exponent_at(q_scale_ptr, place, True)
        end_block = (n + 127) // 128
        if RULE.causal:
            if RULE.contextual_rows_see_all:
                end_block = gl.where(row0 < c, end_block, level + 1)
            else:
                end_block = level + 1
        unit = _unit(scales, slot0, head, num_heads, end_block, SCALED)
        own = step % PLACES
        mbarrier.wait(own_free.index(own), (step // PLACES & 1) ^ 1)
        mbarrier.expect(
            own_full.index(own), 2 * q_desc.block_type.nbytes + 2 * do_desc.block_type.nbytes
        )
        for group in gl.static_range(2):
            row = start + row0 + group * 64
            tma.async_copy_global_to_shared(
                q_desc, [row, head * A], own_full.index(own), q_smem.index(2 * own + group)
            )
            tma.async_copy_global_to_shared(
                do_desc, [row, head * A], own_full.index(own), do_smem.index(2 * own + group)
            )
        for tile in range(num_masked + num_full):
            stage = count % STAGES
            key0, _ = first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            e_k = key0 * 0
            e_v = key0 * 0
            if SCALED:
                place = (slot0 + key0 // SCALE_ROWS) * num_heads + head
                e_k = exponent_at(k_scale_ptr, place, True)
                e_v = exponent_at(v_scale_ptr, place, True)
            of_slope = slope_factor * (0.5 * power(e_v + e_k - unit))
            word = (half_alpha * power(e_q + e_k)).to(gl.int32, bitcast=True)
            word = gl.where(i == 1, of_slope.to(gl.int32, bitcast=True), word)
            word = gl.where(i == 2, unit + e_do, word)
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            words.index(stage).store(word)
            gl.thread_barrier()
            mbarrier.expect(full.index(stage), tile_bytes)
            tma.async_copy_global_to_shared(
                k_desc, [start + key0, head * A], full.index(stage), k_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                v_desc, [start + key0, head * A], full.index(stage), v_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                kt_desc, [head * A, column0 + key0], full.index(stage), kt_smem.index(stage)
            )
            count += 1
        head = next_head
        level = next_level
        start = next_start
        n = next_n
        c = next_c
        m = next_m
        user = next_user
        step += 1
    put_back(counter_ptr, index, total)


# ---- consumers -----------------------------------------------------------------------------


@gluon.jit
def _read(words, stage):
    """What the producer says of a tile: factors of scores, of dP, log2 of that of the sum."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = gl.arange(0, 4, layout=layout)
    word = words.index(stage).load(layout)
    of_scores = pick(word, i, 0).to(gl.float32, bitcast=True)
    of_slopes = pick(word, i, 1).to(gl.float32, bitcast=True)
    return of_scores, of_slopes, pick(word, i, 2)


@gluon.jit
def _slopes(
    s, row, col, end, c, m, group_size, window, is_masked, of_scores, RULE: gl.constexpr
):  # fmt: skip
    h = s * of_scores
    if is_masked:
        h = hide(h, seen_by_rows(row, col, end, c, m, group_size, window, RULE))
    return slopes(h, KEYS)


@gluon.jit
def _clear_tail(stage, num_valid, v_smem, kt_smem):
    """Zero what a tile holds past its user's end and reaches a sum."""
    v_words = as_words(v_smem.index(stage))
    kt_words = as_words(kt_smem.index(stage))
    v = rows_until(v_words, num_valid)
    kt = columns_until(kt_words, num_valid)
    v_words.store(v)
    kt_words.store(kt)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _store(base, stride, first, end, dq, q, do, A: gl.constexpr):
    """Store 64 rows of dQ by way of the places of q and dO, which have been read."""
    dtype: gl.constexpr = base.dtype.element_ty
    if A == 128:
        left, right = gl.split(dq.reshape(64, 2, 64).permute(0, 2, 1))
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        low = q._reinterpret(dtype, [64, 64], layout)
        high = do._reinterpret(dtype, [64, 64], layout)
        low.store(left.to(dtype))
        high.store(right.to(dtype))
        store_rows(base, stride, first, end, low, 64)
        store_rows(base + 64, stride, first, end, high, 64)
    else:
        left, right = gl.split(dq.reshape(64, 2, 32).permute(0, 2, 1))
        narrow: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
        low = q._reinterpret(dtype, [64, 32], narrow)
        high = do._reinterpret(dtype, [64, 32], narrow)
        low.store(left.to(dtype))
        high.store(right.to(dtype))
        store_rows(base, stride, first, end, low, 32)
        store_rows(base + 32, stride, first, end, high, 32)
    fence_async_shared()


@gluon.jit
def _consumer(
    outputs, group_size, window, board, smem, bars, GROUP: gl.constexpr, A: gl.constexpr,
    STAGES: gl.constexpr, SCALE_IS_POINTER: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    dq_ptr, num_heads, scaling_seqlen, alpha, slope_factor = outputs
    q_smem, k_smem, v_smem, do_smem, kt_smem, words = smem
    own_full, own_free, full, free, turn = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    zero = gl.zeros([64, KEYS], gl.float32, s_layout)
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
        tiles = num_masked + num_full
        row = row0 + row_in_block
        own = step % PLACES
        q = q_smem.index(2 * own + GROUP)
        do = do_smem.index(2 * own + GROUP)
        mbarrier.wait(own_full.index(own), step // PLACES & 1)
        dq = gl.zeros([64, A], gl.float32, o_layout)
        stage = count % STAGES
        key0, end = first_key(
            0, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
        )
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        if key0 + KEYS > n:
            _clear_tail(stage, n - key0, v_smem, kt_smem)
        k_t = k_smem.index(stage).permute((1, 0))
        s = warpgroup_mma(q, k_t, zero, use_acc=False, is_async=True)
        v_t = v_smem.index(stage).permute((1, 0))
        dp = warpgroup_mma(do, v_t, zero, use_acc=False, is_async=True)
        of_scores, of_slopes, unit = _read(words, stage)
        s, dp = warpgroup_mma_wait(num_outstanding=0, deps=(s, dp))
        slope_low, slope_high = _slopes(
            s, row, key0 + col_in_tile, end, c, m, group_size, window, num_masked > 0, of_scores,
            RULE,
        )  # fmt: skip
        ds = slope_codes(dp * of_slopes, slope_low, slope_high, KEYS)
        wait_for_tile(full, count + 1, tiles > 1, STAGES)
        for tile in range(1, tiles):
            key0, end = first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            before = count % STAGES
            stage = (count + 1) % STAGES
            if key0 + KEYS > n:
                _clear_tail(stage, n - key0, v_smem, kt_smem)
            of_scores, of_slopes, unit = _read(words, stage)
            ds_codes = as_left_operand(ds, 64, KEYS, p_layout)
            mbarrier.wait(turn.index(GROUP), (rounds & 1) ^ (1 - GROUP))
            k_t = k_smem.index(stage).permute((1, 0))
            s = warpgroup_mma(q, k_t, zero, use_acc=False, is_async=True)
            k = kt_smem.index(before).permute((1, 0))
            dq = warpgroup_mma(ds_codes, k, dq, is_async=True)
            v_t = v_smem.index(stage).permute((1, 0))
            dp = warpgroup_mma(do, v_t, zero, use_acc=False, is_async=True)
            mbarrier.arrive(turn.index(1 - GROUP), count=1)
            rounds += 1
            s = warpgroup_mma_wait(num_outstanding=2, deps=(s,))
            slope_low, slope_high = _slopes(
                s, row, key0 + col_in_tile, end, c, m, group_size, window, tile < num_masked,
                of_scores, RULE,
            )  # fmt: skip
            wait_for_tile(full, count + 2, tile + 1 < tiles, STAGES)
            dq, dp = warpgroup_mma_wait(num_outstanding=0, deps=(dq, dp))
            mbarrier.arrive(free.index(before), count=1)
            ds = slope_codes(dp * of_slopes, slope_low, slope_high, KEYS)
            count += 1
        stage = count % STAGES
        ds_codes = as_left_operand(ds, 64, KEYS, p_layout)
        k = kt_smem.index(stage).permute((1, 0))
        dq = warpgroup_mma(ds_codes, k, dq, is_async=True)
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
        mbarrier.arrive(free.index(stage), count=1)
        count += 1
        shift = start.to(gl.int64) * stride + head.to(gl.int64) * A
        of_dq = times_power(alpha / slope_factor * inverse_scale, unit)
        _store(dq_ptr + shift, stride, row0 + GROUP * 64, n, dq * of_dq, q, do, A)
        mbarrier.arrive(own_free.index(own), count=1)
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
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * PLACES, 64, A], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [2 * PLACES, 64, A], do_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KEYS, A], v_desc.layout)
    kt_smem = gl.allocate_shared_memory(kt_desc.dtype, [STAGES, A, KEYS], kt_desc.layout)
    words_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [STAGES, 4], words_layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], bar)
    own_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    for place in gl.static_range(PLACES):
        mbarrier.init(own_full.index(place), count=1)
        mbarrier.init(own_free.index(place), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    board = new_board()
    fence_async_shared()
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    )  # fmt: skip
    smem = (q_smem, k_smem, v_smem, do_smem, kt_smem, words)
    bars = (own_full, own_free, full, free, turn)
    outputs = (dq_ptr, num_heads, scaling_seqlen, alpha, slope_factor)
    descriptors = (q_desc, k_desc, v_desc, do_desc, kt_desc)
    scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr)
    factors = (0.5 * alpha, slope_factor)
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
                (
                    descriptors, scales, factors, structure, board, smem, bars, A, STAGES,
                    SCALED, RULE,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
