"""RankingMetrics and its parts, against pair counts and scikit-learn."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score
from torch import Tensor

from modules.metrics import (
    RankingMetrics,
    area_under_curve,
    grouped_auc,
    log_loss,
    multiclass_auc,
    normalized_entropy,
)
from tests.support.two_ranks import TwoRanks

NUM_EVENTS = 103


def events(seed: int = 0, num_events: int = NUM_EVENTS) -> dict[str, Tensor]:
    """Scores with many ties, labels that follow them, users of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.rand(num_events, generator=generator, dtype=torch.float64) * 20).round() / 20
    noise = torch.rand(num_events, generator=generator, dtype=torch.float64)
    users = torch.randint(0, 9, (num_events,), generator=generator) ** 2
    return {"scores": scores, "targets": (scores + noise > 1).long(), "users": users}


def pair_count(scores: Tensor, targets: Tensor) -> float:
    positive, negative = scores[targets == 1].tolist(), scores[targets == 0].tolist()
    wins = sum((p > n) + 0.5 * (p == n) for p, n in itertools.product(positive, negative))
    return wins / (len(positive) * len(negative))


def collected(
    data: dict[str, Tensor], *, batch: int, metrics: RankingMetrics | None = None
) -> dict[str, float]:
    metrics = metrics or RankingMetrics(num_scores=1)
    for begin in range(0, len(data["scores"]), batch):
        part = slice(begin, begin + batch)
        metrics.update(
            scores_EK=data["scores"][part].unsqueeze(-1),
            targets_EK=data["targets"][part].unsqueeze(-1),
            user_ids_E=data["users"][part],
            labels_E=data["targets"][part],
        )
    return metrics.compute()


def test_auc_is_the_share_of_ordered_pairs() -> None:
    data = events()
    expected = pair_count(data["scores"], data["targets"])
    assert area_under_curve(data["scores"], data["targets"]) == pytest.approx(expected, abs=1e-12)
    assert expected == pytest.approx(roc_auc_score(data["targets"], data["scores"]), abs=1e-12)


def test_gauc_is_the_mean_over_users_with_both_labels() -> None:
    data = events()
    per_user = []
    for user in data["users"].unique():
        chosen = data["users"] == user
        if 0 < data["targets"][chosen].sum() < chosen.sum():
            per_user.append(pair_count(data["scores"][chosen], data["targets"][chosen]))
    assert len(per_user) >= 5
    found = grouped_auc(data["scores"], data["targets"], data["users"])
    assert found == pytest.approx(np.mean(per_user), abs=1e-12)


def test_one_kind_of_label_has_no_auc() -> None:
    scores, ones = torch.tensor([0.1, 0.2]).double(), torch.tensor([1, 1])
    assert math.isnan(area_under_curve(scores, ones))
    assert math.isnan(grouped_auc(scores, ones, torch.tensor([0, 1])))
    assert math.isnan(normalized_entropy(scores, ones))


def test_constant_scores_are_chance() -> None:
    data = events()
    constant = torch.full_like(data["scores"], 0.3)
    assert area_under_curve(constant, data["targets"]) == 0.5
    assert grouped_auc(constant, data["targets"], data["users"]) == 0.5


def test_log_loss_and_ne_agree_with_their_definitions() -> None:
    data = events()
    scores = data["scores"].clamp(0.01, 0.99)
    expected = sklearn_log_loss(data["targets"].numpy(), scores.numpy())
    assert log_loss(scores, data["targets"]) == pytest.approx(expected, abs=1e-12)
    rate = float(data["targets"].double().mean())
    base = torch.full_like(scores, rate)
    assert normalized_entropy(base, data["targets"]) == pytest.approx(1.0, abs=1e-12)
    assert log_loss(torch.tensor([1.0, 0.0]), torch.tensor([0, 1])) < math.inf


def test_multiclass_auc_is_macro_one_against_the_rest() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 4, (200,), generator=generator)
    logits = torch.randn(200, 4, generator=generator).double()
    logits[torch.arange(200), labels] += 1
    probabilities = logits.softmax(-1)
    expected = roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert multiclass_auc(probabilities, labels) == pytest.approx(expected, abs=1e-12)
    extended = torch.cat([probabilities, torch.zeros(200, 1).double()], dim=1)
    assert multiclass_auc(extended, labels) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("batch", [1, 8, 1000])
def test_figures_do_not_depend_on_the_batch_size(batch: int) -> None:
    data = events()
    assert collected(data, batch=batch) == collected(data, batch=NUM_EVENTS)


def test_each_computation_starts_empty() -> None:
    metrics = RankingMetrics(num_scores=1)
    first = collected(events(0), batch=8, metrics=metrics)
    second = collected(events(1), batch=8, metrics=metrics)
    assert second == collected(events(1), batch=8)
    assert first["auc"] != second["auc"]
    assert metrics.compute()["num_events"] == 0


def test_covers_more_than_a_window_of_events() -> None:
    data = events(num_events=5000)
    expected = roc_auc_score(data["targets"], data["scores"])
    assert collected(data, batch=64)["auc"] == pytest.approx(expected, abs=1e-12)


def test_tasks_keep_their_names() -> None:
    data = events()
    generator = torch.Generator().manual_seed(1)
    random_scores = torch.rand(NUM_EVENTS, generator=generator, dtype=torch.float64)
    metrics = RankingMetrics(num_scores=2)
    metrics.update(
        scores_EK=torch.stack([data["targets"].double(), random_scores], dim=1),
        targets_EK=torch.stack([data["targets"], data["targets"]], dim=1),
        user_ids_E=data["users"],
        labels_E=data["targets"],
    )
    figures = metrics.compute()
    assert figures["auc_task0"] == 1.0
    assert figures["auc_task1"] == pytest.approx(0.5, abs=0.15)
    assert figures["auc"] == pytest.approx((1 + figures["auc_task1"]) / 2)


def test_each_task_is_scored_against_its_own_labels() -> None:
    """Tasks of different label rates, each scored perfectly: any mix-up would show."""
    data = events()
    targets = torch.stack([data["targets"], (data["users"] > 40).long()], dim=1)
    rates = targets.double().mean(dim=0).tolist()
    assert abs(rates[0] - rates[1]) > 0.1
    metrics = RankingMetrics(num_scores=2)
    for begin in range(0, NUM_EVENTS, 8):
        part = slice(begin, begin + 8)
        metrics.update(
            scores_EK=0.25 + 0.5 * targets[part].double(),
            targets_EK=targets[part],
            user_ids_E=data["users"][part],
            labels_E=targets[part] @ torch.tensor([1, 2]),
        )
    figures = metrics.compute()
    for task, rate in enumerate(rates):
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        assert figures[f"auc_task{task}"] == 1.0
        assert figures[f"logloss_task{task}"] == pytest.approx(-math.log(0.75))
        assert figures[f"ne_task{task}"] == pytest.approx(-math.log(0.75) / entropy)


def _share(rank: int, world_size: int, sizes: list[int]) -> dict[str, Any]:
    import torch.distributed as dist

    data = events()
    begin = sum(sizes[:rank])
    part = {key: value[begin : begin + sizes[rank]] for key, value in data.items()}
    metrics = RankingMetrics(num_scores=1, group=dist.GroupMember.WORLD)
    return collected(part, batch=8, metrics=metrics)


@pytest.mark.parametrize("sizes", [[52, 51], [103, 0], [1, 102]], ids=str)
def test_figures_do_not_depend_on_the_number_of_ranks(
    two_ranks: TwoRanks, sizes: list[int]
) -> None:
    expected = collected(events(), batch=8)
    for found in two_ranks.run(_share, sizes):
        assert found["num_events"] == NUM_EVENTS
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_task_with_one_kind_of_label_is_left_out_of_the_mean() -> None:
    data = events()
    metrics = RankingMetrics(num_scores=2)
    metrics.update(
        scores_EK=torch.stack([data["scores"], data["scores"]], dim=1),
        targets_EK=torch.stack([data["targets"], torch.ones_like(data["targets"])], dim=1),
        user_ids_E=data["users"],
        labels_E=data["targets"],
    )
    figures = metrics.compute()
    assert math.isnan(figures["auc_task1"])
    assert figures["auc"] == figures["auc_task0"]


def test_accuracy_is_the_share_of_labels_that_are_the_likeliest_class() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.4, 0.4, 0.2]]).double()
    metrics = RankingMetrics(num_scores=1, num_classes=3)
    for event, label in enumerate([0, 1, 0]):  # right, wrong, the first of equals
        row = slice(event, event + 1)
        metrics.update(
            scores_EK=probabilities[row, 1:].sum(dim=1, keepdim=True),
            targets_EK=torch.tensor([[int(label >= 1)]]),
            user_ids_E=torch.tensor([event]),
            labels_E=torch.tensor([label]),
            class_probabilities_EC=probabilities[row],
        )
    assert metrics.compute()["accuracy"] == pytest.approx(2 / 3)


def test_accuracy_without_classes_splits_at_one_half_and_is_given_for_each_task() -> None:
    metrics = RankingMetrics(num_scores=2)
    metrics.update(
        scores_EK=torch.tensor([[0.5, 0.9], [0.49, 0.1], [0.2, 0.6], [0.8, 0.2]]).double(),
        targets_EK=torch.tensor([[1, 0], [0, 1], [1, 1], [1, 0]]),
        user_ids_E=torch.arange(4),
        labels_E=torch.tensor([1, 2, 3, 1]),
    )
    figures = metrics.compute()
    assert figures["accuracy_task0"] == 0.75
    assert figures["accuracy_task1"] == 0.5
    assert figures["accuracy"] == 0.625
