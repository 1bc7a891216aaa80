"""Tables: who holds which rows."""

from __future__ import annotations

import pytest
import torch
from torchrec import KeyedJaggedTensor

from modules.embedding import ReplicatedTables, ShardedTables, TableSpec


def spec(name: str, *, features: tuple[str, ...], dim: int = 4, sharded: bool = False) -> TableSpec:
    return TableSpec(name=name, feature_names=features, num_rows=6, dim=dim, is_sharded=sharded)


def test_replicated_rows_come_in_batch_order() -> None:
    tables = ReplicatedTables(
        [spec("t", features=("a", "b")), spec("u", features=("c",), dim=2)], init_std=0.1
    )
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["c", "a", "b"],
        values=torch.tensor([5, 0, 0, 3, 3]),
        lengths=torch.tensor([1, 0, 1, 1, 0, 2]),
    )
    rows = tables(features, ["a", "b", "c"])
    shared = tables.tables["table_t"].weight
    assert torch.equal(rows["a"], shared[[0, 0]])
    assert torch.equal(rows["b"], shared[[3, 3]])
    assert rows["c"].shape == (1, 2)


def test_id_zero_is_an_ordinary_row() -> None:
    """Padding has no ids at all, so it cannot share a row with an item."""
    tables = ReplicatedTables([spec("t", features=("a",))], init_std=0.1)
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["a"], values=torch.tensor([0]), lengths=torch.tensor([1, 0, 0])
    )
    tables(features, ["a"])["a"].sum().backward()
    gradient = tables.tables["table_t"].weight.grad
    assert gradient is not None
    assert gradient[0].abs().sum() > 0
    assert gradient[1:].abs().sum() == 0


def test_sharded_tables_group_by_width() -> None:
    specs = [spec(n, features=(n,), dim=d, sharded=True) for n, d in [("a", 4), ("b", 8), ("c", 4)]]
    tables = ShardedTables(specs)
    assert [len(c.embedding_configs()) for c in tables.collections] == [2, 1]


def test_sharded_table_is_no_replica() -> None:
    with pytest.raises(ValueError, match="table big is sharded"):
        ReplicatedTables([spec("big", features=("a",), sharded=True)], init_std=0.1)


def test_names_that_modules_have_taken_are_fine() -> None:
    specs = [spec(name, features=(name,)) for name in ("items", "type", "forward")]
    tables = ReplicatedTables(specs, init_std=0.02)
    weight = tables.tables["table_items"].weight
    assert 0.005 < float(weight.detach().std()) < 0.05
