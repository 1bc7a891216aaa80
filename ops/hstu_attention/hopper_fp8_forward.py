"""The FP8 forward kernel for Hopper in Gluon (`hopper_fp8_kernels`): every mask, no bias.

As `hopper_forward`: a program owns 128 rows of one user and one head at a time, 64 of them a
warpgroup, which overlaps the product P v of one tile of keys with the silu of the next, across
blocks too:

    S_t = q k_t^T  |  R = P_t-1 v_t-1   ->   P_t = e4m3(w_t silu(S_t))   ->   O += f_t-1 R

The tensor cores add FP8 products up in some 14 bits, so a tile's product R has an accumulator of
its own and is added to O in FP32, times f = s_v / w. At head dim 256 that has no room: O consists
of PARTS, whose products take turns in two small accumulators. The producer makes of the scales what
the consumers need and hands it over with the tile.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type
# ruff: noqa: RUF005  Gluon knows no starred element of a tuple

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
    SCALE_ROWS,
    as_left_operand,
    draw_block,
    first_column,
    first_slot,
    hear,
    inverse_of_power,
    keys_of_rows,
    pick,
    seen_by_rows,
    tell,
    weight_unit,
    weight_words,
    zero_columns_past,
)
from ops.hstu_attention.hopper_kernels import (
    first_key,
    hide,
    new_board,
    nothing,
    put_back,
    store_rows,
    wait_for_tile,
    zero_tail,
)
from ops.hstu_attention.triton_kernels import _inverse_scale
from ops.hstu_attention.triton_schedule import COUNTERS

COUNTER = gl.constexpr(COUNTERS["forward"])


@gluon.jit
def _producer(
    descriptors, scales, structure, board, smem, bars, A: gl.constexpr, KEYS: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, SCALED: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, vt_desc = descriptors
    q_scale_ptr, k_scale_ptr, v_scale_ptr, half_alpha = scales
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, k_smem, vt_smem, factors, out_smem = smem
    q_full, q_free, full, free = bars
    k_bytes: gl.constexpr = k_desc.block_type.nbytes
    v_bytes: gl.constexpr = PARTS * vt_desc.block_type.nbytes
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    counter_ptr = table_ptr + COUNTER
    count = 0
    step = 0
    v_row = 0
    v_column = 0
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
        column = first_column(start, user)
        for tile in range(num_masked + num_full):
            stage = count % STAGES
            key0, _ = first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            if SCALED:
                slot = first_slot(start, user)
                q_scale = gl.load(q_scale_ptr + ((slot + level).to(gl.int64) * num_heads + head))
                at_keys = (slot + key0 // SCALE_ROWS).to(gl.int64) * num_heads + head
                k_scale = gl.load(k_scale_ptr + at_keys)
                v_scale = gl.load(v_scale_ptr + at_keys)
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                unit = weight_unit(q_scale, k_scale, 1.0, A, SCALED)
                i = gl.arange(0, 4, layout=layout)
                word = gl.where(i == 0, half_alpha * q_scale * k_scale, unit)
                word = gl.where(i == 2, v_scale * inverse_of_power(unit), word)
                factors.index(stage).store(word)
            else:
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), k_bytes + v_bytes, pred=count > 0)
            mbarrier.expect(full.index(stage), k_bytes, pred=count == 0)
            tma.async_copy_global_to_shared(
                k_desc, [start + key0, head * A], full.index(stage), k_smem.index(stage)
            )
            for part in gl.static_range(PARTS):
                tma.async_copy_global_to_shared(
                    vt_desc,
                    [v_row + part * (A // PARTS), v_column],
                    full.index(stage),
                    vt_smem.index(stage * PARTS + part),
                    pred=count > 0,
                )
            v_row = head * A
            v_column = column + key0
            count += 1
            if tile == 0:
                # not before k, as in `hopper_forward`
                place = step % 2
                mbarrier.wait(q_free.index(place), (step // 2 & 1) ^ 1)
                mbarrier.expect(q_full.index(place), 2 * q_desc.block_type.nbytes)
                for group in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        q_desc,
                        [start + row0 + group * 64, head * A],
                        q_full.index(place),
                        q_smem.index(place * 2 + group),
                    )
        head = next_head
        level = next_level
        start = next_start
        n = next_n
        c = next_c
        m = next_m
        user = next_user
        step += 1
    stage = count % STAGES
    mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1, pred=count > 0)
    mbarrier.expect(full.index(stage), v_bytes, pred=count > 0)
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(
            vt_desc,
            [v_row + part * (A // PARTS), v_column],
            full.index(stage),
            vt_smem.index(stage * PARTS + part),
            pred=count > 0,
        )
    put_back(counter_ptr, index, total)


@gluon.jit
def _tile_factors(factors, stage, half_alpha, weight_factor, SCALED: gl.constexpr):
    """Of a score its half, of a weight w, of the product f."""
    if SCALED:
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        word = factors.index(stage).load(layout)
        i = gl.arange(0, 4, layout=layout)
        return pick(word, i, 0), pick(word, i, 1), pick(word, i, 2)
    else:
        return half_alpha, weight_factor, inverse_of_power(weight_factor)


@gluon.jit
def _part(p, vt_smem, stage, part, zero, PARTS: gl.constexpr):
    """Begin the product of P and a part of v's columns."""
    v = vt_smem.index(stage * PARTS + part).permute((1, 0))
    return warpgroup_mma(p, v, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_product(
    o, product, factor, p, next_words, vt_smem, stage, zero, PARTS: gl.constexpr
):  # fmt: skip
    """Wait for the product just begun and for those of the further parts; O, and the next words."""
    sums = ()
    for part in gl.static_range(1, PARTS):
        following = _part(p, vt_smem, stage, part, zero, PARTS)
        product = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
        sums = sums + (o[part - 1] + product * factor,)
        product = following
    # the next words among them: else their making is moved behind the wait and overlaps nothing
    product, next_words = warpgroup_mma_wait(num_outstanding=0, deps=(product, next_words))
    return sums + (o[PARTS - 1] + product * factor,), next_words


@gluon.jit
def _zero_past(vt_smem, stage, num_valid, A: gl.constexpr, KEYS: gl.constexpr, PARTS: gl.constexpr):
    for part in gl.static_range(PARTS):
        zero_columns_past(
            vt_smem.index(stage * PARTS + part + nothing()), num_valid, A // PARTS, KEYS
        )


@gluon.jit
def _store(
    o, tile, outputs, inverse_scale, head, start, row0, n, A: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """Store 64 rows of O, a part after the other by way of shared memory."""
    out_ptr, out_stride, out_head_stride, _, _, _ = outputs
    base = out_ptr + start.to(gl.int64) * out_stride + head.to(gl.int64) * out_head_stride
    for part in gl.static_range(PARTS):
        tile.store((o[part] * inverse_scale).to(tile.dtype))
        store_rows(base + part * (A // PARTS), out_stride, row0, n, tile, A // PARTS)


@gluon.jit
def _consumer(
    outputs, group_size, window, board, smem, bars, GROUP: gl.constexpr, A: gl.constexpr,
    KEYS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr, SCALED: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    out_ptr, out_stride, out_head_stride, scaling_seqlen, half_alpha, weight_factor = outputs
    q_smem, k_smem, vt_smem, factors, out_smem = smem
    q_full, q_free, full, free = bars
    width: gl.constexpr = A // PARTS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4)
    s_zero = gl.zeros([64, KEYS], gl.float32, s_layout)
    o_zero = gl.zeros([64, width], gl.float32, o_layout)
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
    num_full, num_front, main_start, num_main, candidate_start, num_candidate = keys_of_rows(
        n, n, c, m, group_size, window, 128, KEYS, RULE
    )
    num_masked = gl.to_tensor(0)
    words = weight_words(s_zero, 1.0, 64, KEYS)
    factor = gl.to_tensor(0.0)
    count = 0
    step = 0
    while n >= 0:
        row = level * 128 + row_in_block
        q = q_smem.index((step + 1) % 2 * 2 + GROUP)
        o = (o_zero,) * PARTS
        for tile in range(1, tiles):
            stage = count % STAGES
            if key0 + KEYS > n:
                _zero_past(vt_smem, stage, n - key0, A, KEYS, PARTS)
            # in registers of its own: in those of `words` the next ones are made beside the
            # product, for which ptxas would let every product wait; it cannot know that
            # count >> 31 is 0
            p = as_left_operand(words | (count >> 31), 64, KEYS, p_layout)
            s = warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), s_zero, use_acc=False, is_async=True
            )
            product = _part(p, vt_smem, stage, 0, o_zero, PARTS)
            half, unit, next_factor = _tile_factors(
                factors, stage, half_alpha, weight_factor, SCALED
            )
            key0, end = first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            h = s * half
            if tile < num_masked:
                col = key0 + col_in_tile
                seen = seen_by_rows(row, col, end, c, m, group_size, window, RULE)
                h = hide(h, seen)
            next_words = weight_words(h, unit, 64, KEYS)
            wait_for_tile(full, count + 1, True, STAGES)
            o, words = _add_product(
                o, product, factor, p, next_words, vt_smem, stage, o_zero, PARTS
            )
            mbarrier.arrive(free.index(stage), count=1)
            factor = next_factor
            count += 1

        next_head, next_level, next_start, next_n, next_c, next_m, user = hear(step, board)
        stage = count % STAGES
        if count == 0:
            wait_for_tile(full, count, next_n >= 0, STAGES)
        if key0 + KEYS > n:
            _zero_past(vt_smem, stage, n - key0, A, KEYS, PARTS)
        mbarrier.wait(q_full.index(step % 2), step // 2 & 1, pred=next_n >= 0)
        p = as_left_operand(words | (count >> 31), 64, KEYS, p_layout)
        # after the last block these scores are of whatever lies there, and nobody uses them
        s = warpgroup_mma(
            q_smem.index(step % 2 * 2 + GROUP),
            k_smem.index(stage).permute((1, 0)),
            s_zero,
            use_acc=False,
            is_async=True,
        )
        product = _part(p, vt_smem, stage, 0, o_zero, PARTS)
        half, unit, next_factor = _tile_factors(factors, stage, half_alpha, weight_factor, SCALED)
        row0 = next_level * 128
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = keys_of_rows(
            row0, next_n, next_c, next_m, group_size, window, 128, KEYS, RULE
        )
        num_masked = num_front + num_main + num_candidate
        tiles = num_masked + num_full
        key0, end = first_key(
            0, num_masked, num_front, main_start, num_main, candidate_start, next_m, next_n, KEYS,
            RULE,
        )  # fmt: skip
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        h = s * half
        if num_masked > 0:
            col = key0 + col_in_tile
            row = row0 + row_in_block
            seen = seen_by_rows(row, col, end, next_c, next_m, group_size, window, RULE)
            h = hide(h, seen)
        next_words = weight_words(h, unit, 64, KEYS)
        wait_for_tile(full, count + 1, next_n >= 0, STAGES)
        o, words = _add_product(o, product, factor, p, next_words, vt_smem, stage, o_zero, PARTS)
        mbarrier.arrive(free.index(stage), count=1)
        # of the block of no rows nothing is stored
        _store(
            o, out_smem.index(GROUP + nothing()), outputs, inverse_scale, head, start,
            level * 128 + GROUP * 64, n, A, PARTS,
        )  # fmt: skip
        mbarrier.arrive(q_free.index((step + 1) % 2), count=1, pred=n > 0)
        count += 1
        factor = next_factor
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
    vt_desc,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    offsets_ptr,
    contextuals_ptr,
    candidates_ptr,
    table_ptr,
    scaling_seqlen,
    alpha,
    weight_factor,
    num_rows,
    num_users,
    num_heads,
    group_size,
    window,
    out_stride,
    out_head_stride,
    A: gl.constexpr,
    KEYS: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr,
    SCALED: gl.constexpr,
    RULE: gl.constexpr,
):
    """O of all blocks of 128 rows, and the zeros past the last offset.

    q_desc and k_desc: codes (T, H A) in boxes of 64 and of KEYS rows and A columns; vt_desc:
    transposed codes (H A, columns) in boxes of A / PARTS rows and KEYS columns.
    """
    first = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(out_ptr, out_stride, out_head_stride, first, num_rows, num_heads, A)
    total = gl.load(table_ptr) * num_heads
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [4, 64, A], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, A], k_desc.layout)
    vt_smem = gl.allocate_shared_memory(
        vt_desc.dtype, [STAGES * PARTS, A // PARTS, KEYS], vt_desc.layout
    )
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, A // PARTS], out_dtype)
    out_smem = gl.allocate_shared_memory(out_dtype, [2, 64, A // PARTS], out_layout)
    factors = gl.allocate_shared_memory(
        gl.float32, [STAGES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for place in gl.static_range(2):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(q_free.index(place), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    board = new_board()
    fence_async_shared()
    outputs = (out_ptr, out_stride, out_head_stride, scaling_seqlen, 0.5 * alpha, weight_factor)
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    )  # fmt: skip
    smem = (q_smem, k_smem, vt_smem, factors, out_smem)
    bars = (q_full, q_free, full, free)
    descriptors = (q_desc, k_desc, vt_desc)
    scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr, 0.5 * alpha)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    outputs, group_size, window, board, smem, bars, 0, A, KEYS, PARTS, STAGES,
                    SCALE_IS_POINTER, SCALED, RULE,
                ),
            ),
            (
                _consumer,
                (
                    outputs, group_size, window, board, smem, bars, 1, A, KEYS, PARTS, STAGES,
                    SCALE_IS_POINTER, SCALED, RULE,
                ),
            ),
            (
                _producer,
                (
                    descriptors, scales, structure, board, smem, bars, A, KEYS, PARTS, STAGES,
                    SCALED, RULE,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
