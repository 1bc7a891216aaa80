"""A batch's token order in two launches: one over users, one over tokens.

    users_kernel    offsets by user, each program summing all users before its own (no program waits
                    for another); users sorted by history length, by counting who comes first
    tokens_kernel   per token a binary search for its user, then everything that a token, an event
                    or a candidate has to know; one more program lists the blocks of the groups

The host reads nothing. Counts that contradict each other stop the device with an assertion, and
what they would write out of bounds is left out.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.jagged.layout import BLOCK_PLACES, GROUP_USERS, Counts, HistoryGroups, TokenLayout
from ops.jagged.triton_rows import axis_sum, running_sum
from ops.position import PositionRule

_USERS = 32
_STEP = 128
_TOKENS = 256


def token_layout(
    counts: Counts, *, timestamps_E: Tensor | None, positions: PositionRule | None
) -> TokenLayout:
    """Return what `ops.jagged.build_token_layout` describes; lengths are int64 and contiguous."""
    num_users, num_tokens = counts.lengths_B.numel(), counts.num_tokens
    device = counts.lengths_B.device
    starts = torch.empty(4, num_users + 1, dtype=torch.int64, device=device)
    groups = None if positions is None else _empty_groups(counts, positions)
    _launch_users(counts, starts, groups, positions)
    sizes = [num_tokens] * 3 + [counts.num_item_rows] + [counts.num_candidate_rows] * 2
    sizes += [num_tokens if x is not None else 0 for x in (positions, timestamps_E)]
    out = _lists(sizes, device)
    source_T, token_T, event_T, item_tokens_E, candidate_events_C, candidate_tokens_C = out[:6]
    _launch_tokens(counts, starts, out, timestamps_E, positions, groups)
    return TokenLayout(
        seq_offsets_B1=starts[0],
        num_contextuals_B=counts.contextuals_B,
        num_candidates_B=counts.candidates_B,
        source_T=source_T,
        token_T=token_T,
        event_T=event_T,
        candidate_events_C=candidate_events_C,
        item_tokens_E=item_tokens_E,
        candidate_tokens_C=candidate_tokens_C,
        num_contextual_rows=counts.num_contextual_rows,
        num_item_rows=counts.num_item_rows,
        num_action_rows=counts.num_action_rows,
        timestamps_T=None if timestamps_E is None else out[7],
        positions=positions,
        position_T=None if positions is None else out[6],
        history_groups=groups,
    )


def _lists(sizes: list[int], device: torch.device) -> list[Tensor]:
    """Uninitialised int64 lists in one allocation, each 128-byte aligned: Triton compiles a kernel
    again for a pointer that is aligned otherwise."""
    cuts = [cut for size in sizes for cut in (size, -size % 16)]
    return list(torch.empty(sum(cuts), dtype=torch.int64, device=device).split(cuts)[::2])


def _empty_groups(counts: Counts, positions: PositionRule) -> HistoryGroups:
    """Groups whose tensors the kernels fill.

    A group is as long as its first user, who is no longer than any of the group before: all groups
    together reach max_seq_len + history tokens / GROUP_USERS places at most. Each of the two lists
    of a group may end in a block that is not full.
    """
    num_users = counts.lengths_B.numel()
    num_groups = triton.cdiv(num_users, GROUP_USERS)
    sizes = [num_users, num_users, 2 * num_groups + 1]
    anchor_B, history_B, block_offsets = _lists(sizes, counts.lengths_B.device)
    num_history = counts.num_item_rows - counts.num_candidate_rows + counts.num_action_rows
    places = positions.max_seq_len + num_history // GROUP_USERS
    return HistoryGroups(
        anchor_B=anchor_B,
        history_B=history_B,
        block_offsets=block_offsets,
        max_blocks=min(num_history, places // BLOCK_PLACES + 2 * num_groups),
    )


def _launch_users(
    counts: Counts,
    starts: Tensor,
    groups: HistoryGroups | None,
    positions: PositionRule | None,
) -> None:
    num_users = counts.lengths_B.numel()
    users_kernel[(max(1, triton.cdiv(num_users, _USERS)),)](
        counts.lengths_B.contiguous(),
        counts.candidates_B.contiguous(),
        counts.contextuals_B.contiguous(),
        starts,
        None if groups is None else groups.anchor_B,
        None if groups is None else groups.history_B,
        num_users,
        counts.num_item_rows,
        counts.num_candidate_rows,
        counts.num_contextual_rows,
        0 if positions is None else positions.max_seq_len,
        TOKENS_PER_EVENT=2 if counts.has_actions else 1,
        FROM_OLDEST=positions is not None and positions.counting_from == "oldest",
        USERS=_USERS,
        STEP=_STEP,
        num_warps=4,
    )


def _launch_tokens(
    counts: Counts,
    starts: Tensor,
    out: list[Tensor],
    timestamps_E: Tensor | None,
    positions: PositionRule | None,
    groups: HistoryGroups | None,
) -> None:
    num_users = counts.lengths_B.numel()
    num_blocks = triton.cdiv(counts.num_tokens, _TOKENS)
    grid = num_blocks + (groups is not None)
    if grid == 0:
        return
    tokens_kernel[(grid,)](
        counts.lengths_B.contiguous(),
        counts.candidates_B.contiguous(),
        counts.contextuals_B.contiguous(),
        starts,
        *out[:6],
        None if positions is None else out[6],
        None if timestamps_E is None else out[7],
        None if timestamps_E is None else timestamps_E.contiguous(),
        None if groups is None else groups.history_B,
        None if groups is None else groups.block_offsets,
        num_users,
        counts.num_tokens,
        counts.num_contextual_rows,
        counts.num_item_rows,
        counts.num_candidate_rows,
        num_blocks,
        max(1, num_users).bit_length(),
        0 if positions is None else positions.max_num_contextuals,
        0 if positions is None else positions.history_rows,
        0 if positions is None else positions.num_positions,
        TOKENS_PER_EVENT=2 if counts.has_actions else 1,
        SHARED_ROWS=1 if positions is None else positions.shared_rows,
        FROM_OLDEST=positions is not None and positions.counting_from == "oldest",
        GROUP=GROUP_USERS,
        PLACES=BLOCK_PLACES,
        BLOCK=_TOKENS,
        num_warps=4,
    )


@triton.jit
def _counts_of(lengths_ptr, candidates_ptr, contextuals_ptr, users, num_users):
    is_user = users < num_users
    lengths = tl.load(lengths_ptr + users, mask=is_user, other=0)
    candidates = tl.load(candidates_ptr + users, mask=is_user, other=0)
    contextuals = tl.load(contextuals_ptr + users, mask=is_user, other=0)
    return lengths, candidates, contextuals


@triton.jit(
    debug=True,
    do_not_specialize=[
        "num_users",
        "num_item_rows",
        "num_candidate_rows",
        "num_contextual_rows",
        "max_seq_len",
    ],
    do_not_specialize_on_alignment=["lengths_ptr", "candidates_ptr", "contextuals_ptr"],
)
def users_kernel(
    lengths_ptr,
    candidates_ptr,
    contextuals_ptr,
    starts_ptr,
    anchor_ptr,
    history_ptr,
    num_users,
    num_item_rows,
    num_candidate_rows,
    num_contextual_rows,
    max_seq_len,
    TOKENS_PER_EVENT: tl.constexpr,
    FROM_OLDEST: tl.constexpr,
    USERS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the offsets of USERS users and, with anchor_ptr, their places in the sorted lists."""
    first = tl.program_id(0) * USERS
    own = first + tl.arange(0, USERS)
    lane = tl.arange(0, STEP)
    lengths, candidates, contextuals = _counts_of(
        lengths_ptr, candidates_ptr, contextuals_ptr, own, num_users
    )
    history = (lengths - candidates) * TOKENS_PER_EVENT
    before_l = tl.full([STEP], 0, tl.int64)
    before_c = tl.full([STEP], 0, tl.int64)
    before_x = tl.full([STEP], 0, tl.int64)
    rank = tl.full([USERS], 0, tl.int64)
    for step in range(0, num_users, STEP):
        users = step + lane
        others = _counts_of(lengths_ptr, candidates_ptr, contextuals_ptr, users, num_users)
        is_before = users < first
        before_l += tl.where(is_before, others[0], 0)
        before_c += tl.where(is_before, others[1], 0)
        before_x += tl.where(is_before, others[2], 0)
        if anchor_ptr is not None:
            theirs = ((others[0] - others[1]) * TOKENS_PER_EVENT)[None, :]
            ahead = (theirs > history[:, None]) | (
                (theirs == history[:, None]) & (users[None, :] < own[:, None])
            )
            ahead = ahead & (users < num_users)[None, :]
            rank += axis_sum(ahead.to(tl.int64), 1)
    event_end = axis_sum(before_l, 0) + running_sum(lengths)
    candidate_end = axis_sum(before_c, 0) + running_sum(candidates)
    contextual_end = axis_sum(before_x, 0) + running_sum(contextuals)
    token_end = contextual_end + candidate_end + (event_end - candidate_end) * TOKENS_PER_EVENT
    is_user = own < num_users
    stride = num_users + 1
    ends = starts_ptr + 1 + own
    tl.store(ends, token_end, mask=is_user)
    tl.store(ends + stride, event_end, mask=is_user)
    tl.store(ends + 2 * stride, candidate_end, mask=is_user)
    tl.store(ends + 3 * stride, contextual_end, mask=is_user)
    if tl.program_id(0) == 0:
        four = tl.arange(0, 4)
        tl.store(starts_ptr + four * stride, tl.full([4], 0, tl.int64))
    if anchor_ptr is not None:
        anchor = token_end - candidates - history
        if not FROM_OLDEST:
            anchor += history - 1
        tl.store(anchor_ptr + rank, anchor, mask=is_user)
        tl.store(history_ptr + rank, history, mask=is_user)
        tl.device_assert(history <= max_seq_len, "jagged: a sequence is longer than max_seq_len")
    tl.device_assert(
        (candidates >= 0) & (candidates <= lengths), "jagged: more candidates than item events"
    )
    tl.device_assert(contextuals >= 0, "jagged: a negative number of contextual rows")
    is_not_last = own != num_users - 1
    tl.device_assert(
        is_not_last | (event_end == num_item_rows), "jagged: item_lengths_B and its rows differ"
    )
    tl.device_assert(
        is_not_last | (candidate_end == num_candidate_rows),
        "jagged: num_candidates_B and num_candidate_rows differ",
    )
    tl.device_assert(
        is_not_last | (contextual_end == num_contextual_rows),
        "jagged: num_contextuals_B and its rows differ",
    )


@triton.jit
def _list_blocks(
    history_ptr,
    offsets_ptr,
    num_users,
    own_rows,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Offsets of the groups' blocks, as many as the history of each group's first user fills."""
    lane = tl.arange(0, BLOCK)
    carry = tl.full([BLOCK], 0, tl.int64)
    num_groups = (num_users + GROUP - 1) // GROUP
    tl.store(offsets_ptr, tl.full([], 0, tl.int64))
    for is_own in tl.static_range(2):
        for first in range(0, num_groups, BLOCK):
            group = first + lane
            is_group = group < num_groups
            places = tl.load(history_ptr + group * GROUP, mask=is_group, other=0)
            if is_own:
                places = tl.minimum(places, own_rows)
            else:
                places = tl.maximum(places - own_rows, 0)
            blocks = (places + PLACES - 1) // PLACES
            ends = offsets_ptr + 1 + is_own * num_groups + group
            tl.store(ends, carry + running_sum(blocks), mask=is_group)
            carry += axis_sum(blocks, 0)


@triton.jit
def _user_of(starts_ptr, tokens, num_users, num_steps):
    """The last user that starts at or before each token: empty users have none."""
    user = tokens * 0
    for step in range(num_steps):
        probe = user + (1 << (num_steps - 1 - step))
        inside = probe < num_users
        start = tl.load(starts_ptr + probe, mask=inside, other=0)
        user = tl.where(inside & (start <= tokens), probe, user)
    return user


@triton.jit(
    do_not_specialize=[
        "num_users",
        "num_tokens",
        "num_contextual_rows",
        "num_item_rows",
        "num_candidate_rows",
        "num_blocks",
        "num_steps",
        "max_contextuals",
        "history_rows",
        "num_positions",
    ],
    do_not_specialize_on_alignment=["lengths_ptr", "candidates_ptr", "contextuals_ptr"],
)
def tokens_kernel(
    lengths_ptr,
    candidates_ptr,
    contextuals_ptr,
    starts_ptr,
    source_ptr,
    token_ptr,
    event_ptr,
    item_token_ptr,
    candidate_event_ptr,
    candidate_token_ptr,
    position_ptr,
    timestamp_ptr,
    event_time_ptr,
    history_ptr,
    block_offsets_ptr,
    num_users,
    num_tokens,
    num_contextual_rows,
    num_item_rows,
    num_candidate_rows,
    num_blocks,
    num_steps,
    max_contextuals,
    history_rows,
    num_positions,
    TOKENS_PER_EVENT: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    FROM_OLDEST: tl.constexpr,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write all lists of `TokenLayout` for BLOCK tokens; the program behind them lists blocks."""
    if history_ptr is not None:
        is_behind = tl.program_id(0) == num_blocks
        if is_behind:
            own_rows = history_rows - SHARED_ROWS
            _list_blocks(history_ptr, block_offsets_ptr, num_users, own_rows, GROUP, PLACES, BLOCK)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    user = _user_of(starts_ptr, token, num_users, num_steps)
    lengths, candidates, contextuals = _counts_of(
        lengths_ptr, candidates_ptr, contextuals_ptr, user, num_users
    )
    starts = starts_ptr + user
    stride = num_users + 1
    token_start = tl.load(starts, mask=is_token, other=0)
    event_start = tl.load(starts + stride, mask=is_token, other=0)
    candidate_start = tl.load(starts + 2 * stride, mask=is_token, other=0)
    contextual_start = tl.load(starts + 3 * stride, mask=is_token, other=0)
    index = token - token_start
    place = index - contextuals
    events = lengths - candidates
    candidate = place - events * TOKENS_PER_EVENT
    is_contextual = place < 0
    is_candidate = candidate >= 0
    is_action = is_candidate & (candidate < 0)  # none
    if TOKENS_PER_EVENT == 2:
        is_action = (place >= 0) & (candidate < 0) & (place % 2 == 1)
    is_item = (place >= 0) & (is_action == 0)
    event = event_start + tl.where(is_candidate, events + candidate, place // TOKENS_PER_EVENT)
    source = num_contextual_rows + tl.where(
        is_action, num_item_rows + event - candidate_start, event
    )
    source = tl.where(is_contextual, contextual_start + index, source)
    no_event = tl.where(lengths > 0, event_start, num_item_rows)
    event = tl.where(is_contextual, no_event, event)

    tl.store(source_ptr + token, source, mask=is_token)
    tl.store(event_ptr + token, event, mask=is_token)
    tl.store(token_ptr + source, token, mask=is_token & (source < num_tokens))
    is_event = is_token & (event < num_item_rows)
    tl.store(item_token_ptr + event, token, mask=is_event & is_item)
    slot = candidate_start + candidate
    is_slot = is_token & is_candidate & (slot < num_candidate_rows)
    tl.store(candidate_event_ptr + slot, event, mask=is_slot)
    tl.store(candidate_token_ptr + slot, token, mask=is_slot)
    if timestamp_ptr is not None:
        time = tl.load(event_time_ptr + event, mask=is_event, other=0)
        tl.store(timestamp_ptr + token, time, mask=is_token)
    if position_ptr is not None:
        far = place
        if not FROM_OLDEST:
            far = events * TOKENS_PER_EVENT - 1 - place
        shared = far * 0 + history_rows - SHARED_ROWS
        if SHARED_ROWS == 2:
            shared += far % 2
        row = max_contextuals + 1 + tl.minimum(far, shared)
        row = tl.where(is_candidate, max_contextuals, row)
        row = tl.where(is_contextual, tl.minimum(index, num_positions - 1), row)
        tl.store(position_ptr + token, row, mask=is_token)
