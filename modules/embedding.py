"""Embedding tables: large ones sharded by TorchRec, small ones replicated on every rank.

A sharded table updates its rows inside backward (TorchRec's fused optimizer); a replicated
one is an ordinary parameter that the dense optimizer updates. Both answer per feature with
one row per id, in the order of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One embedding table.

    Attributes:
        name: table name, unique in a model.
        feature_names: features that look ids up in this table.
        num_rows: rows; ids run from 0 to num_rows - 1.
        dim: width of a row.
        is_sharded: rows spread over ranks by TorchRec (True) or a copy on each rank (False).
        shard_by, placement, cache_ratio: how and where, as in ``EmbeddingArgs``.
    """

    name: str
    feature_names: tuple[str, ...]
    num_rows: int
    dim: int
    is_sharded: bool
    shard_by: str = "row_wise"
    placement: str = "device"
    cache_ratio: float = 0.2

    @property
    def module_name(self) -> str:
        """Its name inside a module, where names such as "items" or "type" are taken."""
        return f"table_{self.name}"


class ShardedTables(nn.Module):
    """The sharded tables, one EmbeddingCollection for each row width.

    Built on the meta device: ``training.sharding`` places and fills the rows. ``forward``
    stays traceable (no branch on data, nothing jagged), because TorchRec's pipelines trace
    the model down to these collections to start their input distribution early.
    """

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        super().__init__()
        by_dim: dict[int, list[EmbeddingConfig]] = {}
        for spec in specs:
            by_dim.setdefault(spec.dim, []).append(
                EmbeddingConfig(
                    name=spec.module_name,
                    num_embeddings=spec.num_rows,
                    embedding_dim=spec.dim,
                    feature_names=list(spec.feature_names),
                )
            )
        self.collections = nn.ModuleList(
            EmbeddingCollection(tables=tables, device=torch.device("meta"))
            for tables in by_dim.values()
        )

    def forward(self, features: KeyedJaggedTensor) -> list[dict[str, JaggedTensor]]:
        """One mapping (or TorchRec's promise of one) from feature to rows per collection."""
        return [collection(features) for collection in self.collections]


def lookup_results(results: Sequence[dict[str, JaggedTensor]]) -> dict[str, Tensor]:
    """Waits for the lookups of ``ShardedTables`` and merges them: feature -> (ids, dim) rows."""
    return {name: rows.values() for result in results for name, rows in result.items()}


class ReplicatedTables(nn.Module):
    """Small tables held whole on every rank, updated by the dense optimizer.

    Rows start at normal(0, init_std), as those of sharded tables do.

    Raises:
        ValueError: a spec that asks for sharding.
    """

    def __init__(self, specs: Sequence[TableSpec], *, init_std: float) -> None:
        super().__init__()
        for spec in specs:
            if spec.is_sharded:
                raise ValueError(f"table {spec.name} is sharded; ReplicatedTables holds copies")
        self._init_std = init_std
        self.specs = tuple(specs)
        self.tables = nn.ModuleDict(
            {spec.module_name: nn.Embedding(spec.num_rows, spec.dim) for spec in specs}
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the rows from torch's default generator: normal(0, init_std)."""
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=self._init_std)

    def forward(self, features: KeyedJaggedTensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Feature -> (ids, dim) rows, for those of the named features that these tables serve."""
        return {
            feature: self.tables[spec.module_name](features[feature].values())
            for spec in self.specs
            for feature in spec.feature_names
            if feature in names
        }

    def serves(self, feature: str) -> bool:
        """Whether one of these tables has the rows of a feature."""
        return any(feature in spec.feature_names for spec in self.specs)

    def weight(self, feature: str) -> Tensor:
        """(rows, dim), the whole table that serves a feature."""
        (spec,) = (spec for spec in self.specs if feature in spec.feature_names)
        return self.tables[spec.module_name].weight
