"""Learned position embedding of the token sequence."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.jagged_sequence import JaggedSequence
from ops.position import PositionRule, oldest_position_indices


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

    def rule(self, max_seq_len: int) -> PositionRule:
        """Return which row a token of sequences up to max_seq_len reads.

        Raises:
            ValueError: the table is too small to hold contextuals, candidates and one event.
        """
        return PositionRule(
            num_positions=self.weight.shape[0],
            max_num_contextuals=self.max_num_contextuals,
            counting_from=self.counting_from,
            tokens_per_event=self.tokens_per_event,
            max_seq_len=max_seq_len,
        )

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Return the sequence with the position rows added to its values (T, D)."""
        index_T = self.rule(sequence.max_seq_len).indices(
            sequence.seq_offsets_B1,
            sequence.num_contextuals_B,
            num_candidates_B=sequence.num_candidates_B,
            num_tokens=sequence.num_tokens,
        )
        rows_TD = F.embedding(index_T, self.weight)
        return sequence.with_values(sequence.values_TD + rows_TD.to(sequence.values_TD.dtype))


def indices_from_oldest(
    sequence: JaggedSequence,
    *,
    max_num_contextuals: int,
    num_positions: int,
    tokens_per_event: int,
) -> Tensor:
    """Return the table row of every token; see `ops.position.oldest_position_indices`."""
    return oldest_position_indices(
        sequence.seq_offsets_B1,
        sequence.num_contextuals_B,
        num_candidates_B=sequence.num_candidates_B,
        num_tokens=sequence.num_tokens,
        max_num_contextuals=max_num_contextuals,
        num_positions=num_positions,
        tokens_per_event=tokens_per_event,
    )
