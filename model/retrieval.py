"""The HSTU retrieval model: every history event but the last predicts the next one's item.

The query of event e is the encoded row of its last token (its action; its item without actions),
the target is the item of event e + 1, and both meet in the items' embedding space. Source: the
retrieval task of HSTU, arXiv 2402.17152, trained with a sampled softmax.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.batch import SequenceBatch, negatives_feature
from data.dataset import FeatureFacts
from model.trunk import EncodedBatch, Shared, Trunk
from modules.embedding import ReplicatedTables
from modules.hstu_stack import HSTUStack
from modules.losses import SampledSoftmax
from modules.negatives import InBatchNegatives, Negatives, random_negatives
from modules.preprocessor import SequencePreprocessor
from ops.jagged import lengths_to_offsets, take_rows


@dataclass(frozen=True, kw_only=True)
class RetrievalOutput:
    """The training loss of a batch or a part of it.

    Attributes:
        loss_sum: summed loss, float32 scalar.
        num_labels: targets in it, int64 scalar.
    """

    loss_sum: Tensor
    num_labels: Tensor


@dataclass(frozen=True, kw_only=True)
class HeldOutTargets:
    """What an evaluation asks about a batch: its candidates, as targets of their user's query.

    Attributes:
        query_BD: query at the newest history event, in the width of the items, not normalised;
            zeros for users without history, to whom all items are alike.
        target_users_C: row of the query, int64.
        target_ids_C: item, int64.
        target_rows_CD: its embedding row, not normalised.
    """

    query_BD: Tensor
    target_users_C: Tensor
    target_ids_C: Tensor
    target_rows_CD: Tensor


class RetrievalTrunk(Trunk):
    """Trunk, projection of the queries, and the loss against sampled negatives.

    Args:
        replicated, preprocessor, stack, norm: see `Trunk`.
        query: from the normalised row of a token to the width of the items.
        objective: the loss; its similarity is also what evaluation scores with.
        negatives: draws them from the batch; None where the loader brings random ones.
        facts: names of the features.
    """

    def __init__(
        self,
        *,
        replicated: ReplicatedTables,
        preprocessor: SequencePreprocessor,
        stack: HSTUStack,
        norm: nn.LayerNorm,
        query: nn.Linear | nn.Identity,
        objective: SampledSoftmax,
        negatives: InBatchNegatives | None,
        facts: FeatureFacts,
    ) -> None:
        super().__init__(replicated=replicated, preprocessor=preprocessor, stack=stack, norm=norm)
        self.query = query
        self.objective = objective
        self._negatives = negatives
        self._item = facts.item_feature_name
        self._tokens_after_item = 0 if facts.action_feature_name is None else 1

    def num_labels(self, batch: SequenceBatch) -> Tensor:
        """See `Trunk.num_labels`."""
        return (_history_lengths(batch) - 1).clamp(min=0).sum()

    def shared(self, batch: SequenceBatch, embeddings: Mapping[str, Tensor]) -> Negatives:
        """The step's negatives; arguments as in `Trunk.shared`."""
        if self._negatives is None:
            name = negatives_feature(self._item)
            return random_negatives(
                batch.features[name].values(), self._rows(name, batch, embeddings)
            )
        ids_E = batch.features[self._item].values()
        # A candidate is held out, as a negative, too.
        lent_E = ids_E.masked_fill(~_is_history(batch), -1)
        return self._negatives(lent_E, self._rows(self._item, batch, embeddings))

    def _rows(self, feature: str, batch: SequenceBatch, embeddings: Mapping[str, Tensor]) -> Tensor:
        if self.replicated.serves(feature):
            return F.embedding(batch.features[feature].values(), self.replicated.weight(feature))
        return embeddings[feature]

    def forward(
        self,
        batch: SequenceBatch,
        embeddings: Mapping[str, Tensor],
        shared: Shared | None = None,
    ) -> RetrievalOutput:
        """Loss of predicting each next history item; arguments as in `Trunk.forward`."""
        assert isinstance(shared, Negatives), "retrieval needs what RetrievalTrunk.shared gave"
        encoded = self.encode(batch, embeddings)
        events_R, is_counted_R = _followed_events(batch)
        ids_E = batch.features[self._item].values()
        loss_sum = self.objective.loss_sum(
            self._queries(encoded, events_R, is_history_R=is_counted_R),
            take_rows(encoded.rows[self._item], events_R + 1),
            ids_E.index_select(0, events_R + 1),
            negative_MD=shared.rows_MD,
            negative_ids_M=shared.ids_M,
            is_used_M=shared.is_used_M,
            is_counted_R=is_counted_R,
        )
        return RetrievalOutput(loss_sum=loss_sum, num_labels=is_counted_R.sum())

    def held_out(self, batch: SequenceBatch, embeddings: Mapping[str, Tensor]) -> HeldOutTargets:
        """Queries of the users and the candidates to look for; arguments as in `Trunk.forward`."""
        encoded = self.encode(batch, embeddings)
        history_B = _history_lengths(batch)
        lengths_B = _event_lengths(batch)
        last_event_B = lengths_to_offsets(lengths_B)[:-1] + history_B - 1
        users_U = (history_B > 0).nonzero().squeeze(1)
        query_UD = self._queries(encoded, last_event_B[users_U])
        query_BD = query_UD.new_zeros(batch.batch_size, query_UD.shape[1])
        query_BD[users_U] = query_UD
        events_C = encoded.layout.candidate_events_C
        users_B = torch.arange(batch.batch_size, device=events_C.device)
        return HeldOutTargets(
            query_BD=query_BD,
            target_users_C=users_B.repeat_interleave(batch.num_candidates_B),
            target_ids_C=batch.features[self._item].values().index_select(0, events_C),
            target_rows_CD=encoded.rows[self._item].index_select(0, events_C),
        )

    def _queries(
        self, encoded: EncodedBatch, events_R: Tensor, *, is_history_R: Tensor | None = None
    ) -> Tensor:
        """(R, width of the items), one for each event; a candidate's own token stands for it."""
        tokens_R = encoded.layout.item_tokens_E.index_select(0, events_R)
        if is_history_R is None:
            tokens_R = tokens_R + self._tokens_after_item
        else:
            tokens_R = tokens_R + self._tokens_after_item * is_history_R
        return self.query(self.normed(encoded, tokens_R))


def _event_lengths(batch: SequenceBatch) -> Tensor:
    return batch.features.lengths()[: batch.batch_size]


def _history_lengths(batch: SequenceBatch) -> Tensor:
    return _event_lengths(batch) - batch.num_candidates_B


def _is_history(batch: SequenceBatch) -> Tensor:
    """(E,) bool, False for candidates."""
    lengths_B = _event_lengths(batch)
    num_events = batch.labels_E.shape[0]
    user_E = torch.repeat_interleave(
        torch.arange(batch.batch_size, device=lengths_B.device), lengths_B, output_size=num_events
    )
    first_candidate_B = lengths_to_offsets(lengths_B)[1:] - batch.num_candidates_B
    return torch.arange(num_events, device=lengths_B.device) < first_candidate_B[user_E]


def _followed_events(batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Events that have another one of their user behind them (R,), and whether that is history.

    Their number is known on the host, so nothing waits for the device.
    """
    followed_B = (_event_lengths(batch) - 1).clamp(min=0)
    num_rows = int(np.maximum(batch.host_lengths_KB[0] - 1, 0).sum())
    user_R = torch.repeat_interleave(
        torch.arange(batch.batch_size, device=followed_B.device), followed_B, output_size=num_rows
    )
    starts_B = lengths_to_offsets(followed_B)[:-1]
    index_R = torch.arange(num_rows, device=followed_B.device) - starts_B[user_R]
    events_R = lengths_to_offsets(_event_lengths(batch))[:-1][user_R] + index_R
    return events_R, index_R + 1 < _history_lengths(batch)[user_R]
