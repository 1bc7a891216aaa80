"""Exact ranking metrics over a whole evaluation set.

Predictions of every real event are kept and scored once at the end, so the figures do not
depend on batch size, world size or the order in which ranks saw the events.
"""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from modules.gather import gather_ragged


def grouped_auc(scores_E: Tensor, targets_E: Tensor, groups_E: Tensor) -> float:
    """Unweighted mean over groups of each group's AUC (GAUC); ties count one half.

    Groups with a single kind of label have no AUC and are left out; NaN if none is left.

    Args:
        scores_E: float64 scores. targets_E: 0 or 1. groups_E: int64 group of each event.

    Source: Mann-Whitney U with mid-ranks; GAUC as in Deep Interest Network (arXiv
    1706.06978), here unweighted.
    """
    scores, targets = scores_E.cpu().numpy(), targets_E.cpu().numpy().astype(np.float64)
    _, group = np.unique(groups_E.cpu().numpy(), return_inverse=True)
    order = np.lexsort((scores, group))
    scores, targets, group = scores[order], targets[order], group[order]
    size = np.bincount(group)
    first = np.repeat(np.cumsum(size) - size, size)
    position = np.arange(len(scores)) - first + 1.0
    new_tie = np.ones(len(scores), dtype=bool)
    new_tie[1:] = (scores[1:] != scores[:-1]) | (group[1:] != group[:-1])
    tie = np.cumsum(new_tie) - 1
    mid_rank = (np.bincount(tie, weights=position) / np.bincount(tie))[tie]
    num_positive = np.bincount(group, weights=targets)
    num_negative = size - num_positive
    rank_sum = np.bincount(group, weights=mid_rank * targets)
    mixed = (num_positive > 0) & (num_negative > 0)
    if not mixed.any():
        return math.nan
    u_statistic = rank_sum - num_positive * (num_positive + 1) / 2
    return float((u_statistic[mixed] / (num_positive * num_negative)[mixed]).mean())


def log_loss(scores_E: Tensor, targets_E: Tensor) -> float:
    """Mean binary cross entropy in nats; scores are kept one float64 step away from 0 and 1."""
    eps = torch.finfo(torch.float64).eps
    scores_E = scores_E.double().clamp(eps, 1 - eps)
    return float(torch.nn.functional.binary_cross_entropy(scores_E, targets_E.double()))


def normalized_entropy(scores_E: Tensor, targets_E: Tensor) -> float:
    """Log-loss over the entropy of the base rate (NE); NaN when only one label occurs.

    Source: He et al., Practical Lessons from Predicting Clicks on Ads at Facebook (2014), eq. 1.
    """
    rate = float(targets_E.double().mean())
    if rate in (0.0, 1.0):
        return math.nan
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    return log_loss(scores_E, targets_E) / entropy


def area_under_curve(scores_E: Tensor, targets_E: Tensor) -> float:
    """Exact AUC over all events, ties one half; NaN when only one label occurs.

    Our own rank statistic because it sums in float64: libraries that accumulate counts in float32
    stop counting at 2^24 events.
    """
    return grouped_auc(scores_E, targets_E, torch.zeros_like(targets_E))


def multiclass_auc(probabilities_EC: Tensor, labels_E: Tensor) -> float:
    """Mean AUC of each class against the rest, over the classes that have both (macro)."""
    per_class = [
        area_under_curve(probabilities_EC[:, label], (labels_E == label).long())
        for label in range(probabilities_EC.size(1))
    ]
    return _mean_of_known(per_class)


def _mean_of_known(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


class RankingMetrics:
    """Collects an evaluation's predictions and turns them into figures at the end.

    Args:
        num_scores: how many scores an event has (one a task).
        num_classes: number of softmax classes, or None where the head has none.
        group: process group over which the events are spread, None for one process.
    """

    def __init__(
        self,
        *,
        num_scores: int,
        num_classes: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._num_scores = num_scores
        self._num_classes = num_classes
        self._group = group
        self._rows: list[Tensor] = []

    def update(
        self,
        *,
        scores_EK: Tensor,
        targets_EK: Tensor,
        user_ids_E: Tensor,
        labels_E: Tensor,
        class_probabilities_EC: Tensor | None = None,
    ) -> None:
        """Add events: probabilities in 0..1, binary targets, raw user ids and class labels."""
        columns = [scores_EK, targets_EK, user_ids_E.unsqueeze(-1), labels_E.unsqueeze(-1)]
        if self._num_classes is not None and class_probabilities_EC is not None:
            columns.append(class_probabilities_EC)
        # float64 holds every integer below 2^53 exactly, so one matrix can carry ids as well.
        self._rows.append(torch.cat([c.detach().double() for c in columns], dim=-1))

    def compute(self) -> dict[str, float]:
        """Figures over all ranks' events, the same on each rank; the collected events are dropped.

        Keys: ``num_events``, ``auc``, ``gauc``, ``ne``, ``logloss``, ``accuracy``; with several
        tasks these are means over the tasks that have them, and ``auc_task0``... follow;
        ``auc_multiclass`` (macro, one against the rest) where the head has classes. A prediction
        is right where the likeliest class is the label (the first of equally likely ones), or,
        without classes, where probability >= .5 says what the binary target says.
        """
        rows = self._gather()
        self._rows = []
        num_scores = self._num_scores
        scores_EK = rows[:, :num_scores]
        targets_EK = rows[:, num_scores : 2 * num_scores].long()
        users_E, labels_E = rows[:, 2 * num_scores].long(), rows[:, 2 * num_scores + 1].long()
        figures: dict[str, float] = {"num_events": len(rows)}
        if not len(rows):
            return figures | dict.fromkeys(("auc", "gauc", "ne", "logloss", "accuracy"), math.nan)
        tasks = [
            _task_figures(scores_EK[:, task], targets_EK[:, task], users_E)
            for task in range(num_scores)
        ]
        for name in tasks[0]:
            figures[name] = _mean_of_known([task[name] for task in tasks])
        if num_scores > 1:
            for index, task_figures in enumerate(tasks):
                figures |= {f"{name}_task{index}": value for name, value in task_figures.items()}
        if self._num_classes is not None and rows.shape[1] > 2 * num_scores + 2:
            probabilities = rows[:, 2 * num_scores + 2 :]
            figures["accuracy"] = _mean(probabilities.argmax(dim=-1) == labels_E)
            figures["auc_multiclass"] = multiclass_auc(probabilities, labels_E)
        return figures

    def _gather(self) -> Tensor:
        width = 2 * self._num_scores + 2 + (self._num_classes or 0)
        local = torch.cat(self._rows) if self._rows else torch.zeros(0, width).double()
        if self._group is None:
            return local.cpu()
        return gather_ragged(local, group=self._group)[0].cpu()


def _task_figures(scores_E: Tensor, targets_E: Tensor, users_E: Tensor) -> dict[str, float]:
    return {
        "auc": area_under_curve(scores_E, targets_E),
        "gauc": grouped_auc(scores_E, targets_E, users_E),
        "ne": normalized_entropy(scores_E, targets_E),
        "logloss": log_loss(scores_E, targets_E),
        "accuracy": _mean((scores_E >= 0.5).long() == targets_E),
    }


def _mean(is_right_E: Tensor) -> float:
    return float(is_right_E.double().mean())
