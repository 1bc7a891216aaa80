"""Scores a whole split: every real event once, whatever the batch size and number of ranks."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from configs.schema import ExperimentArgs
from data.dataset import Datasets
from data.loader import SequenceLoader
from model.build import item_table, table_specs
from model.ranking import RankingTrunk
from model.trunk import SequenceModel
from modules.metrics import RankingMetrics
from training.distributed import World
from training.evaluate_retrieval import RetrievalEvaluator


class Evaluator(Protocol):
    """Turns a split into figures."""

    def __call__(self, loader: SequenceLoader, max_batches: int | None = None) -> dict[str, float]:
        """``loss``, ``num_events`` and the task's metrics, the same on every rank.

        The model comes back in the mode it was in; weights and random streams are untouched.
        Collective: every rank calls it, with equally many batches.

        Args:
            loader: this rank's share of the split.
            max_batches: look only at so many; None for all.
        """


def build_evaluator(
    experiment: ExperimentArgs,
    model: nn.Module,
    datasets: Datasets,
    *,
    world: World,
    group: dist.ProcessGroup | None,
) -> Evaluator:
    """The evaluator of the experiment's task.

    Args:
        model: the model, its tables already sharded (a DistributedModelParallel).
        datasets: what the model was built for; splits come with each call.
        group: ranks that have other users each; None in a run of one process.
    """
    evaluator: Evaluator
    if experiment.retrieval is None:
        evaluator = RankingEvaluator(cast(SequenceModel, model.module), world=world, group=group)
    else:
        evaluator = RetrievalEvaluator(
            model,
            item_table=item_table(table_specs(experiment, datasets.facts), datasets.facts),
            metric_names=(
                *experiment.retrieval.eval_metrics,
                experiment.trainer.early_stopping_metric or "MRR",
            ),
            world=world,
            group=group,
        )
    return _Quietly(evaluator, model)


class RankingEvaluator:
    """Loss and ranking metrics: what the head says about each held-out event."""

    def __init__(
        self, model: SequenceModel, *, world: World, group: dist.ProcessGroup | None
    ) -> None:
        self._model = model
        self._world = world
        self._group = group

    def __call__(self, loader: SequenceLoader, max_batches: int | None = None) -> dict[str, float]:
        """See ``Evaluator``."""
        trunk = cast(RankingTrunk, self._model.trunk)
        objective = trunk.objective
        metrics = RankingMetrics(
            num_scores=objective.num_scores,
            num_classes=objective.num_outputs if objective.kind == "classes" else None,
            group=self._group,
        )
        totals = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        for batch in itertools.islice(loader.epoch(0), max_batches):
            output = self._model(batch.to(self._world.device))
            totals[0] += output.loss_sum
            totals[1] += output.num_labels
            metrics.update(
                scores_EK=objective.scores(output.logits_EK),
                targets_EK=objective.targets(output.labels_E),
                user_ids_E=output.user_ids_E,
                labels_E=output.labels_E,
                class_probabilities_EC=output.logits_EK.double().softmax(dim=-1)
                if objective.kind == "classes"
                else None,
            )
        dist.all_reduce(totals, group=self._group)
        loss_sum, num_labels = totals.tolist()
        return {"loss": loss_sum / num_labels if num_labels else math.nan} | metrics.compute()


class _Quietly:
    """An evaluator that runs without gradients, in evaluation mode, and puts the mode back."""

    def __init__(self, evaluator: Evaluator, model: nn.Module) -> None:
        self._evaluator = evaluator
        self._model = model

    def __call__(self, loader: SequenceLoader, max_batches: int | None = None) -> dict[str, float]:
        with torch.no_grad(), _evaluation_mode(self._model):
            return self._evaluator(loader, max_batches)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
