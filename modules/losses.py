"""What the models are trained on and how their outputs become scores.

One object owns the meaning of an output, so that the loss, the score and the target of a metric
cannot disagree: `RankingObjective` that of a label, `Similarity` that of a query and an item.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True)
class RankingObjective:
    """Loss, scores and binary targets of a ranking task.

    Labels arrive as one int64 per item event: a class id, or a bit mask with one bit per task.

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
        # Filled in on the device: torch.tensor would copy the number there and wait.
        return loss, torch.full((), num_labels, dtype=torch.int64, device=logits_EK.device)

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


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Score of an item for a query: <query, item> / temperature, in training and in evaluation.

    Attributes:
        temperature: divisor of the scores.
        is_normalized: both are brought to length 1 first, x / max(||x||, l2_norm_eps).
        l2_norm_eps: smallest length that is divided by.
    """

    temperature: float
    is_normalized: bool
    l2_norm_eps: float

    def embed(self, rows_ND: Tensor) -> Tensor:
        """Queries or items as they enter the inner product, (N, D)."""
        if not self.is_normalized:
            return rows_ND
        return F.normalize(rows_ND, dim=-1, eps=self.l2_norm_eps)

    def scores(self, query_UD: Tensor, item_ND: Tensor) -> Tensor:
        """Score of every item for every query, (U, N); both sides through `embed`."""
        return query_UD @ item_ND.T / self.temperature

    def paired_scores(self, query_ND: Tensor, item_ND: Tensor) -> Tensor:
        """Score of the n-th item for the n-th query, (N,); both sides through `embed`."""
        return (query_ND * item_ND).sum(dim=-1) / self.temperature


@dataclass(frozen=True, kw_only=True)
class SampledSoftmax:
    """Cross entropy of each target against itself and the negatives.

    A negative that is the target itself (an accidental hit) is left out of its row, so that
    nothing is pushed away and pulled near at once. Rows of scores are made in chunks of at most
    `max_chunk_elements`, and their gradients with them: memory does not grow with rows times
    negatives, and a chunk that fits the cache is read from there (2**18 on a CPU).
    """

    similarity: Similarity
    max_chunk_elements: int = 2**18

    def loss_sum(
        self,
        query_RD: Tensor,
        target_RD: Tensor,
        target_ids_R: Tensor,
        *,
        negative_MD: Tensor,
        negative_ids_M: Tensor,
        is_used_M: Tensor | None = None,
        is_counted_R: Tensor | None = None,
    ) -> Tensor:
        """Loss summed over the rows, float32 scalar; zero, with zero gradients, without rows.

        Args:
            query_RD, target_RD: a query and the embedding row of its target, not normalised.
            target_ids_R: ids of the targets, int64.
            negative_MD: embedding rows of the negatives, not normalised.
            negative_ids_M: their ids, int64, in rising order.
            is_used_M: False where a negative does not count (a repeat); None: all count.
            is_counted_R: False where a row does not count; None: all count.
        """
        embed = self.similarity.embed
        query_RD, target_RD = embed(query_RD.float()), embed(target_RD.float())
        weight_R = torch.ones_like(query_RD[:, 0])
        if is_counted_R is not None:
            weight_R = is_counted_R.to(weight_R.dtype)
        num_negatives = negative_ids_M.shape[0]
        if num_negatives == 0:
            return (query_RD.sum() + target_RD.sum() + negative_MD.sum()) * 0.0
        return _SampledCrossEntropy.apply(
            query_RD,
            target_RD,
            embed(negative_MD.float()),
            _Columns.of(target_ids_R, negative_ids_M, is_used_M),
            weight_R,
            self.similarity.temperature,
            max(1, self.max_chunk_elements // num_negatives),
        )


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Which negatives a row leaves out."""

    hit_R: Tensor
    """Column where the target's own id stands, or would stand."""
    is_hit_R: Tensor
    """Whether it stands there."""
    is_unused_M: Tensor | None

    @classmethod
    def of(cls, target_ids_R: Tensor, ids_M: Tensor, is_used_M: Tensor | None) -> "_Columns":
        # The first of equal ids: the others are repeats, which is_used_M leaves out already.
        hit_R = torch.searchsorted(ids_M, target_ids_R).clamp(max=ids_M.shape[0] - 1)
        return cls(
            hit_R=hit_R,
            is_hit_R=ids_M.index_select(0, hit_R) == target_ids_R,
            is_unused_M=None if is_used_M is None else ~is_used_M,
        )

    def mask_(self, scores_RM: Tensor, rows: slice) -> None:
        """Sets what the rows leave out to minus infinity."""
        hit_R1 = self.hit_R[rows].unsqueeze(1)
        kept_R1 = scores_RM.gather(1, hit_R1)
        kept_R1.masked_fill_(self.is_hit_R[rows].unsqueeze(1), -torch.inf)
        scores_RM.scatter_(1, hit_R1, kept_R1)
        if self.is_unused_M is not None:
            scores_RM.masked_fill_(self.is_unused_M, -torch.inf)


class _SampledCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of rows: three matrix products a chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        query_RD: Tensor,
        target_RD: Tensor,
        negative_MD: Tensor,
        columns: _Columns,
        weight_R: Tensor,
        temperature: float,
        chunk_rows: int,
    ) -> Tensor:
        scaled_RD = query_RD / temperature
        positive_R = (scaled_RD * target_RD).sum(dim=-1)
        loss_R = torch.empty_like(positive_R)
        grads = [torch.zeros_like(t) for t in (query_RD, target_RD, negative_MD)]
        query_grad_RD, target_grad_RD, negative_grad_MD = grads
        for begin in range(0, query_RD.shape[0], chunk_rows):
            rows = slice(begin, begin + chunk_rows)
            scores_RM = scaled_RD[rows] @ negative_MD.T
            columns.mask_(scores_RM, rows)
            top_R = torch.maximum(scores_RM.amax(dim=1), positive_R[rows])
            exp_RM = scores_RM.sub_(top_R.unsqueeze(1)).exp_()
            negatives_R = exp_RM.sum(dim=1)
            total_R = negatives_R + (positive_R[rows] - top_R).exp()
            loss_R[rows] = total_R.log() + top_R - positive_R[rows]
            # d loss / d score: the probability of each negative, minus all of it at the target.
            p_RM = exp_RM.mul_((weight_R[rows] / total_R).unsqueeze(1))
            at_target_R1 = -(weight_R[rows] * negatives_R / total_R).unsqueeze(1)
            query_grad_RD[rows] = p_RM @ negative_MD + at_target_R1 * target_RD[rows]
            target_grad_RD[rows] = at_target_R1 * scaled_RD[rows]
            negative_grad_MD.addmm_(p_RM.T, scaled_RD[rows])
        query_grad_RD.div_(temperature)
        ctx.save_for_backward(*grads)
        # Not a product: a row that does not count must not spoil the sum by being infinite.
        return torch.where(weight_R > 0, loss_R, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(saved * grad for saved in ctx.saved_tensors), None, None, None, None
