"""What ranking and retrieval have in common, and the cut between sharded tables and the rest.

    embeddings -> token sequence -> HSTU stack -> norm of the rows that are asked about -> ...

`SequenceModel` is split at the embedding output. `tables` holds the sharded tables, whose rows
update inside backward; `trunk` holds everything else. `training.step` cuts the graph between them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.fx
from torch import Tensor, nn

from data.batch import SequenceBatch
from modules.embedding import ReplicatedTables, ShardedTables, lookup_results
from modules.hstu_stack import HSTUStack
from modules.preprocessor import SequencePreprocessor
from ops.jagged import TokenLayout, take_rows

# TorchRec's pipelines trace the model: this one call must stay whole, it walks over its argument.
torch.fx.wrap("lookup_results")


class Output(Protocol):
    """What every trunk says about a batch in training."""

    @property
    def loss_sum(self) -> Tensor:
        """Summed loss, float32 scalar."""

    @property
    def num_labels(self) -> Tensor:
        """Labels in it, int64 scalar."""


class Shared(Protocol):
    """What all parts of a step share: embedding rows, cut off from where they came from.

    Every part's backward adds to the gradient of `rows_MD`. It stays this rank's own until the
    end: `backward` sums it over ranks aside.
    """

    rows_MD: Tensor
    """The rows, a leaf that asks for a gradient."""

    def backward(self) -> None:
        """Sends the rows' gradient on to the embeddings that were given.

        Call it once, after the backward of the last part. Collective.
        """


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """A batch after the stack."""

    encoded_TD: Tensor
    """(T, D) after the last layer, in the compute dtype, not normalised."""
    layout: TokenLayout
    rows: Mapping[str, Tensor]
    """Feature -> embedding rows, of sharded and replicated tables, in batch order."""


class Trunk(nn.Module, ABC):
    """Everything between the sharded tables' rows and the loss; subclasses add what is predicted.

    Args:
        replicated: small tables, one copy on every rank.
        preprocessor, stack, norm: the parts in the order they run; norm is applied in FP32, to
            the rows that something is predicted from.
    """

    def __init__(
        self,
        *,
        replicated: ReplicatedTables,
        preprocessor: SequencePreprocessor,
        stack: HSTUStack,
        norm: nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.replicated = replicated
        self.preprocessor = preprocessor
        self.stack = stack
        self.norm = norm

    def encode(self, batch: SequenceBatch, embeddings: Mapping[str, Tensor]) -> EncodedBatch:
        """The batch after the stack; arguments as in `forward`."""
        rows = dict(embeddings) | self.replicated(batch.features, self.preprocessor.feature_names)
        sequence, layout = self.preprocessor(batch, rows)
        return EncodedBatch(encoded_TD=self.stack(sequence).values_TD, layout=layout, rows=rows)

    def normed(self, encoded: EncodedBatch, tokens_N: Tensor) -> Tensor:
        """(N, D) float32, the normalised rows of the tokens given, none of them twice."""
        rows_ND = take_rows(
            encoded.encoded_TD, tokens_N, dtype=torch.float32, backend=self.preprocessor.backend
        )
        return self.norm(rows_ND)

    @abstractmethod
    def num_labels(self, batch: SequenceBatch) -> Tensor:
        """Labels in the training loss of this batch, int64 scalar on its device.

        Known without a forward pass and without a wait for the device.
        """

    @abstractmethod
    def shared(self, batch: SequenceBatch, embeddings: Mapping[str, Tensor]) -> Shared | None:
        """What the parts of this step share, None where there is nothing.

        Collective: every rank calls it with its whole batch, be it empty.

        Args:
            batch: the whole batch of the step, not a part.
            embeddings: feature -> rows of the sharded tables for it.
        """

    @abstractmethod
    def forward(
        self,
        batch: SequenceBatch,
        embeddings: Mapping[str, Tensor],
        shared: Shared | None = None,
    ) -> Output:
        """Loss of a batch or of a part of it.

        Args:
            batch: all users of this rank's step, or some of them.
            embeddings: feature -> rows of the sharded tables, in batch order.
            shared: what `shared` gave for the whole batch.
        """


class SequenceModel(nn.Module):
    """Sharded tables and trunk; `forward` is both in one go, for evaluation and for tracing."""

    def __init__(self, tables: ShardedTables, trunk: Trunk) -> None:
        super().__init__()
        self.tables = tables
        self.trunk = trunk

    def forward(self, batch: SequenceBatch) -> Output:
        """See `Trunk.forward`."""
        return self.trunk(batch, lookup_results(self.tables(batch.features)))
