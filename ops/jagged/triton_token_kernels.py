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
    x = tl.load(grad_ptr + token[:, None] * grad_stride + col, mask=mask, other=0.0)
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
def _group_of(piece, offsets_ptr, num_groups, LANES: tl.constexpr):
    """The group of a history piece: how many groups end at or before it."""
    lane = tl.arange(0, LANES)
    ended = tl.full([LANES], 0, tl.int32)
    for first in range(0, num_groups, LANES):
        group = first + lane
        end = tl.load(offsets_ptr + 1 + group, mask=group < num_groups, other=0)
        ended += ((group < num_groups) & (end <= piece)).to(tl.int32)
    return axis_sum(ended, 0)


@triton.jit(
    do_not_specialize=[
        "num_users",
        "num_candidates",
        "num_groups",
        "candidate_pieces",
        "user_chunks",
        "max_contextuals",
        "history_rows",
    ],
    do_not_specialize_on_alignment=[
        "source_ptr",
        "seed_ptr",
        "starts_ptr",
        "contextuals_ptr",
        "candidate_token_ptr",
        "anchor_ptr",
        "history_ptr",
        "piece_offsets_ptr",
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
    piece_offsets_ptr,
    grad_stride,
    num_users,
    num_candidates,
    num_groups,
    candidate_pieces,
    user_chunks,
    max_contextuals,
    history_rows,
    SHARED_ROWS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    FROM_OLDEST: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Move the gradients of one piece and write their sum."""
    pid = tl.program_id(0)
    slot = pid - candidate_pieces
    piece = (slot - max_contextuals * user_chunks).to(tl.int64)
    is_history = piece >= 0
    # entry i of a piece is token tokens[i] + shift, where counts[i] > place
    place = piece * 0 - 1
    shift = piece * 0
    first_entry = pid * PIECE
    num_entries = num_candidates
    num_rows = pid * 0 + PIECE
    token_ptr = candidate_token_ptr
    count_ptr = candidate_token_ptr
    if is_history:
        group = pid * 0
        place = piece  # of one group; a place that no user reaches adds up to zero
        num_rows = tl.minimum(num_rows, GROUP)
        if not ONE_GROUP:
            group = _group_of(piece, piece_offsets_ptr, num_groups, 128)
            place = piece - tl.load(piece_offsets_ptr + group)
            num_rows = tl.where(group < num_groups, GROUP, 0)
        shift = -place
        if FROM_OLDEST:
            shift = place
        first_entry = group * GROUP
        num_entries = num_users
        token_ptr = anchor_ptr
        count_ptr = history_ptr
    elif slot >= 0:
        place = (slot // user_chunks).to(tl.int64)
        shift = place
        first_entry = (slot % user_chunks) * PIECE
        num_entries = num_users
        token_ptr = starts_ptr
        count_ptr = contextuals_ptr
    num_rows = tl.minimum(num_rows, num_entries - first_entry)
    row = tl.arange(0, ROWS)
    acc = tl.full([ROWS, COLS], 0.0, tl.float32)
    for first in range(0, num_rows, ROWS):
        entry = first_entry + first + row
        is_entry = entry < num_entries
        count = tl.load(count_ptr + entry, mask=is_entry, other=-1)
        is_token = is_entry & (count > place)
        token = tl.load(token_ptr + entry, mask=is_entry, other=0) + shift
        acc += _move(
            grad_ptr,
            source_ptr,
            moved_ptr,
            seed_ptr,
            grad_stride,
            token,
            is_token,
            D,
            ROWS,
            COLS,
            DROP_BELOW,
            SCALE,
        )
    col = tl.arange(0, COLS)
    total = axis_sum(acc, 0)
    is_partial = num_rows > 0
    if ONE_GROUP:
        is_whole = is_partial & is_history & (place < history_rows - SHARED_ROWS)
        target = table_ptr + (max_contextuals + 1 + place) * D + col
        tl.store(target, total.to(table_ptr.dtype.element_ty), mask=is_whole & (col < D))
        is_partial = is_partial & (is_whole == 0)
    tl.store(partial_ptr + pid.to(tl.int64) * D + col, total, mask=is_partial & (col < D))


@triton.jit
def _add_partials(partial_ptr, first, step, count, col, D: tl.constexpr, ROWS, COLS: tl.constexpr):
    """(ROWS, COLS) whose sum over rows is that of the partials first, first + step, ..."""
    row = tl.arange(0, ROWS)[:, None]
    acc = tl.full([ROWS, COLS], 0.0, tl.float32)
    for begin in range(0, count, ROWS):
        rows = partial_ptr + (first + (begin + row) * step) * D + col
        acc += tl.load(rows, mask=(begin + row < count) & (col < D), other=0.0)
    return acc


@triton.jit(
    do_not_specialize=[
        "num_groups",
        "candidate_pieces",
        "user_chunks",
        "max_contextuals",
        "history_rows",
    ],
    do_not_specialize_on_alignment=["piece_offsets_ptr"],
)
def table_kernel(
    partial_ptr,
    table_ptr,
    piece_offsets_ptr,
    num_groups,
    candidate_pieces,
    user_chunks,
    max_contextuals,
    history_rows,
    SHARED_ROWS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Add the partial rows of one row of the table, COLS of its columns."""
    target = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    place = target - max_contextuals - 1
    first_history = candidate_pieces.to(tl.int64) + max_contextuals * user_chunks
    acc = tl.full([ROWS, COLS], 0.0, tl.float32)
    is_written = target < 0
    if place < 0:
        first = candidate_pieces + target * user_chunks
        count = user_chunks
        if place == -1:
            first = target * 0
            count = candidate_pieces
        acc += _add_partials(partial_ptr, first, 1, count, col[None, :], D, ROWS, COLS)
    else:
        if place >= history_rows - SHARED_ROWS:
            if place < history_rows:
                for group in range(num_groups):
                    begin = tl.load(piece_offsets_ptr + group)
                    end = tl.load(piece_offsets_ptr + group + 1)
                    count = tl.maximum(end - begin - place + SHARED_ROWS - 1, 0) // SHARED_ROWS
                    first = first_history + begin + place
                    acc += _add_partials(
                        partial_ptr, first, SHARED_ROWS, count, col[None, :], D, ROWS, COLS
                    )
        else:
            row = tl.arange(0, ROWS)
            if ONE_GROUP:
                is_written = place < tl.load(piece_offsets_ptr + 1)
            else:
                for step in range(0, num_groups, ROWS):
                    group = step + row
                    begin = tl.load(piece_offsets_ptr + group, mask=group < num_groups, other=0)
                    end = tl.load(piece_offsets_ptr + group + 1, mask=group < num_groups, other=0)
                    has = (begin + place < end)[:, None] & (col < D)[None, :]
                    rows = partial_ptr + (first_history + begin + place)[:, None] * D + col[None, :]
                    acc += tl.load(rows, mask=has, other=0.0)
    total = axis_sum(acc, 0)
    is_stored = (col < D) & (is_written == 0)
    tl.store(table_ptr + target * D + col, total.to(table_ptr.dtype.element_ty), mask=is_stored)
