"""The Triton kernels of `embed_tokens`; `ops.jagged.triton_tokens` says how they share the work.

COLS is D up to a power of two, ROWS the rows that a program holds at a time.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import triton
import triton.language as tl

from ops.dropout.triton_mask import keep_mask
from ops.jagged.triton_rows import axis_sum


@triton.jit
def _dropped(
    x, seed_ptr, token, ROWS: tl.constexpr, COLS: tl.constexpr, DROP_BELOW: tl.constexpr, SCALE
):
    """x with elements zeroed, the others scaled: by token and column, so both ways alike."""
    kept = keep_mask(tl.load(seed_ptr), token, DROP_BELOW, ROWS, COLS)
    return tl.where(kept, x * SCALE, 0.0)


@triton.jit(
    do_not_specialize=["num_tokens", "num_contextual_rows", "num_item_rows"],
    do_not_specialize_on_alignment=["source_ptr", "position_ptr", "seed_ptr"],
)
def forward_kernel(
    contextual_ptr,
    item_ptr,
    action_ptr,
    table_ptr,
    source_ptr,
    position_ptr,
    seed_ptr,
    out_ptr,
    contextual_stride,
    item_stride,
    action_stride,
    table_stride,
    num_tokens,
    num_contextual_rows,
    num_item_rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write ROWS tokens."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    col = tl.arange(0, COLS)[None, :]
    mask = is_token[:, None] & (col < D)
    source = tl.load(source_ptr + token, mask=is_token, other=0)
    event = source - num_contextual_rows
    start = item_ptr + event * item_stride
    if action_ptr is not None:
        action = action_ptr + (event - num_item_rows) * action_stride
        start = tl.where(event >= num_item_rows, action, start)
    if contextual_ptr is not None:
        contextual = contextual_ptr + source * contextual_stride
        start = tl.where(event < 0, contextual, start)
    x = tl.load(start[:, None] + col, mask=mask, other=0.0).to(tl.float32)
    if table_ptr is not None:
        position = tl.load(position_ptr + token, mask=is_token, other=0)
        rows = table_ptr + position[:, None] * table_stride + col
        x += tl.load(rows, mask=mask, other=0.0).to(tl.float32)
    if seed_ptr is not None:
        x = _dropped(x, seed_ptr, token, ROWS, COLS, DROP_BELOW, SCALE)
    tl.store(out_ptr + token[:, None] * D + col, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _move(
    grad_ptr,
    source_ptr,
    moved_ptr,
    seed_ptr,
    grad_stride,
    token,
    is_token,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write the gradients of ROWS tokens to their source rows; return them in float32."""
    col = tl.arange(0, COLS)[None, :]
    mask = is_token[:, None] & (col < D)
    x = tl.load(grad_ptr + token[:, None].to(tl.int64) * grad_stride + col, mask=mask, other=0.0)
    source = tl.load(source_ptr + token, mask=is_token, other=0)
    x = x.to(tl.float32)
    if seed_ptr is not None:
        x = _dropped(x, seed_ptr, token, ROWS, COLS, DROP_BELOW, SCALE)
    tl.store(moved_ptr + source[:, None] * D + col, x.to(moved_ptr.dtype.element_ty), mask=mask)
    return x


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["source_ptr", "seed_ptr"],
)
def moves_kernel(
    grad_ptr,
    source_ptr,
    moved_ptr,
    seed_ptr,
    grad_stride,
    num_tokens,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Move the gradients of ROWS tokens; no position row asks for its own."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _move(
        grad_ptr,
        source_ptr,
        moved_ptr,
        seed_ptr,
        grad_stride,
        token,
        token < num_tokens,
        D,
        ROWS,
        COLS,
        DROP_BELOW,
        SCALE,
    )


@triton.jit
def _list_of(block, offsets_ptr, num_lists, LANES: tl.constexpr):
    """The list of a history block: how many lists end at or before it."""
    lane = tl.arange(0, LANES)
    ended = tl.full([LANES], 0, tl.int32)
    for first in range(0, num_lists, LANES):
        index = first + lane
        end = tl.load(offsets_ptr + 1 + index, mask=index < num_lists, other=0)
        ended += ((index < num_lists) & (end <= block)).to(tl.int32)
    return axis_sum(ended, 0)


@triton.jit(
    do_not_specialize=[
        "num_users",
        "num_candidates",
        "num_groups",
        "candidate_pieces",
        "user_chunks",
        "max_contextuals",
        "own_rows",
    ],
    do_not_specialize_on_alignment=[
        "source_ptr",
        "seed_ptr",
        "starts_ptr",
        "contextuals_ptr",
        "candidate_token_ptr",
        "anchor_ptr",
        "history_ptr",
        "block_offsets_ptr",
    ],
)
def pieces_kernel(
    grad_ptr,
    source_ptr,
    moved_ptr,
    seed_ptr,
    table_ptr,
    partial_ptr,
    starts_ptr,
    contextuals_ptr,
    candidate_token_ptr,
    anchor_ptr,
    history_ptr,
    block_offsets_ptr,
    grad_stride,
    num_users,
    num_candidates,
    num_groups,
    candidate_pieces,
    user_chunks,
    max_contextuals,
    own_rows,
    ONE_GROUP: tl.constexpr,
    FROM_OLDEST: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    MERGED: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Move the gradients of one piece and write its sums: MERGED rows, or one for each place."""
    pid = tl.program_id(0)
    slot = pid - candidate_pieces
    task = (slot - max_contextuals * user_chunks).to(tl.int64)
    is_history = task >= 0
    row = tl.arange(0, ROWS)
    # row r of a step is token tokens[entry] + shift + lane_shift, if counts[entry] > place
    entry_lane = row
    place_lane = row * 0
    lane_shift = row * 0
    step = pid * 0 + ROWS
    place = task * 0 - 1
    place_end = task * 0 + 2147483647
    shift = pid * 0
    first_entry = pid * PIECE
    num_entries = tl.minimum(PIECE, num_candidates - first_entry)
    partial = pid.to(tl.int64) * MERGED
    is_own = task < task
    is_written = pid >= 0
    token_ptr = candidate_token_ptr
    count_ptr = candidate_token_ptr
    if is_history:
        block = task // (BLOCK // PLACES)
        which = _list_of(block, block_offsets_ptr, 2 * num_groups, 32)
        is_written = which < 2 * num_groups
        is_own = which >= num_groups
        place = (block - tl.load(block_offsets_ptr + which)) * BLOCK
        place += task % (BLOCK // PLACES) * PLACES
        place_end = tl.where(is_own, own_rows, place_end)
        place = tl.where(is_own, place, place + own_rows)
        entry_lane = row // PLACES
        place_lane = row % PLACES
        lane_shift = place_lane
        shift = place.to(tl.int32)
        if not FROM_OLDEST:
            lane_shift = -place_lane
            shift = -shift
        step = pid * 0 + ROWS // PLACES
        first_entry = which % num_groups * GROUP
        partial = (pid - task).to(tl.int64) * MERGED + task * PLACES
        user = first_entry + tl.arange(0, GROUP)
        history = tl.load(history_ptr + user, mask=user < num_users, other=0)
        # longest first: those that reach the place come before those that do not
        num_entries = axis_sum(((history > place) & is_written).to(tl.int32), 0)
        token_ptr = anchor_ptr
        count_ptr = history_ptr
    elif slot >= 0:
        place = (slot // user_chunks).to(tl.int64)
        shift = place.to(tl.int32)
        first_entry = (slot % user_chunks) * PIECE
        num_entries = tl.minimum(PIECE, num_users - first_entry)
        token_ptr = starts_ptr
        count_ptr = contextuals_ptr
    acc = tl.full([ROWS, COLS], 0.0, tl.float32)
    for begin in tl.range(0, num_entries, step, num_stages=STAGES):
        lane = begin + entry_lane
        is_entry = lane < num_entries
        count = tl.load(count_ptr + first_entry + lane, mask=is_entry, other=-1)
        at = place + place_lane
        is_token = is_entry & (count > at) & (at < place_end)
        token = tl.load(token_ptr + first_entry + lane, mask=is_entry, other=0).to(tl.int32)
        acc += _move(
            grad_ptr,
            source_ptr,
            moved_ptr,
            seed_ptr,
            grad_stride,
            token + shift + lane_shift,
            is_token,
            D,
            ROWS,
            COLS,
            DROP_BELOW,
            SCALE,
        )
    col = tl.arange(0, COLS)[None, :]
    if is_own:
        sums = axis_sum(tl.reshape(acc, [ROWS // PLACES, PLACES, COLS]), 0)
        line = tl.arange(0, PLACES)[:, None]
        mask = is_written & (place + line < own_rows) & (col < D)
        if ONE_GROUP:
            target = table_ptr + (max_contextuals + 1 + place + line) * D + col
            tl.store(target, sums.to(table_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(partial_ptr + (partial + line) * D + col, sums, mask=mask)
    else:
        merged = axis_sum(tl.reshape(acc, [ROWS // MERGED, MERGED, COLS]), 0)
        parity = tl.arange(0, MERGED)[:, None]
        tl.store(partial_ptr + (partial + parity) * D + col, merged, mask=is_written & (col < D))


@triton.jit(
    do_not_specialize=[
        "num_groups",
        "candidate_pieces",
        "user_chunks",
        "max_contextuals",
        "own_rows",
        "num_long",
    ],
    do_not_specialize_on_alignment=["block_offsets_ptr"],
)
def table_kernel(
    partial_ptr,
    table_ptr,
    block_offsets_ptr,
    num_groups,
    candidate_pieces,
    user_chunks,
    max_contextuals,
    own_rows,
    num_long,
    SHARED_ROWS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    D: tl.constexpr,
    MERGED: tl.constexpr,
    SHARED_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    LONG_ROWS: tl.constexpr,
    LONG_COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    COLS: tl.constexpr,
):
    """Add partial rows: of a long sum some columns, or of PLACES history rows of the table."""
    pid = tl.program_id(0)
    long_chunks = (D + LONG_COLS - 1) // LONG_COLS
    first_history = (candidate_pieces + max_contextuals * user_chunks).to(tl.int64) * MERGED
    if pid < num_long * long_chunks:
        _add_long_sum(
            partial_ptr,
            table_ptr,
            block_offsets_ptr,
            pid // long_chunks,
            pid % long_chunks,
            first_history,
            num_groups,
            candidate_pieces,
            user_chunks,
            max_contextuals,
            own_rows,
            SHARED_ROWS,
            D,
            MERGED,
            SHARED_STEP,
            BLOCK,
            LONG_ROWS,
            LONG_COLS,
        )
    else:
        task = pid - num_long * long_chunks
        chunks = (D + COLS - 1) // COLS
        _add_groups(
            partial_ptr + first_history * D,
            table_ptr + (max_contextuals + 1) * D,
            block_offsets_ptr + num_groups,
            (task // chunks).to(tl.int64) * PLACES,
            task % chunks,
            num_groups,
            own_rows,
            ONE_GROUP,
            D,
            BLOCK,
            GROUPS,
            PLACES,
            COLS,
        )


@triton.jit
def _add_long_sum(
    partial_ptr,
    table_ptr,
    block_offsets_ptr,
    index,
    chunk,
    first_history,
    num_groups,
    candidate_pieces,
    user_chunks,
    max_contextuals,
    own_rows,
    SHARED_ROWS: tl.constexpr,
    D: tl.constexpr,
    MERGED: tl.constexpr,
    SHARED_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write COLS columns of a row of a contextual slot, of the candidates, or of shared places."""
    target = index.to(tl.int64)
    first = (candidate_pieces + target * user_chunks) * MERGED
    count = (user_chunks * MERGED).to(tl.int64)
    step = 1
    if target == max_contextuals:
        first = target * 0
        count = (candidate_pieces * MERGED).to(tl.int64)
    elif target > max_contextuals:
        shared = target - max_contextuals - 1
        first = first_history + shared
        count = tl.load(block_offsets_ptr + num_groups) * (BLOCK // SHARED_STEP)
        count = tl.where(shared < SHARED_ROWS, count, 0)
        step = SHARED_STEP
        target += own_rows
    row = tl.arange(0, ROWS)[:, None]
    col = chunk * COLS + tl.arange(0, COLS)
    acc = tl.full([ROWS, COLS], 0.0, tl.float32)
    for begin in range(0, count, ROWS):
        rows = partial_ptr + (first + (begin + row) * step) * D + col[None, :]
        acc += tl.load(rows, mask=(begin + row < count) & (col < D)[None, :], other=0.0)
    total = axis_sum(acc, 0).to(table_ptr.dtype.element_ty)
    tl.store(table_ptr + target * D + col, total, mask=col < D)


@triton.jit
def _add_groups(
    partial_ptr,
    table_ptr,
    offsets_ptr,
    first_place,
    chunk,
    num_groups,
    own_rows,
    ONE_GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write COLS columns of the rows of PLACES history places: GROUPS groups at a time."""
    place = first_place + tl.arange(0, PLACES)
    col = chunk * COLS + tl.arange(0, COLS)[None, :]
    mask = (place < own_rows)[:, None] & (col < D)
    target = table_ptr + place[:, None] * D + col
    if ONE_GROUP:
        # sums of the blocks that there are were whole, and went to the table
        num_whole = (tl.load(offsets_ptr + 1) - tl.load(offsets_ptr)) * BLOCK
        zero = tl.full([PLACES, COLS], 0.0, table_ptr.dtype.element_ty)
        tl.store(target, zero, mask=mask & (place >= num_whole)[:, None])
    else:
        lane = tl.arange(0, 32)
        reaching = tl.full([32], 0, tl.int32)
        for first in range(0, num_groups, 32):
            inside = first + lane < num_groups
            begin = tl.load(offsets_ptr + first + lane, mask=inside, other=0)
            end = tl.load(offsets_ptr + first + lane + 1, mask=inside, other=0)
            reaching += ((end - begin) * BLOCK > first_place).to(tl.int32)
        num_reaching = axis_sum(reaching, 0)  # the first ones: groups are sorted, too
        row = tl.arange(0, GROUPS * PLACES)
        at = first_place + row % PLACES
        acc = tl.full([GROUPS * PLACES, COLS], 0.0, tl.float32)
        for first in range(0, num_reaching, GROUPS):
            group = first + row // PLACES
            is_group = group < num_reaching
            start = tl.load(offsets_ptr + group, mask=is_group, other=0)
            stop = tl.load(offsets_ptr + group + 1, mask=is_group, other=0)
            reaches = is_group & ((stop - start) * BLOCK > at) & (at < own_rows)
            rows = partial_ptr + (start * BLOCK + at)[:, None] * D + col
            acc += tl.load(rows, mask=reaches[:, None] & (col < D), other=0.0)
        sums = axis_sum(tl.reshape(acc, [GROUPS, PLACES, COLS]), 0)
        tl.store(target, sums.to(table_ptr.dtype.element_ty), mask=mask)
