"""The HSTU ranking model: embeddings -> token sequence -> HSTU stack -> head on the candidates.

`RankingModel` is split at the embedding output. `tables` holds the sharded tables, whose rows
update inside backward; `trunk` holds everything else. `training.step` cuts the graph between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx
from torch import Tensor, nn

from data.batch import SequenceBatch
from modules.embedding import ReplicatedTables, ShardedTables, lookup_results
from modules.hstu_stack import HSTUStack
from modules.losses import RankingObjective
from modules.mlp import MLP
from modules.preprocessor import SequencePreprocessor
from ops.jagged import TokenLayout, take_rows

# TorchRec's pipelines trace the model: this one call must stay whole, it walks over its argument.
torch.fx.wrap("lookup_results")


@dataclass(frozen=True, kw_only=True)
class RankingOutput:
    """What the head says about the supervised item events of a batch.

    Attributes:
        loss_sum: summed loss, float32 scalar.
        num_labels: number of labels in it, int64 scalar.
        logits_EK: one row for each supervised event, float32.
        labels_E: their labels: class ids or bit masks.
        user_ids_E: raw id of the user of each supervised event.
    """

    loss_sum: Tensor
    num_labels: Tensor
    logits_EK: Tensor
    labels_E: Tensor
    user_ids_E: Tensor


class RankingTrunk(nn.Module):
    """Everything between the sharded tables' rows and the loss.

    Args:
        replicated: small tables, one copy on every rank.
        preprocessor, stack, norm, head: the parts in the order they run; norm is applied to the
            supervised tokens only, in FP32.
        objective: meaning of the labels.
        supervise_history: also train on every history item (history_loss).
        has_candidates: the held-out folds have candidates, which alone are scored there.
    """

    def __init__(
        self,
        *,
        replicated: ReplicatedTables,
        preprocessor: SequencePreprocessor,
        stack: HSTUStack,
        norm: nn.LayerNorm,
        head: MLP,
        objective: RankingObjective,
        supervise_history: bool,
        has_candidates: bool,
    ) -> None:
        super().__init__()
        self.replicated = replicated
        self.preprocessor = preprocessor
        self.stack = stack
        self.norm = norm
        self.head = head
        self.objective = objective
        self._supervise_history = supervise_history
        self._has_candidates = has_candidates

    def forward(self, batch: SequenceBatch, embeddings: Mapping[str, Tensor]) -> RankingOutput:
        """Loss and logits of the supervised events.

        Training supervises candidates, and history items too under history_loss. Evaluation
        scores the candidates alone wherever the data set has candidates.

        Args:
            embeddings: feature -> rows of the sharded tables, in batch order.
        """
        rows = dict(embeddings) | self.replicated(batch.features)
        sequence, layout = self.preprocessor(batch, rows)
        encoded_TD = self.stack(sequence).values_TD
        events_E, tokens_E = self._supervised(layout)
        logits_EK = self.head(self.norm(take_rows(encoded_TD, tokens_E).float()))
        labels_E = batch.labels_E.index_select(0, events_E)
        loss_sum, num_labels = self.objective.loss_sum(logits_EK, labels_E)
        return RankingOutput(
            loss_sum=loss_sum,
            num_labels=num_labels,
            logits_EK=logits_EK,
            labels_E=labels_E,
            user_ids_E=self._users(batch, layout).index_select(0, events_E),
        )

    def _supervised(self, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        all_events = self._supervise_history and (self.training or not self._has_candidates)
        if all_events:
            return torch.arange(layout.num_item_rows, device=layout.token_T.device), (
                layout.item_tokens_E
            )
        return layout.candidate_events_C, layout.candidate_tokens_C

    @staticmethod
    def _users(batch: SequenceBatch, layout: TokenLayout) -> Tensor:
        lengths_B = batch.features.lengths()[: batch.batch_size]
        return torch.repeat_interleave(
            batch.user_ids_B, lengths_B, output_size=layout.num_item_rows
        )


class RankingModel(nn.Module):
    """Sharded tables and trunk; `forward` is both in one go, for evaluation and for tracing."""

    def __init__(self, tables: ShardedTables, trunk: RankingTrunk) -> None:
        super().__init__()
        self.tables = tables
        self.trunk = trunk

    def forward(self, batch: SequenceBatch) -> RankingOutput:
        """See `RankingTrunk.forward`."""
        return self.trunk(batch, lookup_results(self.tables(batch.features)))
