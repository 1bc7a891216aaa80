"""What the Gluon kernels for Hopper share: who owns which block, tails, tiles, descriptors.

A kernel is persistent, one program a multiprocessor. Its producer warp draws the next block of the
schedule (longest first) from a counter, tells the consumers through shared memory, and brings tiles
through TMA, while two consumer warpgroups compute, so that one's silu runs under the other's matrix
products. Drawing matters: blocks dealt out beforehand left a third of the device idle.

TMA does not know where a user ends. A tile that reaches past the end brings rows of the next user
or of the tail: as columns or rows of scores the mask drops them, as rows of a right operand they
are zeroed in shared memory first, for zero times NaN would be NaN.

Masks, tiles a block meets, notation and numerics: `triton_kernels`. Gluon has no interpreter; the
tested base is the plain kernels, whose results these must equal to the same bounds.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ops.hstu_attention.triton_kernels import _masked_tile, _visible
from ops.hstu_attention.triton_schedule import HEADER


@gluon.jit
def put_back(counter_ptr, index, total):
    """Reset the counter for the next launch: by the program that drew last of all.

    Each program stops at the first number past the end, so these are total, total + 1, ...
    """
    if index == total + gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)


@gluon.jit
def draw_block(counter_ptr, structure, RULE: gl.constexpr):
    """The number of the next block nobody owns yet, its head, level, start, n, c, m.

    n is -1 where there is none.
    """
    (
        offsets_ptr, contextuals_ptr, candidates_ptr, table_ptr, num_heads, total, group_size,
        window,
    ) = structure  # fmt: skip
    index = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    exists = index < total
    item = index // num_heads
    user = gl.load(table_ptr + HEADER + 2 * item, mask=exists, other=0)
    level = gl.load(table_ptr + HEADER + 2 * item + 1, mask=exists, other=0)
    start = gl.load(offsets_ptr + user, mask=exists, other=0).to(gl.int32)
    n = gl.load(offsets_ptr + user + 1, mask=exists, other=0).to(gl.int32) - start
    c = n * 0
    m = n
    if RULE.has_contextuals:
        c = gl.load(contextuals_ptr + user, mask=exists, other=0).to(gl.int32)
    if RULE.has_candidates:
        m = n - gl.load(candidates_ptr + user, mask=exists, other=0).to(gl.int32)
    return index, index % num_heads, level, start, gl.where(exists, n, -1), c, m


@gluon.jit
def tell(step, board, head, level, start, n, c, m):
    """The producer's word to the consumers: what block this step is; n < 0 ends the kernel."""
    words, told, heard = board
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    slot = step % 2
    mbarrier.wait(heard.index(slot), (step // 2 & 1) ^ 1)
    i = gl.arange(0, 8, layout=layout)
    word = gl.where(i == 0, head, gl.where(i == 1, level, gl.where(i == 2, start, n)))
    word = gl.where(i == 4, c, gl.where(i == 5, m, word))
    words.index(slot).store(word)
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def hear(step, board):
    """A consumer's side of `tell`: head, level, start, n, c, m, all int32."""
    words, told, heard = board
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    slot = step % 2
    mbarrier.wait(told.index(slot), step // 2 & 1)
    word = words.index(slot).load(layout)
    mbarrier.arrive(heard.index(slot), count=1)
    # every thread holds all eight words: these sums pick one, at no cost
    i = gl.arange(0, 8, layout=layout)
    zero = gl.zeros_like(word)
    head = gl.sum(gl.where(i == 0, word, zero), 0)
    level = gl.sum(gl.where(i == 1, word, zero), 0)
    start = gl.sum(gl.where(i == 2, word, zero), 0)
    n = gl.sum(gl.where(i == 3, word, zero), 0)
    c = gl.sum(gl.where(i == 4, word, zero), 0)
    m = gl.sum(gl.where(i == 5, word, zero), 0)
    return head, level, start, n, c, m


@gluon.jit
def new_board():
    """Shared memory of `tell` and `hear`."""
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    words = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for slot in gl.static_range(2):
        mbarrier.init(told.index(slot), count=1)
        mbarrier.init(heard.index(slot), count=2)
    return words, told, heard


@gluon.jit
def hide(h, seen):
    """Half scores with those of pairs that the mask hides so low that silu and its slope are 0."""
    return gl.where(seen, h, -64.0)


@gluon.jit
def weights_and_slopes(h):
    """silu(2 h) and 2 silu'(2 h) in BF16, two at a time.

    Rounded at once and volatile: as FP32 values that wait for a matrix product they would take
    registers that the arithmetic needs, and the compiler would move it all behind the wait.
    """
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 t0, t1, n0, n1, p0, p1, s0, s1;
            tanh.approx.f32 t0, $2;
            tanh.approx.f32 t1, $3;
            fma.rn.f32 p0, $2, t0, $2;
            fma.rn.f32 p1, $3, t1, $3;
            neg.f32 n0, t0;
            neg.f32 n1, t1;
            fma.rn.f32 n0, n0, t0, 0f3F800000;
            fma.rn.f32 n1, n1, t1, 0f3F800000;
            add.f32 s0, t0, 0f3F800000;
            add.f32 s1, t1, 0f3F800000;
            fma.rn.f32 s0, $2, n0, s0;
            fma.rn.f32 s1, $3, n1, s1;
            cvt.rn.bf16x2.f32 $0, p1, p0;
            cvt.rn.bf16x2.f32 $1, s1, s0;
        }""",
        "=r,=r,f,f",
        [h],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=2,
    )


@gluon.jit
def slopes(h):
    """The second half of `weights_and_slopes`."""
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 t0, t1, n0, n1, s0, s1;
            tanh.approx.f32 t0, $1;
            tanh.approx.f32 t1, $2;
            neg.f32 n0, t0;
            neg.f32 n1, t1;
            fma.rn.f32 n0, n0, t0, 0f3F800000;
            fma.rn.f32 n1, n1, t1, 0f3F800000;
            add.f32 s0, t0, 0f3F800000;
            add.f32 s1, t1, 0f3F800000;
            fma.rn.f32 s0, $1, n0, s0;
            fma.rn.f32 s1, $2, n1, s1;
            cvt.rn.bf16x2.f32 $0, s1, s0;
        }""",
        "=r,f,f",
        [h],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def times_slopes(dp, slope):
    """dp, rounded to BF16, times slope: the score gradients, two at a time."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 d; cvt.rn.bf16x2.f32 d, $2, $1; mul.rn.bf16x2 $0, d, $3; }",
        "=r,f,f,r",
        [dp, slope],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def first_key(
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
def seen_by_rows(row, col, end, c, m, group_size, window, RULE: gl.constexpr):
    """Whether rows (64, 1) see columns (1, KEYS) of a masked tile that ends at `end`.

    All but two comparisons are a row's, and a thread has two rows: `_visible` costs five times as
    much as the tile's products.
    """
    if RULE.causal and not RULE.has_window:
        last = row
        if RULE.contextual_rows_see_all:
            last = gl.where(row < c, m - 1, row)
        last = gl.minimum(last, end - 1)
        if RULE.has_candidates:
            own = m + (row - m) // group_size * group_size
            # tiles of main columns end at m, those of candidates at n
            first = gl.where(end > m, own, 0)
            return (col >= first) & (col <= last)
        else:
            return col <= last
    else:
        return _visible(row, col, c, m, group_size, window, RULE) & (col < end)


@gluon.jit
def seen_by_columns(row, col, n, c, m, group_size, window, RULE: gl.constexpr):
    """`seen_by_rows` for transposed tiles: rows (1, 64), columns (64, 1)."""
    if RULE.causal and not RULE.has_window:
        after = n
        if RULE.has_candidates:
            after = gl.minimum(n, m + ((col - m) // group_size + 1) * group_size)
            after = gl.where(col < m, n, after)
        seen = (row >= col) & (row < after)
        if RULE.contextual_rows_see_all:
            seen = seen | (row < gl.where(col < m, c, 0))
        return seen
    else:
        return _visible(row, col, c, m, group_size, window, RULE) & (row < n)


@gluon.jit
def wait_for_tile(full, count, exists, STAGES: gl.constexpr):
    """Wait for the tile that is the count-th of all.

    It stands between the arithmetic of a tile and the wait for a matrix product, as a fence for
    the compiler, which else moves the arithmetic behind the wait, where it overlaps nothing.
    """
    mbarrier.wait(full.index(count % STAGES), count // STAGES & 1, pred=exists)


@gluon.jit
def first_row(
    tile, num_masked, num_front, masked_start, num_around, full_start, last_start
):  # fmt: skip
    """First row of a tile that keys meet; masked ones come first: front, diagonal, last."""
    around = masked_start + (tile - num_front) * 64
    row0 = gl.where(tile < num_front, tile * 64, around)
    row0 = gl.where(tile >= num_front + num_around, last_start, row0)
    return gl.where(tile < num_masked, row0, full_start + (tile - num_masked) * 64)


@gluon.jit
def nothing():
    """Zero, but the compiler does not know.

    Added to the place of a tile in shared memory it keeps the addresses of all its pieces from
    being computed before the loop, where they would take more registers than there are.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def zero_rows_past(tile, num_valid, ROWS: gl.constexpr):
    """Zero the rows of a tile in shared memory from num_valid on, visibly to the tensor cores.

    Both warpgroups may do it to the same tile: they write the same.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))[:, None]
    for first in gl.static_range(0, ROWS, 8):  # few rows at a time: registers are full
        if first + 8 > num_valid:
            rows = tile.slice(first, 8, dim=0)
            values = rows.load(layout)
            rows.store(gl.where(first + row < num_valid, values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def zero_tail(out_ptr, stride, head_stride, first, num_rows, num_heads, WIDTH: gl.constexpr):
    """Zeros in the rows past the last offset, blocks of them dealt to the programs."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    blocks = ((num_rows - first + 63) // 64).to(gl.int32)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    zeros = gl.zeros([64, WIDTH], out_ptr.dtype.element_ty, layout)
    for index in range(gl.program_id(0), blocks * num_heads, gl.num_programs(0)):
        rows = first + (index // num_heads) * 64 + row
        base = out_ptr + (index % num_heads).to(gl.int64) * head_stride
        gl.store(base + rows[:, None] * stride + col, zeros, mask=(rows < num_rows)[:, None])


@gluon.jit
def store_rows(base, stride, first, end, tile, WIDTH: gl.constexpr):
    """Store a (GROUP_ROWS, WIDTH) tile in shared memory to rows [first, end), coalesced."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = tile.load(layout)
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(base + row.to(gl.int64)[:, None] * stride + col, values, mask=(row < end)[:, None])
