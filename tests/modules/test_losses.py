"""RankingObjective: loss, scores and targets read a label the same way."""

from __future__ import annotations

import pytest
import torch

from modules.losses import RankingObjective

CLASSES = RankingObjective(kind="classes", num_outputs=5, positive_from=3)
BINARY = RankingObjective(kind="binary", num_outputs=1, positive_from=3)
TASKS = RankingObjective(kind="tasks", num_outputs=3, positive_from=1)


def test_classes_are_positive_from_rating_four() -> None:
    labels = torch.tensor([0, 2, 3, 4])
    assert CLASSES.targets(labels).tolist() == [[0], [0], [1], [1]]
    assert BINARY.targets(labels).tolist() == [[0], [0], [1], [1]]


def test_task_k_is_bit_k() -> None:
    assert TASKS.targets(torch.tensor([0b101, 0b010, 0])).tolist() == [
        [1, 0, 1],
        [0, 1, 0],
        [0, 0, 0],
    ]


def test_score_of_classes_is_the_probability_of_a_positive_one() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [9.0, 0.0, 0.0, 0.0, 0.0]])
    expected = logits.double().softmax(-1)[:, 3:].sum(-1, keepdim=True)
    torch.testing.assert_close(CLASSES.scores(logits), expected)
    assert CLASSES.scores(logits).shape == (2, 1)


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
def test_a_lone_logit_is_always_squashed(value: float) -> None:
    """Also when it looks like a probability, as 0 and 1 do."""
    logits = torch.tensor([[value]])
    assert BINARY.scores(logits).item() == pytest.approx(torch.sigmoid(logits).item())


@pytest.mark.parametrize("objective", [CLASSES, BINARY, TASKS], ids=lambda o: o.kind)
def test_loss_is_a_sum_over_labels(objective: RankingObjective) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, objective.num_outputs, generator=generator)
    labels = torch.randint(0, 5, (7,), generator=generator)
    total, count = objective.loss_sum(logits, labels)
    parts = [objective.loss_sum(logits[i : i + 1], labels[i : i + 1]) for i in range(7)]
    torch.testing.assert_close(total, sum(loss for loss, _ in parts))
    assert int(count) == sum(int(number) for _, number in parts)
    assert int(count) == (21 if objective.kind == "tasks" else 7)


@pytest.mark.parametrize("objective", [CLASSES, BINARY, TASKS], ids=lambda o: o.kind)
def test_no_event_gives_zero_loss_and_zero_gradient(objective: RankingObjective) -> None:
    logits = torch.zeros(0, objective.num_outputs, requires_grad=True)
    loss, count = objective.loss_sum(logits, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape
