"""Checks of the embedding tables: their names, their features and their widths."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from configs.data_schema import (
    MAX_REPLICATED_ROWS,
    DatasetArgs,
    DynamicEmbeddingArgs,
    EmbeddingArgs,
)
from configs.rules import ConfigError, did_you_mean

if TYPE_CHECKING:
    from configs.schema import ExperimentArgs

_WIDTH_UNIT = 4
"""Rows of a sharded table are read in vectors of this many numbers (FBGEMM)."""


def check_tables(experiment: "ExperimentArgs", features: Sequence[str]) -> None:
    """Raises ConfigError for tables that clash; `features` are those of the data."""
    field = f"{type(experiment.dataset).__name__}.embedding_args"
    tables = experiment.dataset.embedding_args or ()
    _check_unique(field, tables)
    _check_shared_widths(field, tables, experiment)
    _check_features(field, tables, features)
    if isinstance(experiment.dataset, DatasetArgs):
        _check_default_names(field, tables, features)


def _check_unique(field: str, tables: Sequence[EmbeddingArgs]) -> None:
    seen: set[str] = set()
    for table in tables:
        for entry in (
            f"table {table.table_name!r}",
            *(f"feature {name!r}" for name in table.feature_names),
        ):
            if entry in seen:
                raise ConfigError(
                    f"{field} must name each table and each feature once, got {entry} twice; "
                    "rename or remove one",
                    field,
                )
            seen.add(entry)


def _check_shared_widths(
    field: str, tables: Sequence[EmbeddingArgs], experiment: "ExperimentArgs"
) -> None:
    network = experiment.network
    for table in tables:
        contextual = {name in experiment.contextual_feature_names for name in table.feature_names}
        if len(contextual) > 1 and network.item_embedding_dim != network.contextual_embedding_dim:
            raise ConfigError(
                f"{field} must not share table {table.table_name!r} between items or actions and "
                f"contextual features when NetworkArgs.item_embedding_dim = "
                f"{network.item_embedding_dim} and contextual_embedding_dim = "
                f"{network.contextual_embedding_dim} differ; use two tables",
                field,
                "NetworkArgs.item_embedding_dim",
                "NetworkArgs.contextual_embedding_dim",
            )


def _check_features(field: str, tables: Sequence[EmbeddingArgs], features: Sequence[str]) -> None:
    for table in tables:
        for name in table.feature_names:
            if name not in features:
                raise ConfigError(
                    f"{field} must name features of the data ({', '.join(features)}), got {name!r} "
                    f"in table {table.table_name!r}; {did_you_mean(name, features) or 'remove it'}",
                    field,
                )


def _check_default_names(
    field: str, tables: Sequence[EmbeddingArgs], features: Sequence[str]
) -> None:
    """A feature without a table of its own gets one that is called like the feature."""
    given = {name for table in tables for name in table.feature_names}
    for table in tables:
        if table.table_name in features and table.table_name not in given:
            raise ConfigError(
                f"{field} must not name a table like a feature that has no table of its own, got "
                f"table {table.table_name!r} for {', '.join(map(repr, table.feature_names))} while "
                f"feature {table.table_name!r} gets the default table {table.table_name!r}; rename "
                f"the table, or add {table.table_name!r} to its feature_names to share it",
                field,
            )


def check_item_rows(experiment: "ExperimentArgs") -> None:
    """Raises ConfigError where an evaluation of retrieval would not find whole rows of items."""
    if experiment.retrieval is None:
        return
    for table in experiment.dataset.embedding_args or ():
        if experiment.item_feature_name in table.feature_names and isinstance(
            table, DynamicEmbeddingArgs
        ):
            raise ConfigError(
                f"{type(experiment.dataset).__name__}.embedding_args must hold an EmbeddingArgs "
                f"for the items in retrieval, got DynamicEmbeddingArgs {table.table_name!r}; the "
                "whole catalogue is ranked, so each item needs its row",
                f"{type(experiment.dataset).__name__}.embedding_args",
            )
        is_cut = table.shard_by in ("column_wise", "planner")
        is_spread = table.sharding_type != "data_parallel"
        if experiment.item_feature_name in table.feature_names and is_cut and is_spread:
            raise ConfigError(
                f"EmbeddingArgs.shard_by of the item table {table.table_name!r} must be "
                f"'row_wise' or 'table_wise' for retrieval, got {table.shard_by!r}; each rank "
                "scores the whole rows that it holds: choose one of them",
                "EmbeddingArgs.shard_by",
                f"{type(experiment.dataset).__name__}.embedding_args",
            )


def check_widths(experiment: "ExperimentArgs") -> None:
    """Raises ConfigError for a sharded table whose rows its kernel cannot read."""
    network = experiment.network
    for feature in _sharded_features(experiment):
        kind = "contextual" if feature in experiment.contextual_feature_names else "item"
        own = getattr(network, f"{kind}_embedding_dim")
        name, width = ("hidden_size", network.hidden_size)
        if own is not None:
            name, width = f"{kind}_embedding_dim", own
        if width % _WIDTH_UNIT:
            fitting = width + _WIDTH_UNIT - width % _WIDTH_UNIT
            raise ConfigError(
                f"NetworkArgs.{name} must be a multiple of {_WIDTH_UNIT} as the width of the "
                f"sharded table of {feature!r}, got {width}; set NetworkArgs.{kind}_embedding_dim "
                f"= {fitting}, or EmbeddingArgs.sharding_type = 'data_parallel' for that table",
                f"NetworkArgs.{name}",
                f"{type(experiment.dataset).__name__}.embedding_args",
            )


def _sharded_features(experiment: "ExperimentArgs") -> Iterator[str]:
    """Features whose table is surely sharded; sizes that only the data knows are left out."""
    tables = experiment.dataset.embedding_args or ()
    given = {name: table for table in tables for name in table.feature_names}
    names = (experiment.action_feature_name, *experiment.contextual_feature_names)
    for feature in (experiment.item_feature_name, *filter(None, names)):
        table = given.get(feature)
        asked = None if table is None else table.sharding_type
        is_large = table is not None and table.item_vocab_size_or_capacity > MAX_REPLICATED_ROWS
        by_default = feature == experiment.item_feature_name or is_large
        if asked == "model_parallel" or (asked is None and by_default):
            yield feature
