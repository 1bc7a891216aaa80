"""What the ranking head is trained on and how its logits become scores.

One objective object owns the meaning of a label, so that the loss, the score and the
binary target of a metric cannot disagree. Labels arrive as one int64 per item event:
a class id, or a bit mask with one bit per task.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RankingObjective:
    """Loss, scores and binary targets of a ranking task.

    Attributes:
        kind: "classes" (softmax over num_outputs classes), "binary" (one logit; positive
            when the class id is at least ``positive_from``) or "tasks" (one logit a task;
            task k is bit k of the label).
        num_outputs: width K of the logits.
        positive_from: first class id that counts as positive for AUC and log-loss.
    """

    kind: Literal["classes", "binary", "tasks"]
    num_outputs: int
    positive_from: int

    @property
    def num_scores(self) -> int:
        """How many scores an event gets: one, or one for each task."""
        return self.num_outputs if self.kind == "tasks" else 1

    def loss_sum(self, logits_EK: Tensor, labels_E: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss (float32 scalar) and the number of labels in it (int64 scalar).

        The caller divides by the number of labels over all ranks, so that a label weighs
        the same wherever it lands. With no event both are zero and gradients are zero, not None.
        """
        logits_EK = logits_EK.float()
        if self.kind == "classes":
            loss = F.cross_entropy(logits_EK, labels_E, reduction="sum")
            num_labels = labels_E.numel()
        else:
            targets_EK = self.targets(labels_E).to(logits_EK.dtype)
            loss = F.binary_cross_entropy_with_logits(logits_EK, targets_EK, reduction="sum")
            num_labels = targets_EK.numel()
        return loss, torch.tensor(num_labels, device=logits_EK.device)

    def scores(self, logits_EK: Tensor) -> Tensor:
        """Probability of the positive label, (E, num_scores) float64.

        Converted here, once and always: metric libraries guess from the value range whether
        a batch still holds logits, and guess differently from batch to batch.
        """
        logits_EK = logits_EK.double()
        if self.kind == "classes":
            positive = logits_EK.softmax(dim=-1)[:, self.positive_from :]
            return positive.sum(dim=-1, keepdim=True).clamp(0.0, 1.0)
        return logits_EK.sigmoid()

    def targets(self, labels_E: Tensor) -> Tensor:
        """Binary targets of the scores, (E, num_scores) int64."""
        if self.kind == "tasks":
            bits_K = torch.arange(self.num_outputs, device=labels_E.device)
            return (labels_E.unsqueeze(-1) >> bits_K) & 1
        return (labels_E >= self.positive_from).long().unsqueeze(-1)
