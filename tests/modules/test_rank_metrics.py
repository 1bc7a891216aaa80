"""HR, NDCG and MRR from ranks, counted by hand (S29)."""

from __future__ import annotations

import math

import pytest
import torch

from modules.rank_metrics import (
    RetrievalMetrics,
    cutoffs,
    hit_rate,
    mean_reciprocal_rank,
    ndcg,
)

RANKS = [1, 2, 10, 11]


@pytest.mark.parametrize(
    ("rank", "hit", "gain"), [(1, 1, 1.0), (2, 1, 0.6309), (10, 1, 0.2891), (11, 0, 0.0)]
)
def test_one_rank_at_the_cut_of_ten(rank: int, hit: int, gain: float) -> None:
    ranks = torch.tensor([rank])
    assert hit_rate(ranks, k=10) == hit
    assert ndcg(ranks, k=10) == pytest.approx(gain, abs=5e-5)
    assert mean_reciprocal_rank(ranks) == pytest.approx(1 / rank)


def test_figures_are_means_over_all_targets() -> None:
    ranks = torch.tensor(RANKS)
    assert hit_rate(ranks, k=10) == 0.75
    gains = 1 + 1 / math.log2(3) + 1 / math.log2(11)
    assert ndcg(ranks, k=10) == pytest.approx(gains / 4, abs=1e-12)
    assert mean_reciprocal_rank(ranks) == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11) / 4)


@pytest.mark.parametrize("k", [1, 5, 10, 1000])
def test_never_outside_zero_and_one(k: int) -> None:
    ranks = torch.arange(1, 60)
    assert 0 < ndcg(ranks, k=k) <= hit_rate(ranks, k=k) <= 1
    assert ndcg(torch.ones(3, dtype=torch.int64), k=k) == 1


def test_cuts_are_those_named_and_ten() -> None:
    assert cutoffs(["HR@5", "ndcg@200", "MRR", "HR@10"]) == (5, 10, 200)
    assert cutoffs(["MRR"]) == (10,)


def collected(order: list[int], *, sizes: list[int], names: list[str]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    ranks = torch.randint(1, 80, (len(order),), generator=generator)[order]
    losses = torch.rand(len(order), generator=generator, dtype=torch.float64)[order]
    metrics = RetrievalMetrics(names)
    for part in zip(ranks.split(sizes), losses.split(sizes), strict=True):
        metrics.update(ranks_E=part[0], losses_E=part[1])
    return metrics.compute()


def test_the_same_bits_in_any_order_and_batches() -> None:
    order = list(range(40))
    names = ["HR@20"]
    expected = collected(order, sizes=[40], names=names)
    assert set(expected) == {
        *("loss", "num_events", "hr@10", "ndcg@10", "hr@20", "ndcg@20", "hr@50", "mrr")
    }
    assert expected["num_events"] == 40
    assert collected(order[::-1], sizes=[1, 0, 7, 32], names=names) == expected


def test_each_computation_starts_empty() -> None:
    metrics = RetrievalMetrics(["HR@10"])
    metrics.update(ranks_E=torch.tensor([1]), losses_E=torch.tensor([0.5]))
    assert metrics.compute()["hr@10"] == 1.0
    empty = metrics.compute()
    assert empty.pop("num_events") == 0
    assert all(math.isnan(value) for value in empty.values())
