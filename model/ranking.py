"""The HSTU ranking model: the common trunk with a head on the supervised item tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batch import SequenceBatch
from model.trunk import Shared, Trunk
from modules.embedding import ReplicatedTables
from modules.hstu_stack import HSTUStack
from modules.losses import RankingObjective
from modules.mlp import MLP
from modules.preprocessor import SequencePreprocessor
from ops.jagged import TokenLayout


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


class RankingTrunk(Trunk):
    """Trunk and head.

    Args:
        replicated, preprocessor, stack, norm: see `Trunk`.
        head: logits from the normalised rows of the supervised tokens.
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
        super().__init__(replicated=replicated, preprocessor=preprocessor, stack=stack, norm=norm)
        self.head = head
        self.objective = objective
        self._supervise_history = supervise_history
        self._has_candidates = has_candidates

    def num_labels(self, batch: SequenceBatch) -> Tensor:
        """See `Trunk.num_labels`."""
        num_events = batch.num_candidates_B.sum()
        if self._supervise_history:
            num_events = torch.full_like(num_events, batch.labels_E.shape[0])
        return num_events * self.objective.num_scores

    def shared(self, batch: SequenceBatch, embeddings: Mapping[str, Tensor]) -> None:
        """None: ranking shares nothing between the parts of a step."""

    def forward(
        self,
        batch: SequenceBatch,
        embeddings: Mapping[str, Tensor],
        shared: Shared | None = None,
    ) -> RankingOutput:
        """Loss and logits of the supervised events; arguments as in `Trunk.forward`.

        Training supervises candidates, and history items too under history_loss. Evaluation
        scores the candidates alone wherever the data set has candidates.
        """
        encoded = self.encode(batch, embeddings)
        events_E, tokens_E = self._supervised(encoded.layout)
        logits_EK = self.head(self.normed(encoded, tokens_E))
        labels_E = batch.labels_E.index_select(0, events_E)
        loss_sum, num_labels = self.objective.loss_sum(logits_EK, labels_E)
        return RankingOutput(
            loss_sum=loss_sum,
            num_labels=num_labels,
            logits_EK=logits_EK,
            labels_E=labels_E,
            user_ids_E=self._users(batch, encoded.layout).index_select(0, events_E),
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
