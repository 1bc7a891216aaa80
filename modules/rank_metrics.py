"""Figures of ranked retrieval: what the ranks of the held-out targets are worth.

Ranks count from 1, and every cut is rank <= k.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def hit_rate(ranks_E: Tensor, *, k: int) -> float:
    """Share of targets among the first k (HR@k)."""
    return _mean((ranks_E <= k).double())


def ndcg(ranks_E: Tensor, *, k: int) -> float:
    """Mean of 1 / log2(rank + 1) over all targets, 0 beyond rank k (NDCG@k of one relevant item).

    Source: Järvelin and Kekäläinen, Cumulated gain-based evaluation (2002), with one relevant item
    the ideal gain is 1.
    """
    gain_E = 1.0 / torch.log2(ranks_E.double() + 1.0)
    return _mean(torch.where(ranks_E <= k, gain_E, 0.0))


def mean_reciprocal_rank(ranks_E: Tensor) -> float:
    """Mean of 1 / rank over all targets, without a cut (MRR)."""
    return _mean(1.0 / ranks_E.double())


def _mean(values_E: Tensor) -> float:
    """Exactly rounded sum over the number: in any order of the events the same bits."""
    return math.fsum(values_E.tolist()) / values_E.numel() if values_E.numel() else math.nan


def cutoffs(metric_names: Iterable[str]) -> tuple[int, ...]:
    """The k of "HR@k" and "NDCG@k" among the names, in any case, and always 10; rising."""
    named = {int(name.split("@")[1]) for name in metric_names if "@" in name}
    return tuple(sorted(named | {10}))


class RetrievalMetrics:
    """Collects an evaluation's ranks and losses and turns them into figures at the end.

    Args:
        metric_names: figures that must be there, such as "HR@10"; both HR and NDCG are given at
            every k that is named, and at 10; HR also at 50.
    """

    def __init__(self, metric_names: Iterable[str]) -> None:
        self._cutoffs = cutoffs(metric_names)
        self._ranks: list[Tensor] = []
        self._losses: list[Tensor] = []

    def update(self, *, ranks_E: Tensor, losses_E: Tensor) -> None:
        """Add targets: ranks from 1, int64, and their cross entropies."""
        self._ranks.append(ranks_E)
        self._losses.append(losses_E.double())

    def compute(self) -> dict[str, float]:
        """``loss``, ``num_events``, ``hr@k``, ``ndcg@k``, ``mrr``; what was collected is dropped.

        All but the number are NaN where there was no target.
        """
        none = torch.zeros(0)
        ranks_E = torch.cat(self._ranks).cpu() if self._ranks else none.long()
        losses_E = torch.cat(self._losses).cpu() if self._losses else none.double()
        self._ranks, self._losses = [], []
        figures: dict[str, float] = {"loss": _mean(losses_E), "num_events": len(ranks_E)}
        for k in self._cutoffs:
            figures[f"hr@{k}"] = hit_rate(ranks_E, k=k)
            figures[f"ndcg@{k}"] = ndcg(ranks_E, k=k)
        figures["hr@50"] = hit_rate(ranks_E, k=50)
        return figures | {"mrr": mean_reciprocal_rank(ranks_E)}
