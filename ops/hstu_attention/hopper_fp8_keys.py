"""dK and dV of FP8 attention on Hopper in Gluon, head dims 64 and 128: every mask, no bias.

The walk is that of `hopper_keys`: a program owns 128 keys of one user and one head at a time, two
consumer warpgroups have 64 keys each, rows go by, 64 at a time, each tile in both orientations.
A warpgroup's round, while the other one does its arithmetic (they find that order by themselves:
with turns, as there, it took 3% longer):

    S^T_t = k q_t^T   dV += P^T_t-1 dO_t-1   dK += dS^T_t-1 q_t-1   dP^T_t = v dO_t^T

Codes of P^T and dS^T are left operands straight from registers (`hopper_fp8_kernels`). Sums over
row blocks of different scales have one unit a key block, the largest that its rows bring: a tile's
share of it, a power of two up to 1, is put into P and dS before their cast, with what is a factor
there anyway, so it costs one multiplication of pairs. The producer finds the units and a tile's
factors and leaves them beside the tile.

Arithmetic: `hopper_fp8_backward`.
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
    exponent,
    exponent_at,
    power,
    power_pair,
    rows_until,
    slope_codes,
    times_power,
    weight_exponent,
    weights_and_slopes,
    weights_and_slopes_of_small,
)
from ops.hstu_attention.hopper_fp8_kernels import (
    SCALE_ROWS,
    as_left_operand,
    draw_block,
    first_column,
    first_slot,
    hear,
    in_fours,
    pick,
    rows_of_keys,
    tell,
)
from ops.hstu_attention.hopper_kernels import (
    first_row,
    hide,
    new_board,
    put_back,
    seen_by_columns,
    store_rows,
    wait_for_tile,
    zero_tail,
)
from ops.hstu_attention.triton_kernels import _inverse_scale
from ops.hstu_attention.triton_schedule import COUNTERS

BLOCK = 128
"""Keys of a block of the schedule."""
STAGES = 4
"""Of the tiles that go by."""
PLACES = gl.constexpr(2)
"""Of the tiles that a program owns: the next block's arrive while this one ends."""
ROWS = gl.constexpr(64)
"""Rows of such a tile."""
BOXES = {"q": 64, "k": 64, "v": 64, "do": 64, "qt": 64, "dot": 64}
"""Rows of the boxes of a descriptor; columns of those of transposed codes."""
COUNTER = gl.constexpr(COUNTERS["keys"])


# ---- producer ------------------------------------------------------------------------------


@gluon.jit
def _units(scales, slot0, head, num_heads, first, end, e_k, A: gl.constexpr, SCALED: gl.constexpr):
    """log2 of the largest factor of a product of dV and of one of dK, of row blocks [first, end).

    They are s_dO / w and s_dO s_q.
    """
    q_scale_ptr, _, _, do_scale_ptr, cast_exponent = scales
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, layout=layout)
    least = lane * 0 - 1000
    of_dv = least
    of_dk = least
    for block in range(first, end, 32):
        exists = block + lane < end
        place = (slot0 + block + lane) * num_heads + head
        e_do = exponent_at(do_scale_ptr, place, exists)
        e_q = e_do * 0
        if SCALED:
            e_q = exponent_at(q_scale_ptr, place, exists)
        e_w = weight_exponent(e_q, e_k, cast_exponent, A, SCALED)
        of_dv = gl.maximum(of_dv, gl.where(exists, e_do - e_w, least))
        of_dk = gl.maximum(of_dk, gl.where(exists, e_do + e_q, least))
    return gl.max(of_dv, 0), gl.max(of_dk, 0)


@gluon.jit
def _producer(
    descriptors, scales, factors, structure, board, smem, bars, A: gl.constexpr,
    STAGES: gl.constexpr, SCALED: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, qt_desc, dot_desc = descriptors
    q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr, cast_exponent = scales
    half_alpha, slope_factor = factors
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, k_smem, v_smem, do_smem, qt_smem, dot_smem, words = smem
    own_full, own_free, full, free = bars
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    i = gl.arange(0, 8, layout=layout)
    tile_bytes: gl.constexpr = 4 * q_desc.block_type.nbytes
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
        key_block = (n + 127) // 128 - 1 - level
        key0 = key_block * 128
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            rows_of_keys(key0, n, c, m, group_size, window, ROWS, 128, RULE)
        )
        num_masked = num_front + num_around + num_last
        slot0 = first_slot(start, user)
        column0 = first_column(start, user)
        e_k = key_block * 0
        e_v = key_block * 0
        if SCALED:
            place = (slot0 + key_block) * num_heads + head
            e_k = exponent(gl.load(k_scale_ptr + place))
            e_v = exponent(gl.load(v_scale_ptr + place))
        first_block = key_block * 0
        if RULE.causal:
            first_block = gl.where(num_front > 0, 0, key_block)
        unit_v, unit_k = _units(
            scales, slot0, head, num_heads, first_block, (n + 127) // 128, e_k, A, SCALED
        )
        own = step % PLACES
        mbarrier.wait(own_free.index(own), (step // PLACES & 1) ^ 1)
        mbarrier.expect(
            own_full.index(own), 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes
        )
        for group in gl.static_range(2):
            row = start + key0 + group * 64
            tma.async_copy_global_to_shared(
                k_desc, [row, head * A], own_full.index(own), k_smem.index(2 * own + group)
            )
            tma.async_copy_global_to_shared(
                v_desc, [row, head * A], own_full.index(own), v_smem.index(2 * own + group)
            )
        for tile in range(num_masked + num_full):
            stage = count % STAGES
            row = first_row(
                tile, num_masked, num_front, masked_start, num_around, full_start, last_start
            )
            place = (slot0 + row // SCALE_ROWS) * num_heads + head
            e_do = exponent_at(do_scale_ptr, place, True)
            e_q = e_do * 0
            if SCALED:
                e_q = exponent_at(q_scale_ptr, place, True)
            up = e_do - unit_v
            grown = gl.maximum(up, 0) if SCALED else up * 0
            of_slope = slope_factor * (0.5 * power(e_do + e_q - unit_k))
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            word = (half_alpha * power(e_q + e_k + grown)).to(gl.int32, bitcast=True)
            word = gl.where(i == 1, of_slope.to(gl.int32, bitcast=True), word)
            word = gl.where(i == 2, power_pair(up - grown), word)
            word = gl.where(i == 3, power_pair(-grown), word)
            word = gl.where(i == 4, unit_k + e_v, gl.where(i == 5, unit_v, word))
            words.index(stage).store(word)
            gl.thread_barrier()
            mbarrier.expect(full.index(stage), tile_bytes)
            tma.async_copy_global_to_shared(
                q_desc, [start + row, head * A], full.index(stage), q_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                do_desc, [start + row, head * A], full.index(stage), do_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                dot_desc, [head * A, column0 + row], full.index(stage), dot_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                qt_desc, [head * A, column0 + row], full.index(stage), qt_smem.index(stage)
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
    """What the producer says of a tile."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.arange(0, 8, layout=layout)
    word = words.index(stage).load(layout)
    of_scores = pick(word, i, 0).to(gl.float32, bitcast=True)
    of_slopes = pick(word, i, 1).to(gl.float32, bitcast=True)
    return of_scores, of_slopes, pick(word, i, 2), pick(word, i, 3)


@gluon.jit
def _read_units(words, stage):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.arange(0, 8, layout=layout)
    word = words.index(stage).load(layout)
    return pick(word, i, 4), pick(word, i, 5)


@gluon.jit
def _weights(s, seen_by, is_masked, factors, SCALED: gl.constexpr, RULE: gl.constexpr):
    """Codes of P^T and slopes of a tile."""
    of_scores, _, factor, shrink = factors
    h = s * of_scores
    if SCALED:
        if is_masked:
            row, col, n, c, m, group_size, window = seen_by
            seen = seen_by_columns(row, col, n, c, m, group_size, window, RULE)
            p, low, high = weights_and_slopes_of_small(gl.where(seen, h, 0.0), factor, shrink, ROWS)
            # shrunk, no number has slope 0
            seen0, seen1, seen2, seen3 = in_fours(gl.where(seen, -1, 0), 64, ROWS)
            low = low & ((seen0 & 0xFFFF) | (seen1 & -0x10000))
            high = high & ((seen2 & 0xFFFF) | (seen3 & -0x10000))
        else:
            p, low, high = weights_and_slopes_of_small(h, factor, shrink, ROWS)
        return p, low, high
    else:
        if is_masked:
            row, col, n, c, m, group_size, window = seen_by
            h = hide(h, seen_by_columns(row, col, n, c, m, group_size, window, RULE))
        return weights_and_slopes(h, factor, ROWS)


@gluon.jit
def _score_gradients(dp, low, high, factors):
    """Codes of dS^T of a tile."""
    _, of_slopes, _, _ = factors
    return slope_codes(dp * of_slopes, low, high, ROWS)


@gluon.jit
def _clear_tail(stage, num_valid, smem):
    """Zero what a tile holds past its user's end and reaches a sum, as `zero_rows_past` does.

    All is read before anything is written: a barrier between a read and a write costs more.
    """
    do_words = as_words(smem[3].index(stage))
    qt_words = as_words(smem[4].index(stage))
    dot_words = as_words(smem[5].index(stage))
    do = rows_until(do_words, num_valid)
    qt = columns_until(qt_words, num_valid)
    dot = columns_until(dot_words, num_valid)
    do_words.store(do)
    qt_words.store(qt)
    dot_words.store(dot)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _consumer(
    outputs, group_size, window, board, smem, bars, GROUP: gl.constexpr, A: gl.constexpr,
    STAGES: gl.constexpr, SCALE_IS_POINTER: gl.constexpr, SCALED: gl.constexpr,
    RULE: gl.constexpr,
):  # fmt: skip
    dk_ptr, dv_ptr, num_heads, scaling_seqlen, alpha, slope_factor, out_smem = outputs
    q_smem, k_smem, v_smem, do_smem, qt_smem, dot_smem, words = smem
    own_full, own_free, full, free = bars
    dtype: gl.constexpr = out_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    stride = num_heads * A
    zero = gl.zeros([64, ROWS], gl.float32, s_layout)
    col_in_block = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    row_in_tile = gl.arange(0, ROWS, layout=gl.SliceLayout(0, s_layout))[None, :]
    out = out_smem.index(GROUP)
    count = 0
    step = 0
    head, level, start, n, c, m, user = hear(0, board)
    while n >= 0:
        key0 = ((n + 127) // 128 - 1 - level) * 128
        num_front, masked_start, num_around, full_start, num_full, last_start, num_last = (
            rows_of_keys(key0, n, c, m, group_size, window, ROWS, 128, RULE)
        )
        num_masked = num_front + num_around + num_last
        tiles = num_masked + num_full
        own = step % PLACES
        k = k_smem.index(2 * own + GROUP)
        v = v_smem.index(2 * own + GROUP)
        mbarrier.wait(own_full.index(own), step // PLACES & 1)
        dk = gl.zeros([64, A], gl.float32, o_layout)
        dv = gl.zeros([64, A], gl.float32, o_layout)
        row0 = first_row(0, num_masked, num_front, masked_start, num_around, full_start, last_start)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        if row0 + ROWS > n:
            _clear_tail(stage, n - row0, smem)
        q_t = q_smem.index(stage).permute((1, 0))
        do_t = do_smem.index(stage).permute((1, 0))
        s = warpgroup_mma(k, q_t, zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, do_t, zero, use_acc=False, is_async=True)
        factors = _read(words, stage)
        s, dp = warpgroup_mma_wait(num_outstanding=0, deps=(s, dp))
        seen_by = (row0 + row_in_tile, key0 + col_in_block, n, c, m, group_size, window)
        p, low, high = _weights(s, seen_by, num_masked > 0, factors, SCALED, RULE)
        ds = _score_gradients(dp, low, high, factors)
        wait_for_tile(full, count + 1, tiles > 1, STAGES)
        for tile in range(1, tiles):
            row0 = first_row(
                tile, num_masked, num_front, masked_start, num_around, full_start, last_start
            )
            before = count % STAGES
            stage = (count + 1) % STAGES
            if row0 + ROWS > n:
                _clear_tail(stage, n - row0, smem)
            factors = _read(words, stage)
            p_codes = as_left_operand(p, 64, ROWS, p_layout)
            ds_codes = as_left_operand(ds, 64, ROWS, p_layout)
            q_t = q_smem.index(stage).permute((1, 0))
            s = warpgroup_mma(k, q_t, zero, use_acc=False, is_async=True)
            dv = warpgroup_mma(p_codes, dot_smem.index(before).permute((1, 0)), dv, is_async=True)
            dk = warpgroup_mma(ds_codes, qt_smem.index(before).permute((1, 0)), dk, is_async=True)
            do_t = do_smem.index(stage).permute((1, 0))
            dp = warpgroup_mma(v, do_t, zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=3, deps=(s,))
            seen_by = (row0 + row_in_tile, key0 + col_in_block, n, c, m, group_size, window)
            next_p, low, high = _weights(s, seen_by, tile < num_masked, factors, SCALED, RULE)
            wait_for_tile(full, count + 2, tile + 1 < tiles, STAGES)
            dv, dk, dp = warpgroup_mma_wait(num_outstanding=0, deps=(dv, dk, dp))
            mbarrier.arrive(free.index(before), count=1)
            p = next_p | (count >> 31)  # in registers of its own: see there
            ds = _score_gradients(dp, low, high, factors)
            count += 1
        mbarrier.arrive(own_free.index(own), count=1)
        stage = count % STAGES
        unit_k, unit_v = _read_units(words, stage)
        p_codes = as_left_operand(p, 64, ROWS, p_layout)
        ds_codes = as_left_operand(ds, 64, ROWS, p_layout)
        dv = warpgroup_mma(p_codes, dot_smem.index(stage).permute((1, 0)), dv, is_async=True)
        dk = warpgroup_mma(ds_codes, qt_smem.index(stage).permute((1, 0)), dk, is_async=True)
        dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=(dk, dv))
        mbarrier.arrive(free.index(stage), count=1)
        count += 1
        shift = start.to(gl.int64) * stride + head.to(gl.int64) * A
        first = key0 + GROUP * 64
        out.store((dv * times_power(inverse_scale, unit_v)).to(dtype))
        store_rows(dv_ptr + shift, stride, first, n, out, A)
        of_dk = times_power(alpha / slope_factor * inverse_scale, unit_k)
        out.store((dk * of_dk).to(dtype))
        store_rows(dk_ptr + shift, stride, first, n, out, A)
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
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, ROWS, A], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES, ROWS, A], do_desc.layout)
    qt_smem = gl.allocate_shared_memory(qt_desc.dtype, [STAGES, A, ROWS], qt_desc.layout)
    dot_smem = gl.allocate_shared_memory(dot_desc.dtype, [STAGES, A, ROWS], dot_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2 * PLACES, 64, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2 * PLACES, 64, A], v_desc.layout)
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    out_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    out_smem = gl.allocate_shared_memory(dtype, [2, 64, A], out_layout)
    words_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [STAGES, 8], words_layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], bar)
    own_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
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
    smem = (q_smem, k_smem, v_smem, do_smem, qt_smem, dot_smem, words)
    bars = (own_full, own_free, full, free)
    outputs = (dk_ptr, dv_ptr, num_heads, scaling_seqlen, alpha, slope_factor, out_smem)
    descriptors = (q_desc, k_desc, v_desc, do_desc, qt_desc, dot_desc)
    scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr, do_scale_ptr, exponent(weight_factor))
    factors = (0.5 * alpha, slope_factor)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    outputs, group_size, window, board, smem, bars, 0, A, STAGES,
                    SCALE_IS_POINTER, SCALED, RULE,
                ),
            ),
            (
                _consumer,
                (
                    outputs, group_size, window, board, smem, bars, 1, A, STAGES,
                    SCALE_IS_POINTER, SCALED, RULE,
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
