"""Embedding tables: large ones sharded by TorchRec, small ones replicated on every rank.

A sharded table updates its rows inside backward (TorchRec's fused optimizer); a replicated
one is an ordinary parameter that the dense optimizer updates. Both answer per feature with
one row per id, in the order of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

_ID_RANGE = 2**63 - 1
# Odd, so multiplying by it modulo 2**63 gives every id another number; near 2**63 times the golden
# ratio, so consecutive ids land far apart.
_SPREAD = 0x4F1BBCDCBFA53E0B


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
        evict_strategy: None where ids are row numbers. "lru" or "lfu": ids are any numbers >= 0,
            get a row when training first meets them, and lose it to others when rows run out.
    """

    name: str
    feature_names: tuple[str, ...]
    num_rows: int
    dim: int
    is_sharded: bool
    shard_by: str = "row_wise"
    placement: str = "device"
    cache_ratio: float = 0.2
    evict_strategy: str | None = None

    @property
    def module_name(self) -> str:
        """Its name inside a module, where names such as "items" or "type" are taken."""
        return f"table_{self.name}"


class IdRows(MCHManagedCollisionModule):
    """TorchRec's map from ids to rows, for steps of any size.

    It knows each id from the first step on that looks it up. The last row of every rank belongs to
    ids that have none: those that evaluation meets first, and those that lost against others.
    """

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Takes note of the ids of a step. TorchRec makes room for the first step's number of
        them and a quarter more, and drops the rest."""
        num_ids = sum(feature.values().numel() for feature in features.values())
        if self.training and num_ids > self._input_history_buffer_size:
            self._init_history_buffers(features)
        return super().profile(features)

    def set_num_ranks(self, num_ranks: int) -> None:
        """Splits the ids into as many ranges as there are ranks; before it is sharded."""
        self._buckets = num_ranks


def spread_ids(ids: Tensor, id_range: int) -> Tensor:
    """Other numbers for ids in [0, 2**63), each its own, evenly over [0, id_range = 2**63 - 1]."""
    return (ids * _SPREAD) & id_range


class ShardedTables(nn.Module):
    """The sharded tables: one EmbeddingCollection for each row width, and one with a map of its
    ids for each dynamic table.

    Built on the meta device: ``training.sharding`` places and fills the rows. ``forward``
    stays traceable (no branch on data, nothing jagged), because TorchRec's pipelines trace
    the model down to these collections to start their input distribution early.

    Args:
        init_std: standard deviation of the row of an id that a dynamic table has just met.
    """

    def __init__(self, specs: Sequence[TableSpec], *, init_std: float = 0.02) -> None:
        super().__init__()
        by_dim: dict[int, list[EmbeddingConfig]] = {}
        for spec in specs:
            if spec.evict_strategy is None:
                by_dim.setdefault(spec.dim, []).append(_embedding_config(spec, init_std))
        self.collections = nn.ModuleList(
            EmbeddingCollection(tables=tables, device=torch.device("meta"))
            for tables in by_dim.values()
        )
        self.dynamic = nn.ModuleList(
            _dynamic_collection(spec, init_std) for spec in specs if spec.evict_strategy is not None
        )

    def forward(self, features: KeyedJaggedTensor) -> list[dict[str, JaggedTensor]]:
        """One mapping (or TorchRec's promise of one) from feature to rows per collection."""
        rows = [collection(features) for collection in self.collections]
        return rows + [collection(features)[0] for collection in self.dynamic]


def _embedding_config(spec: TableSpec, init_std: float) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=spec.module_name,
        num_embeddings=spec.num_rows,
        embedding_dim=spec.dim,
        feature_names=list(spec.feature_names),
        init_fn=partial(nn.init.normal_, std=init_std),
    )


def _dynamic_collection(spec: TableSpec, init_std: float) -> ManagedCollisionEmbeddingCollection:
    device = torch.device("meta")
    policy = {"lru": LRU_EvictionPolicy, "lfu": LFU_EvictionPolicy}[spec.evict_strategy or ""]
    config = _embedding_config(spec, init_std)
    id_rows = IdRows(
        zch_size=spec.num_rows,
        device=device,
        eviction_policy=policy(),
        eviction_interval=1,
        input_hash_size=_ID_RANGE,
        input_hash_func=spread_ids,
    )
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=[config], device=device),
        ManagedCollisionCollection({config.name: id_rows}, [config]),
    )


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
