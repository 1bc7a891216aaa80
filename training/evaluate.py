"""Scores a whole split: every real event once, whatever the batch size and number of ranks."""

import itertools
import math

import torch
import torch.distributed as dist

from data.loader import SequenceLoader
from model.ranking import RankingModel
from modules.metrics import RankingMetrics
from training.distributed import World
from training.sharding import world_group


@torch.no_grad()
def evaluate(
    model: RankingModel, loader: SequenceLoader, *, world: World, max_batches: int | None = None
) -> dict[str, float]:
    """``loss`` and ranking metrics of a split, the same on every rank.

    The model comes back in the mode it was in; weights and random streams are untouched.
    Collective: every rank calls it.
    """
    objective = model.trunk.objective
    metrics = RankingMetrics(
        num_scores=objective.num_scores,
        num_classes=objective.num_outputs if objective.kind == "classes" else None,
        group=world_group(),
    )
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    was_training = model.training
    model.eval()
    try:
        for batch in itertools.islice(loader.epoch(0), max_batches):
            output = model(batch.to(world.device))
            totals[0] += output.loss_sum
            totals[1] += output.num_labels
            scores_EK = objective.scores(output.logits_EK)
            metrics.update(
                scores_EK=scores_EK,
                targets_EK=objective.targets(output.labels_E),
                user_ids_E=output.user_ids_E,
                labels_E=output.labels_E,
                class_probabilities_EC=output.logits_EK.double().softmax(dim=-1)
                if objective.kind == "classes"
                else None,
            )
    finally:
        model.train(was_training)
    dist.all_reduce(totals)
    loss_sum, num_labels = totals.tolist()
    return {"loss": loss_sum / num_labels if num_labels else math.nan} | metrics.compute()
