"""Negatives: which items, whose rows, and where their gradient goes back to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.negatives import InBatchNegatives, _mixed, random_negatives
from tests.support.two_ranks import TwoRanks

WIDTH = 3
IDS = [7, 3, 7, -1, 9, 3, 0]


def table_rows(ids: Sequence[int]) -> Tensor:
    """The row of item i is (i, i + .25, i + .5): a row tells whose it is. -1 has one, too."""
    return torch.tensor([[i + 0.25 * n for n in range(WIDTH)] for i in ids]).reshape(-1, WIDTH)


def test_each_item_of_the_batch_once_in_rising_order() -> None:
    rows = table_rows(IDS).requires_grad_()
    negatives = InBatchNegatives()(torch.tensor(IDS), rows)
    assert negatives.ids_M.tolist() == [0, 3, 7, 9]
    assert torch.equal(negatives.rows_MD, table_rows([0, 3, 7, 9]))
    assert negatives.is_used_M is None
    assert negatives.rows_MD.is_leaf and negatives.rows_MD.requires_grad


def test_the_gradient_goes_to_one_row_of_each_item() -> None:
    rows = table_rows(IDS).requires_grad_()
    negatives = InBatchNegatives()(torch.tensor(IDS), rows)
    for _ in range(2):  # two parts of a step
        (negatives.rows_MD * torch.tensor([[1.0], [2.0], [3.0], [4.0]])).sum().backward()
    negatives.backward()
    per_id: dict[int, float] = {}
    assert rows.grad is not None
    for item, grad in zip(IDS, rows.grad, strict=True):
        assert grad.unique().numel() == 1
        per_id[item] = per_id.get(item, 0.0) + float(grad[0])
    assert per_id == {0: 2.0, 3: 4.0, 7: 6.0, 9: 8.0, -1: 0.0}


def test_kept_repeats_are_marked_and_weigh_nothing() -> None:
    """The way of a GPU, which does not wait for the number of distinct items."""
    rows = table_rows(IDS).requires_grad_()
    negatives = InBatchNegatives(drops_repeats=False)(torch.tensor(IDS), rows)
    assert negatives.ids_M.tolist() == sorted(IDS)
    assert negatives.is_used_M is not None
    assert negatives.ids_M[negatives.is_used_M].tolist() == [0, 3, 7, 9]
    # The first of equal ids is the one in use: that is where an accidental hit is looked for.
    first = torch.searchsorted(negatives.ids_M, torch.tensor([0, 3, 7, 9]))
    assert negatives.is_used_M[first].all()
    assert torch.equal(negatives.rows_MD, table_rows(sorted(IDS)))


@pytest.mark.parametrize("drops_repeats", [True, False])
def test_a_choice_is_of_distinct_items_and_follows_the_ids_alone(drops_repeats: bool) -> None:
    ids = torch.arange(200).repeat(2)
    draws = []
    for order in (torch.arange(400), torch.randperm(400)):
        negatives = InBatchNegatives(num_negatives=50, drops_repeats=drops_repeats, seed=4)(
            ids[order], table_rows(ids[order].tolist())
        )
        used = slice(None) if negatives.is_used_M is None else negatives.is_used_M
        assert torch.equal(negatives.rows_MD, table_rows(negatives.ids_M.tolist()))
        draws.append(negatives.ids_M[used].tolist())
    assert draws[0] == draws[1] == sorted(set(draws[0]))
    assert len(draws[0]) == 50
    assert 60 < sum(draws[0]) / 50 < 140, "neither the lowest nor the highest ids are preferred"


def test_another_seed_or_other_items_give_another_choice() -> None:
    ids = torch.arange(200)
    rows = table_rows(ids.tolist())
    chosen = [
        InBatchNegatives(num_negatives=50, seed=seed)(ids[:last], rows[:last]).ids_M.tolist()
        for seed, last in ((0, 200), (1, 200), (0, 199))
    ]
    assert chosen[0] != chosen[1]
    assert chosen[0] != chosen[2]


def test_batches_of_the_same_items_still_choose_differently() -> None:
    """A dense batch may hold the whole catalogue in every step: only the repeats differ then."""
    ids = torch.arange(200)
    chosen = set()
    for repeated in range(5):
        ids_E = torch.cat([ids, torch.tensor([repeated])])
        negatives = InBatchNegatives(num_negatives=50)(ids_E, table_rows(ids_E.tolist()))
        chosen.add(tuple(negatives.ids_M.tolist()))
    assert len(chosen) == 5


@pytest.mark.parametrize("drops_repeats", [True, False])
def test_fewer_items_than_asked_for_are_all_taken(drops_repeats: bool) -> None:
    asked = InBatchNegatives(num_negatives=6, drops_repeats=drops_repeats)
    negatives = asked(torch.tensor(IDS), table_rows(IDS))
    used = slice(None) if negatives.is_used_M is None else negatives.is_used_M
    assert negatives.ids_M[used].tolist() == [0, 3, 7, 9]


def test_every_item_is_as_likely() -> None:
    """One of ten items, over 3000 batches: about 300 each (standard deviation 16)."""
    ids, counts = torch.arange(10), torch.zeros(10)
    for batch in range(3000):
        ids_E = torch.cat([ids, torch.tensor([100 + batch])])  # an item that tells batches apart
        negatives = InBatchNegatives(num_negatives=2)(ids_E, table_rows(ids_E.tolist()))
        counts += torch.isin(ids, negatives.ids_M)
    expected = 3000 * 2 / 11
    assert (counts - expected).abs().max() < 5 * (expected * 9 / 11) ** 0.5


def test_the_hash_is_splitmix64() -> None:
    """Against Python integers, where nothing overflows."""

    def reference(x: int) -> int:
        mask = 2**64 - 1
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    values = [0, 1, 5, 2**40 + 3, -1, -(2**50)]
    found = [int(value) % 2**64 for value in _mixed(torch.tensor(values))]
    assert found == [reference(value % 2**64) for value in values]


def test_random_negatives_are_sorted_with_their_rows() -> None:
    ids = [5, 1, 8]
    rows = table_rows(ids).requires_grad_()
    negatives = random_negatives(torch.tensor(ids), rows)
    assert negatives.ids_M.tolist() == [1, 5, 8]
    assert torch.equal(negatives.rows_MD, table_rows([1, 5, 8]))
    (negatives.rows_MD * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    negatives.backward()
    assert rows.grad[:, 0].tolist() == [2.0, 1.0, 3.0]


def _on_ranks(
    rank: int, world_size: int, shares: list[list[int]], settings: dict[str, Any]
) -> dict[str, Any]:
    rows = table_rows(shares[rank]).requires_grad_()
    ids = torch.tensor(shares[rank], dtype=torch.int64)
    negatives = InBatchNegatives(**settings)(ids, rows)
    weight = (rank + 1.0) * (1 + torch.arange(len(negatives.ids_M)))
    (negatives.rows_MD * weight.unsqueeze(1)).sum().backward()
    own = negatives.rows_MD.grad
    assert own is not None
    before = own.clone()
    negatives.backward()
    assert torch.equal(own, before), "this rank's own gradient is not mixed with others'"
    return {
        "ids": negatives.ids_M.tolist(),
        "used": None if negatives.is_used_M is None else negatives.is_used_M.tolist(),
        "rows": negatives.rows_MD.detach(),
        "grad": torch.zeros(len(ids)) if rows.grad is None else rows.grad[:, 0],
    }


@pytest.mark.parametrize(
    "settings",
    [{}, {"drops_repeats": False}, {"num_negatives": 2}],
    ids=["distinct", "repeats kept", "chosen"],
)
@pytest.mark.parametrize(
    "shares",
    [[[7, 3, 7], [9, 3, 0, 7, 1]], [[7, 3], []], [[], [4, 4, 2]], [[], []], [[-1], [5]]],
    ids=["both", "second empty", "first empty", "nobody", "nothing lent"],
)
def test_two_ranks_share_the_items_of_both(
    two_ranks: TwoRanks, shares: list[list[int]], settings: dict[str, Any]
) -> None:
    (alone,) = [_on_ranks(0, 1, [sum(shares, [])], settings)]
    pair = two_ranks.run(_on_ranks, shares, settings)
    for found in pair:
        assert found["ids"] == alone["ids"]
        assert found["used"] == alone["used"]
        assert torch.equal(found["rows"], alone["rows"])
    # Rank 0 weighs with 1, rank 1 with 2: together three times what one process does alone.
    assert torch.equal(torch.cat([found["grad"] for found in pair]), 3 * alone["grad"])
