"""The forward kernel for Hopper in Gluon (`hopper_kernels`): every mask, no bias.

A program owns 128 rows of one user and one head at a time, 64 of them a warpgroup, which overlaps
the product P v of one tile of keys with the silu of the next:

    S_t = q k_t^T  |  O += P_t-1 v_t-1   ->   wait for S_t   ->   P_t = silu(S_t)   ->   wait for O

So k of one tile and v of the tile before are used together: they share a stage of the ring, which
starts a block with a stage of k alone and ends it with one of v alone. Masked tiles come first.
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
    _masked_tile,
    _tanh,
    _user_shape,
    _visible,
)
from ops.hstu_attention.triton_schedule import COUNTERS

COUNTER = gl.constexpr(COUNTERS["forward"])
USE_TURNS = True
# attention_dim = linear_dim: keys of a tile, stages of the ring
_TILES = {64: (128, 3), 128: (128, 3), 256: (64, 2)}


@gluon.jit
def _first_key(
    tile,
    num_masked,
    num_front,
    main_start,
    num_main,
    candidate_start,
    m,
    n,
    KEYS: gl.constexpr,
    RULE: gl.constexpr,
):
    """First key of a tile, and where its visible keys end; masked tiles come first."""
    first, end = _masked_tile(
        tile, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
    )
    is_masked = tile < num_masked
    return gl.where(is_masked, first, (tile - num_masked) * KEYS), gl.where(is_masked, end, n)


@gluon.jit
def _producer(
    descriptors, head_strides, structure, board, smem, bars, KEYS: gl.constexpr, STAGES: gl.constexpr,
    RULE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc = descriptors
    q_head_stride, k_head_stride, v_head_stride = head_strides
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_blocks, total, group_size,
        window,
    ) = structure  # fmt: skip
    q_smem, k_smem, v_smem = smem
    q_full, q_free, full, free, turn = bars
    counter_ptr = table_ptr + COUNTER
    count = 0
    step = 0
    index = draw(counter_ptr)
    while index < total:
        head, user, level = block_of_index(index, table_ptr, num_blocks)
        row0 = level * 128
        start, n, c, m = _user_shape(offsets_ptr, contextuals_ptr, candidates_ptr, user, RULE)
        tell(step, board, head, level, start.to(gl.int32), n, c, m)
        index = draw(counter_ptr)
        num_full, num_front, main_start, num_main, candidate_start, num_candidate = _keys_of_rows(
            row0, n, c, m, group_size, window, 128, KEYS, RULE
        )
        num_masked = num_front + num_main + num_candidate
        first = start.to(gl.int32)
        mbarrier.wait(q_free, (step & 1) ^ 1)
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        for group in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc,
                [first + row0 + group * 64, head * q_head_stride],
                q_full,
                q_smem.index(group),
            )
        tiles = num_masked + num_full
        before = first
        for tile in range(tiles + 1):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            both = (tile > 0) & (tile < tiles)
            nbytes: gl.constexpr = k_desc.block_type.nbytes
            vbytes: gl.constexpr = v_desc.block_type.nbytes
            mbarrier.expect(full.index(stage), nbytes + vbytes, pred=both)
            mbarrier.expect(full.index(stage), nbytes, pred=tile == 0)
            mbarrier.expect(full.index(stage), vbytes, pred=tile == tiles)
            key0, _ = _first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            tma.async_copy_global_to_shared(
                k_desc,
                [first + key0, head * k_head_stride],
                full.index(stage),
                k_smem.index(stage),
                pred=tile < tiles,
            )
            tma.async_copy_global_to_shared(
                v_desc,
                [before, head * v_head_stride],
                full.index(stage),
                v_smem.index(stage),
                pred=tile > 0,
            )
            before = first + key0
            count += 1
        step += 1
    tell(step, board, 0, 0, 0, -1, 0, 0)
    put_back(counter_ptr, index, total)


@gluon.jit
def _weights(s, half_alpha):
    """silu of the scores, without mask."""
    h = s * half_alpha
    return h + h * _tanh(h, True)


@gluon.jit
def _consumer(
    out_ptr, out_stride, out_head_stride, scaling_seqlen, half_alpha, group_size, window, board, smem, bars,
    GROUP: gl.constexpr, V: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SCALE_IS_POINTER: gl.constexpr, RULE: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    q_smem, k_smem, v_smem = smem
    q_full, q_free, full, free, turn = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    inverse_scale = _inverse_scale(scaling_seqlen, SCALE_IS_POINTER)
    q = q_smem.index(GROUP)
    s_zero = gl.zeros([64, KEYS], gl.float32, s_layout)
    row_in_block = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))[:, None]
    col_in_tile = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))[None, :]
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
        mbarrier.wait(q_full, step & 1)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        s = warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), s_zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(free.index(stage), count=1)
        key0, end = _first_key(
            0, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
        )
        p = _weights(s, half_alpha)
        if num_masked > 0:
            col = key0 + col_in_tile
            seen = _visible(row, col, c, m, group_size, window, RULE) & (col < end)
            p = gl.where(seen, p, 0.0)
        p = gl.convert_layout(p.to(dtype), p_layout)
        o = gl.zeros([64, V], gl.float32, o_layout)
        count += 1
        for tile in range(1, num_masked + num_full):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            if key0 + KEYS > n:
                zero_rows_past(v_smem.index(stage), n - key0, KEYS)
            if TURNS:
                mbarrier.wait(turn.index(GROUP), (rounds & 1) ^ (1 - GROUP))
            s = warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), s_zero, use_acc=False, is_async=True
            )
            o = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
            if TURNS:
                mbarrier.arrive(turn.index(1 - GROUP), count=1)
                rounds += 1
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            key0, end = _first_key(
                tile, num_masked, num_front, main_start, num_main, candidate_start, m, n, KEYS, RULE
            )
            p_next = _weights(s, half_alpha)
            if tile < num_masked:
                col = key0 + col_in_tile
                seen = _visible(row, col, c, m, group_size, window, RULE) & (col < end)
                p_next = gl.where(seen, p_next, 0.0)
            # p_next among them: else its work is moved behind the wait and overlaps nothing
            o, p, p_next = warpgroup_mma_wait(num_outstanding=0, deps=(o, p, p_next))
            mbarrier.arrive(free.index(stage), count=1)
            p = gl.convert_layout(p_next.to(dtype), p_layout)
            count += 1
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        if key0 + KEYS > n:
            zero_rows_past(v_smem.index(stage), n - key0, KEYS)
        o = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
        o, p = warpgroup_mma_wait(num_outstanding=0, deps=(o, p))
        mbarrier.arrive(free.index(stage), count=1)
        count += 1
        q.store((o * inverse_scale).to(dtype))  # q has been read, its place is free
        base = out_ptr + start.to(gl.int64) * out_stride + head.to(gl.int64) * out_head_stride
        store_rows(base, out_stride, row0 + GROUP * 64, n, q, V)
        fence_async_shared()
        mbarrier.arrive(q_free, count=1)
        step += 1
        head, level, start, n, c, m = hear(step, board)


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
    SCALE_IS_POINTER: gl.constexpr,
    RULE: gl.constexpr,
    TURNS: gl.constexpr,
):
    """O of all row blocks of BLOCK_ROWS rows, and the zeros past the last offset."""
    first = gl.load(offsets_ptr + num_users).to(gl.int64)
    zero_tail(out_ptr, out_stride, out_head_stride, first, num_rows, num_heads, V)
    num_blocks = gl.load(table_ptr)
    total = num_blocks * num_heads
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, A], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, A], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, V], v_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    board = new_board()
    fence_async_shared()
    half_alpha = 0.5 * alpha
    structure = (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_blocks, total, group_size,
        window,
    )  # fmt: skip
    smem = (q_smem, k_smem, v_smem)
    bars = (q_full, q_free, full, free, turn)
    descriptors = (q_desc, k_desc, v_desc)
    head_strides = (q_head_stride, k_head_stride, v_head_stride)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    out_ptr, out_stride, out_head_stride, scaling_seqlen, half_alpha, group_size,
                    window, board, smem, bars, 0, V, KEYS, STAGES, SCALE_IS_POINTER, RULE, TURNS,
                ),
            ),
            (
                _consumer,
                (
                    out_ptr, out_stride, out_head_stride, scaling_seqlen, half_alpha, group_size,
                    window, board, smem, bars, 1, V, KEYS, STAGES, SCALE_IS_POINTER, RULE, TURNS,
                ),
            ),
            (_producer, (descriptors, head_strides, structure, board, smem, bars, KEYS, STAGES, RULE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def can_forward(q: Tensor, v: Tensor, rule: Rule) -> bool:
    """Whether `launch_forward` takes such a call (strides aside)."""
    is_16_bit = q.dtype in (torch.bfloat16, torch.float16)
    has_bias = rule.has_position_bias or rule.has_time_bias
    fits = v.shape == q.shape and q.shape[2] in _TILES
    return fits and is_16_bit and not has_bias and is_hopper(q.device)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    batch: dict[str, Any],
    rule: Rule,
) -> bool:
    """Fill out (T, H, V); False when TMA cannot walk q, k or v and nothing was done.

    Args:
        batch: the structure of the batch, schedule of blocks of BLOCK_ROWS rows included.
    """
    num_rows, num_heads, width = q.shape
    keys, stages = _TILES[width]
    descriptors = [descriptor(x, rows) for x, rows in ((q, GROUP_ROWS), (k, keys), (v, keys))]
    if any(x is None for x in descriptors):
        return False
    forward_kernel[(num_multiprocessors(q.device),)](
        *descriptors,
        out,
        num_heads=num_heads,
        q_head_stride=q.stride(1),
        k_head_stride=k.stride(1),
        v_head_stride=v.stride(1),
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        A=width,
        V=width,
        KEYS=keys,
        STAGES=stages,
        SCALE_IS_POINTER=isinstance(batch["scaling_seqlen"], Tensor),
        RULE=rule,
        TURNS=USE_TURNS,
        num_warps=4,
        **batch,
    )
    return True
