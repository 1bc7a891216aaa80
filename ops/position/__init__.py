"""Which row of a learned position table a token reads."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PositionRule:
    """How the tokens of a model's sequences choose their rows; with c = max_num_contextuals:

    contextual token k reads row k, every candidate row c, history token j row c + 1 + j, where j
    counts back from the newest token or up from the oldest one; tokens that the rows do not reach
    share the last row (newest), or the rows of the last event that is reached (oldest).
    """

    num_positions: int
    """Rows of the table."""
    max_num_contextuals: int
    """Contextual features of the data set."""
    counting_from: Literal["newest", "oldest"] = "newest"
    tokens_per_event: int = 2
    """Tokens of a history event, 1 or 2."""
    max_seq_len: int
    """No sequence is longer, in tokens; sizes the buffers of the table's gradient."""

    def __post_init__(self) -> None:
        _history_rows(
            self.num_positions,
            max_num_contextuals=self.max_num_contextuals,
            shared_rows=self.shared_rows,
            counting_from=self.counting_from,
        )

    @property
    def shared_rows(self) -> int:
        """Return how many rows, the last ones, stand for all history that has none of its own."""
        return 1 if self.counting_from == "newest" else self.tokens_per_event

    @property
    def history_rows(self) -> int:
        """Return how many rows history reads: j < history_rows - shared_rows has its own."""
        places = self.num_positions - self.max_num_contextuals - 1
        return places // self.shared_rows * self.shared_rows

    def indices(
        self,
        seq_offsets_B1: Tensor,
        num_contextuals_B: Tensor,
        *,
        num_candidates_B: Tensor,
        num_tokens: int,
    ) -> Tensor:
        """Return the table row of every token, (T,) int64, in [0, num_positions)."""
        if self.counting_from == "newest":
            return position_indices(
                seq_offsets_B1,
                num_contextuals_B,
                num_candidates_B=num_candidates_B,
                num_tokens=num_tokens,
                max_num_contextuals=self.max_num_contextuals,
                num_positions=self.num_positions,
            )
        return oldest_position_indices(
            seq_offsets_B1,
            num_contextuals_B,
            num_candidates_B=num_candidates_B,
            num_tokens=num_tokens,
            max_num_contextuals=self.max_num_contextuals,
            num_positions=self.num_positions,
            tokens_per_event=self.tokens_per_event,
        )


def position_indices(
    seq_offsets_B1: Tensor,
    num_contextuals_B: Tensor,
    *,
    num_candidates_B: Tensor,
    num_tokens: int,
    max_num_contextuals: int,
    num_positions: int,
) -> Tensor:
    """Return the table row of every token, (T,) int64, in [0, num_positions).

    With c = max_num_contextuals: contextual token k reads row k, every candidate row c, and the
    history counts back from its newest token: rows c + 1, c + 2, ..., the oldest ones sharing the
    last row. So a row means the same distance from "now" for short and long users, candidates
    share one position whatever slot they are in, and (rows c + odd) tells items from actions.

    Raises:
        ValueError: the table is too small to hold contextuals, candidates and one history row.
    """
    _history_rows(
        num_positions,
        max_num_contextuals=max_num_contextuals,
        shared_rows=1,
        counting_from="newest",
    )
    lengths_B = torch.diff(seq_offsets_B1)
    users_B = torch.arange(lengths_B.numel(), device=lengths_B.device)
    user_T = torch.repeat_interleave(users_B, lengths_B, output_size=num_tokens)
    tokens_T = torch.arange(num_tokens, device=lengths_B.device)
    index_T = tokens_T - seq_offsets_B1[user_T]
    first_candidate_B = seq_offsets_B1[1:] - num_candidates_B
    back_T = (first_candidate_B[user_T] - tokens_T).clamp(min=0) + max_num_contextuals
    is_contextual_T = index_T < num_contextuals_B[user_T]
    return torch.where(is_contextual_T, index_T, back_T).clamp(max=num_positions - 1)


def oldest_position_indices(
    seq_offsets_B1: Tensor,
    num_contextuals_B: Tensor,
    *,
    num_candidates_B: Tensor,
    num_tokens: int,
    max_num_contextuals: int,
    num_positions: int,
    tokens_per_event: int,
) -> Tensor:
    """Return the table row of every token, (T,) int64, in [0, num_positions).

    With c = max_num_contextuals: contextual token k reads row k, every candidate row c, history
    token h (from 0, oldest first) row c + 1 + h. Events that the rows do not reach share those of
    the last event that they do, item with item and action with action.

    Raises:
        ValueError: the table is too small to hold contextuals, candidates and one history event.
    """
    num_places = _history_rows(
        num_positions,
        max_num_contextuals=max_num_contextuals,
        shared_rows=tokens_per_event,
        counting_from="oldest",
    )
    lengths_B = torch.diff(seq_offsets_B1)
    users_B = torch.arange(lengths_B.numel(), device=lengths_B.device)
    user_T = torch.repeat_interleave(users_B, lengths_B, output_size=num_tokens)
    index_T = torch.arange(num_tokens, device=lengths_B.device) - seq_offsets_B1[user_T]
    place_T = index_T - num_contextuals_B[user_T]
    last_event_T = num_places - tokens_per_event + place_T.remainder(tokens_per_event)
    row_T = max_num_contextuals + 1 + torch.minimum(place_T, last_event_T)
    is_candidate_T = index_T >= (lengths_B - num_candidates_B)[user_T]
    row_T = row_T.masked_fill(is_candidate_T, max_num_contextuals)
    return torch.where(place_T < 0, index_T, row_T)


def _history_rows(
    num_positions: int, *, max_num_contextuals: int, shared_rows: int, counting_from: str
) -> int:
    """Return the rows that history reads; ValueError where that is not one event."""
    num_rows = (num_positions - max_num_contextuals - 1) // shared_rows * shared_rows
    if num_rows < shared_rows:
        events = "" if counting_from == "newest" else f" and {shared_rows} tokens an event"
        raise ValueError(
            "NetworkArgs.num_position_buckets must be at least "
            f"{max_num_contextuals + 1 + shared_rows} with {max_num_contextuals} contextual "
            f"features{events}, got {num_positions}"
        )
    return num_rows
