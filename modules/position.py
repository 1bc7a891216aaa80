"""Learned position embedding of the token sequence."""

import torch
import torch.nn.functional as F
from torch import nn

from modules.jagged_sequence import JaggedSequence
from ops.position import position_indices


class PositionEmbedding(nn.Module):
    """Adds a learned row per position (which one: `ops.position`). Parameter: weight."""

    def __init__(self, num_positions: int, hidden_size: int, *, max_num_contextuals: int) -> None:
        """Make a table of num_positions rows.

        Args:
            num_positions: rows of the table; history older than they reach shares the last one, so
                min(num_position_buckets, max_seq_len + 1) loses nothing.
            hidden_size: D.
            max_num_contextuals: contextual features of the data set.
        """
        super().__init__()
        self.max_num_contextuals = max_num_contextuals
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table from torch's default generator: normal(0, 0.02)."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Return the sequence with the position rows added to its values (T, D)."""
        index_T = position_indices(
            sequence.seq_offsets_B1,
            sequence.num_contextuals_B,
            num_candidates_B=sequence.num_candidates_B,
            num_tokens=sequence.num_tokens,
            max_num_contextuals=self.max_num_contextuals,
            num_positions=self.weight.shape[0],
        )
        rows_TD = F.embedding(index_T, self.weight)
        return sequence.with_values(sequence.values_TD + rows_TD.to(sequence.values_TD.dtype))
