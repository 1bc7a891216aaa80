"""From embedding rows to the token sequence that enters the HSTU stack.

contextual ... | item 0, action 0, item 1, action 1, ...      | candidate items ...
-> project to hidden size where widths differ -> add positions -> dropout
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from data.batch import SequenceBatch
from data.dataset import FeatureFacts
from modules.jagged_sequence import JaggedSequence
from modules.position import PositionEmbedding
from ops.jagged import TokenLayout, build_token_layout, embed_tokens
from ops.position import PositionRule


class SequencePreprocessor(nn.Module):
    """Builds the `JaggedSequence` of a batch.

    Args:
        facts: names of the features, in the order of their tokens.
        feature_dims: width of each feature's embedding rows.
        hidden_size: width D of a token.
        max_seq_len: longest sequence, in tokens.
        num_position_buckets: positions that have an embedding of their own.
        scaling_seqlen: divisor of the attention weights; None takes the longest sequence of the
            batch, which makes a user's output depend on its batch mates.
        dropout: probability of zeroing an element of a token.
        dtype: of the tokens.
        positions: learned position rows (`PositionEmbedding.counting_from`); None adds none.
        backend: what `ops.jagged` runs, "pytorch" or "triton".

    Raises:
        ValueError: too few position buckets for the contextual features and one event.
    """

    def __init__(
        self,
        facts: FeatureFacts,
        *,
        feature_dims: Mapping[str, int],
        hidden_size: int,
        max_seq_len: int,
        num_position_buckets: int,
        scaling_seqlen: float | None,
        dropout: float,
        dtype: torch.dtype,
        positions: Literal["newest", "oldest"] | None = "newest",
        backend: str = "pytorch",
    ) -> None:
        super().__init__()
        self._facts = facts
        self._max_seq_len = max_seq_len
        self._scaling_seqlen = scaling_seqlen
        self._dtype = dtype
        self.backend = backend
        self.projections = nn.ModuleDict(
            {
                f"feature_{feature}": nn.Linear(dim, hidden_size)
                for feature, dim in feature_dims.items()
                if dim != hidden_size
            }
        )
        self.position: nn.Module = nn.Identity()
        self._position_rule: PositionRule | None = None
        if positions is not None:
            self.position = PositionEmbedding(
                min(num_position_buckets, max_seq_len + 1),
                hidden_size,
                max_num_contextuals=len(facts.contextual_feature_names),
                counting_from=positions,
                tokens_per_event=1 if facts.action_feature_name is None else 2,
            )
            self._position_rule = self.position.rule(max_seq_len)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, batch: SequenceBatch, embeddings: Mapping[str, Tensor]
    ) -> tuple[JaggedSequence, TokenLayout]:
        """The sequences of a batch and where every row stands in them.

        Args:
            embeddings: feature -> (ids of the feature, its width) rows in batch order.

        Raises:
            ValueError: a user has more tokens than max_seq_len.
        """
        if batch.max_length > self._max_seq_len:
            raise ValueError(
                f"a user of the batch has {batch.max_length} tokens, but max_seq_len is "
                f"{self._max_seq_len}; raise DatasetArgs.max_history_seqlen"
            )
        rows = {name: self._project(name, embeddings[name]) for name in self.feature_names}
        layout = self._layout(batch)
        tokens_TD = embed_tokens(
            layout,
            rows[self._facts.item_feature_name],
            action_rows_AD=self._action_rows(rows),
            contextual_rows_KD=self._contextual_rows(rows),
            position_rows_PD=self._position_rows(),
            dropout=self.dropout.p if self.training else 0.0,
            dtype=self._dtype,
            backend=self.backend,
        )
        scaling_seqlen = self._scaling_seqlen
        sequence = JaggedSequence(
            values_TD=tokens_TD,
            seq_offsets_B1=layout.seq_offsets_B1,
            num_contextuals_B=layout.num_contextuals_B,
            num_candidates_B=layout.num_candidates_B,
            timestamps_T=layout.timestamps_T,
            max_seq_len=self._max_seq_len,
            scaling_seqlen=max(1, batch.max_length) if scaling_seqlen is None else scaling_seqlen,
        )
        return sequence, layout

    @property
    def feature_names(self) -> list[str]:
        """Features that have tokens; others, such as negatives, may be looked up beside them."""
        facts = self._facts
        action = [] if facts.action_feature_name is None else [facts.action_feature_name]
        return [facts.item_feature_name, *action, *facts.contextual_feature_names]

    def _project(self, feature: str, rows: Tensor) -> Tensor:
        name = f"feature_{feature}"
        return self.projections[name](rows) if name in self.projections else rows

    def _layout(self, batch: SequenceBatch) -> TokenLayout:
        features, facts = batch.features, self._facts
        lengths_KB = features.lengths().view(-1, batch.batch_size)
        num_rows = dict(zip(features.keys(), features.length_per_key(), strict=True))
        row_of = {name: row for row, name in enumerate(features.keys())}
        contextual = facts.contextual_feature_names
        contextual_rows = [row_of[name] for name in contextual]
        num_item_rows = num_rows[facts.item_feature_name]
        has_actions = facts.action_feature_name is not None
        return build_token_layout(
            lengths_KB[row_of[facts.item_feature_name]],
            batch.num_candidates_B,
            num_item_rows=num_item_rows,
            num_contextuals_B=_sum_of_rows(lengths_KB, contextual_rows) if contextual else None,
            num_contextual_rows=sum(num_rows[name] for name in contextual),
            has_actions=has_actions,
            num_candidate_rows=int(batch.host_candidates_B.sum()),
            timestamps_E=batch.timestamps_E,
            positions=self._position_rule,
            backend=self.backend,
        )

    def _position_rows(self) -> Tensor | None:
        return self.position.weight if isinstance(self.position, PositionEmbedding) else None

    def _action_rows(self, rows: Mapping[str, Tensor]) -> Tensor | None:
        name = self._facts.action_feature_name
        return None if name is None else rows[name]

    def _contextual_rows(self, rows: Mapping[str, Tensor]) -> Tensor | None:
        """Rows packed by user, features in order: every real user has one id of each feature."""
        names = self._facts.contextual_feature_names
        if not names:
            return None
        stacked_SFD = torch.stack([rows[name] for name in names], dim=1)
        return stacked_SFD.flatten(0, 1)


def _sum_of_rows(lengths_KB: Tensor, rows: Sequence[int]) -> Tensor:
    """(B,), the sum of some rows; by slices: a list as index would be copied, with a wait."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return lengths_KB[rows[0] : rows[0] + len(rows)].sum(dim=0)
    return torch.stack([lengths_KB[row] for row in rows]).sum(dim=0)
