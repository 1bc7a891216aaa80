"""Learned position embedding of the token sequence."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.jagged_sequence import JaggedSequence
from ops.position import position_indices


class PositionEmbedding(nn.Module):
    """Adds a learned row per position. Parameter: weight."""

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        *,
        max_num_contextuals: int,
        counting_from: Literal["newest", "oldest"] = "newest",
        tokens_per_event: int = 2,
    ) -> None:
        """Make a table of num_positions rows.

        Args:
            num_positions: rows of the table; history older than they reach shares the last one, so
                min(num_position_buckets, max_seq_len + 1) loses nothing.
            hidden_size: D.
            max_num_contextuals: contextual features of the data set.
            counting_from: "newest" (`ops.position`): a row is a distance from "now", which is the
                same for all that a user's sequence predicts. "oldest" (`indices_from_oldest`): a
                row is a place in the history, for sequences that predict after every event: it does
                not depend on how many events follow, and so means the same in training as at the
                end of a history.
            tokens_per_event: tokens of a history event, 1 or 2.
        """
        super().__init__()
        self.max_num_contextuals = max_num_contextuals
        self.counting_from = counting_from
        self.tokens_per_event = tokens_per_event
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table from torch's default generator: normal(0, 0.02)."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Return the sequence with the position rows added to its values (T, D)."""
        rows_TD = F.embedding(self._indices(sequence), self.weight)
        return sequence.with_values(sequence.values_TD + rows_TD.to(sequence.values_TD.dtype))

    def _indices(self, sequence: JaggedSequence) -> Tensor:
        if self.counting_from == "oldest":
            return indices_from_oldest(
                sequence,
                max_num_contextuals=self.max_num_contextuals,
                num_positions=self.weight.shape[0],
                tokens_per_event=self.tokens_per_event,
            )
        return position_indices(
            sequence.seq_offsets_B1,
            sequence.num_contextuals_B,
            num_candidates_B=sequence.num_candidates_B,
            num_tokens=sequence.num_tokens,
            max_num_contextuals=self.max_num_contextuals,
            num_positions=self.weight.shape[0],
        )


def indices_from_oldest(
    sequence: JaggedSequence,
    *,
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
    num_places = (num_positions - max_num_contextuals - 1) // tokens_per_event * tokens_per_event
    if num_places < tokens_per_event:
        raise ValueError(
            "NetworkArgs.num_position_buckets must be at least "
            f"{max_num_contextuals + 1 + tokens_per_event} with {max_num_contextuals} contextual "
            f"features and {tokens_per_event} tokens an event, got {num_positions}"
        )
    offsets_B1 = sequence.seq_offsets_B1
    lengths_B = torch.diff(offsets_B1)
    users_B = torch.arange(lengths_B.numel(), device=lengths_B.device)
    user_T = torch.repeat_interleave(users_B, lengths_B, output_size=sequence.num_tokens)
    index_T = torch.arange(sequence.num_tokens, device=lengths_B.device) - offsets_B1[user_T]
    place_T = index_T - sequence.num_contextuals_B[user_T]
    last_event_T = num_places - tokens_per_event + place_T.remainder(tokens_per_event)
    row_T = max_num_contextuals + 1 + torch.minimum(place_T, last_event_T)
    is_candidate_T = index_T >= (lengths_B - sequence.num_candidates_B)[user_T]
    row_T = row_T.masked_fill(is_candidate_T, max_num_contextuals)
    return torch.where(place_T < 0, index_T, row_T)
