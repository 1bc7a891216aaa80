"""Where every row of a batch stands in the token sequence of its user.

contextual 0..c-1 | item 0, action 0, item 1, action 1, ... (history) | candidate items
without actions:  contextual 0..c-1 | item 0, item 1, ... (history)   | candidate items
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ops.jagged.backend import use_triton
from ops.jagged.offsets import check_counts, lengths_to_offsets
from ops.position import PositionRule

GROUP_USERS = 32
BLOCK_PLACES = 8


@dataclass(frozen=True, kw_only=True)
class HistoryGroups:
    """Users in the order of their history, longest first, in groups of GROUP_USERS.

    The gradient of a position table sums over users; users of a group are about equally long, so
    that (group, BLOCK_PLACES places of the history) is a list of pieces of work without a look at
    the lengths on the host. No block has both places with a table row of their own and places that
    share one.
    """

    anchor_B: Tensor
    """(B,) int64, sorted users: token of history place 0, the oldest or the newest one."""
    history_B: Tensor
    """(B,) int64, sorted users: history tokens."""
    block_offsets: Tensor
    """(2 * groups + 1,) int64: blocks before those of each group, counting the blocks of shared
    places of all groups first, then those of places with a row of their own."""
    max_blocks: int
    """Upper bound of the number of blocks, from what the host knows."""


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Token order of one batch: integer tensors on one device, no gradients.

    "Source rows" are all rows in the order [contextual rows, item rows, action rows], each kind
    packed by user; "tokens" are the same rows in sequence order, packed by user.
    """

    seq_offsets_B1: Tensor
    """(B + 1,) int64, offsets of the token sequences."""
    num_contextuals_B: Tensor
    """(B,) int64."""
    num_candidates_B: Tensor
    """(B,) int64."""
    source_T: Tensor
    """(T,) int64, the source row of each token."""
    token_T: Tensor
    """(T,) int64, the token of each source row: the inverse of source_T."""
    event_T: Tensor
    """(T,) int64, the item event of each token (contextual: the user's first; E where none is)."""
    candidate_events_C: Tensor
    """(C,) int64, the rows of the item events that are candidates, in packed order."""
    item_tokens_E: Tensor
    """(E,) int64, the token of every item event, history and candidates, in packed item order."""
    candidate_tokens_C: Tensor
    """(C,) int64, the token of every candidate, in packed order: what ranking supervises."""
    num_contextual_rows: int
    num_item_rows: int
    num_action_rows: int
    timestamps_T: Tensor | None = None
    """(T,) int64, `token_timestamps` of the times that were given to `build_token_layout`."""
    positions: PositionRule | None = None
    """What position_T follows."""
    position_T: Tensor | None = None
    """(T,) int64, the position row of each token."""
    history_groups: HistoryGroups | None = None
    """For the Triton backward of a position table; made by backend = "triton"."""

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return self.source_T.shape[0]

    def token_timestamps(self, timestamps_E: Tensor) -> Tensor:
        """Return the time of each token, (T,), from the times of the item events.

        Item and action tokens carry the time of their event; contextual tokens that of the user's
        first event, 0 for a user without events.
        """
        padded = torch.cat([timestamps_E, timestamps_E.new_zeros(1)])
        return padded.index_select(0, self.event_T)


def build_token_layout(
    item_lengths_B: Tensor,
    num_candidates_B: Tensor,
    *,
    num_item_rows: int,
    num_contextuals_B: Tensor | None = None,
    num_contextual_rows: int = 0,
    has_actions: bool = True,
    num_candidate_rows: int | None = None,
    timestamps_E: Tensor | None = None,
    positions: PositionRule | None = None,
    backend: str = "pytorch",
) -> TokenLayout:
    """Return the token order of a batch, by integer arithmetic on whole tensors.

    Both backends give equal integers, "triton" in two launches, "pytorch" in more than 80.

    Args:
        item_lengths_B: item events of each user, history plus candidates, (B,) integers.
        num_candidates_B: how many of them, the latest ones, are candidates, (B,) integers.
        num_item_rows: the sum of item_lengths_B, known from the shape of the item embeddings.
        num_contextuals_B: contextual rows of each user, (B,) integers; None for none.
        num_contextual_rows: the sum of num_contextuals_B.
        has_actions: one action row for each history event.
        num_candidate_rows: the sum of num_candidates_B; None reads it from the tensor, which makes
            a GPU step wait.
        timestamps_E: times of the item events, int64, for `TokenLayout.timestamps_T`.
        positions: which position row a token reads, for `TokenLayout.position_T`.
        backend: "pytorch" or "triton".

    Raises:
        ValueError: counts and rows that contradict each other (values: CPU tensors only; the
            Triton kernels stop the device with an assertion).
    """
    lengths_B = item_lengths_B.long()
    candidates_B = num_candidates_B.long()
    contextuals_B = (
        torch.zeros_like(lengths_B) if num_contextuals_B is None else num_contextuals_B.long()
    )
    _check(lengths_B, candidates_B, contextuals_B, num_item_rows, num_contextual_rows)
    if num_candidate_rows is None:
        num_candidate_rows = int(candidates_B.sum())
    counts = Counts(
        lengths_B=lengths_B,
        candidates_B=candidates_B,
        contextuals_B=contextuals_B,
        num_item_rows=num_item_rows,
        num_candidate_rows=num_candidate_rows,
        num_contextual_rows=num_contextual_rows,
        has_actions=has_actions,
    )
    if use_triton(backend, lengths_B):
        from ops.jagged.triton_layout import token_layout

        return token_layout(counts, timestamps_E=timestamps_E, positions=positions)
    return _with_token_lists(_layout(counts), timestamps_E, positions)


def _with_token_lists(
    layout: TokenLayout, timestamps_E: Tensor | None, positions: PositionRule | None
) -> TokenLayout:
    """Return the layout with the times and position rows of its tokens, where asked for."""
    if timestamps_E is not None:
        layout = replace(layout, timestamps_T=layout.token_timestamps(timestamps_E))
    if positions is None:
        return layout
    position_T = positions.indices(
        layout.seq_offsets_B1,
        layout.num_contextuals_B,
        num_candidates_B=layout.num_candidates_B,
        num_tokens=layout.num_tokens,
    )
    return replace(layout, positions=positions, position_T=position_T)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a layout follows from; int64 tensors on one device and sums that the host knows."""

    lengths_B: Tensor
    candidates_B: Tensor
    contextuals_B: Tensor
    num_item_rows: int
    num_candidate_rows: int
    num_contextual_rows: int
    has_actions: bool

    @property
    def num_action_rows(self) -> int:
        """Return one for each history event, 0 without actions."""
        return self.num_item_rows - self.num_candidate_rows if self.has_actions else 0

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return self.num_contextual_rows + self.num_item_rows + self.num_action_rows


def _layout(counts: Counts) -> TokenLayout:
    lengths_B, candidates_B = counts.lengths_B, counts.candidates_B
    contextuals_B, num_item_rows = counts.contextuals_B, counts.num_item_rows
    num_action_rows = counts.num_action_rows
    history_B = lengths_B - candidates_B
    num_actions_B = history_B if counts.has_actions else torch.zeros_like(history_B)
    seq_offsets_B1 = lengths_to_offsets(contextuals_B + lengths_B + num_actions_B)
    event_offsets_B = lengths_to_offsets(lengths_B)[:-1]
    first_event_token_B = seq_offsets_B1[:-1] + contextuals_B

    user_E, index_E = _ragged_index(lengths_B, num_item_rows)
    item_token_E = first_event_token_B[user_E] + index_E
    if counts.has_actions:
        item_token_E += torch.minimum(index_E, history_B[user_E])
    user_A, index_A = _ragged_index(num_actions_B, num_action_rows)
    action_token_A = first_event_token_B[user_A] + 2 * index_A + 1
    user_K, index_K = _ragged_index(contextuals_B, counts.num_contextual_rows)
    contextual_token_K = seq_offsets_B1[user_K] + index_K
    user_C, index_C = _ragged_index(candidates_B, counts.num_candidate_rows)

    token_T = torch.cat([contextual_token_K, item_token_E, action_token_A])
    first_event_B = event_offsets_B.masked_fill(lengths_B == 0, num_item_rows)
    event_of_source = torch.cat(
        [
            first_event_B[user_K],
            torch.arange(num_item_rows, device=token_T.device),
            event_offsets_B[user_A] + index_A,
        ]
    )
    source_T = torch.empty_like(token_T)
    source_T[token_T] = torch.arange(token_T.numel(), device=token_T.device)
    candidate_events_C = (event_offsets_B + history_B)[user_C] + index_C
    return TokenLayout(
        seq_offsets_B1=seq_offsets_B1,
        num_contextuals_B=contextuals_B,
        num_candidates_B=candidates_B,
        source_T=source_T,
        token_T=token_T,
        event_T=event_of_source.index_select(0, source_T),
        candidate_events_C=candidate_events_C,
        item_tokens_E=item_token_E,
        candidate_tokens_C=item_token_E.index_select(0, candidate_events_C),
        num_contextual_rows=counts.num_contextual_rows,
        num_item_rows=num_item_rows,
        num_action_rows=num_action_rows,
    )


def _ragged_index(lengths_B: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return for every packed row its user and its index inside the user, both (num_rows,)."""
    users = torch.arange(lengths_B.numel(), device=lengths_B.device)
    user = torch.repeat_interleave(users, lengths_B, output_size=num_rows)
    starts_B = lengths_to_offsets(lengths_B)[:-1]
    return user, torch.arange(num_rows, device=lengths_B.device) - starts_B[user]


def _check(
    lengths_B: Tensor,
    candidates_B: Tensor,
    contextuals_B: Tensor,
    num_item_rows: int,
    num_contextual_rows: int,
) -> None:
    num_users = lengths_B.numel()
    check_counts(lengths_B, name="item_lengths_B", num_users=num_users)
    check_counts(candidates_B, name="num_candidates_B", num_users=num_users)
    check_counts(contextuals_B, name="num_contextuals_B", num_users=num_users)
    if lengths_B.device.type != "cpu":
        return
    if bool((candidates_B > lengths_B).any()):
        user = int((candidates_B > lengths_B).nonzero()[0])
        raise ValueError(
            f"num_candidates_B of user {user} is {int(candidates_B[user])}, more than its "
            f"{int(lengths_B[user])} item events"
        )
    for name, counts, rows in (
        ("item_lengths_B", lengths_B, num_item_rows),
        ("num_contextuals_B", contextuals_B, num_contextual_rows),
    ):
        if int(counts.sum()) != rows:
            raise ValueError(f"{name} sums to {int(counts.sum())}, but there are {rows} rows")
