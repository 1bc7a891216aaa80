"""Balanced batches on two ranks: other users on each, the same training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.experiments import FirstSamples, cpu_world, synthetic_experiment
from tests.support.two_ranks import TwoRanks
from training.step import TrainStep
from training.trainer import Trainer


def _train(rank: int, world_size: int, folder: str, is_balanced: bool, count: int) -> Any:
    """Two epochs over `count` users at 4 a rank: losses, users and attention work a step."""
    experiment = synthetic_experiment(
        folder,
        trainer={
            "train_batch_size": 4,
            "eval_batch_size": 4,
            "enable_balanced_shuffler": is_balanced,
        },
        optimizer={"optimizer_str": "sgd", "sparse_optimizer_str": "sgd", "learning_rate": 0.1},
    )
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    for fold in ("train", "test"):
        loader = trainer.loaders[fold]
        loader.dataset = FirstSamples(loader.dataset, count)
    trainer.model.train()
    step = TrainStep(trainer.model.module, trainer.optimizer)
    results, users, work = [], [], []
    for epoch in range(2):
        for batch in trainer.loaders["train"].epoch(epoch):
            users.append(batch.sample_ids_B[batch.is_real].tolist())
            work.append(int((batch.host_lengths_KB.sum(axis=0) ** 2).sum()))
            results.append(step(batch))
    figures = trainer.evaluate("test")
    return {
        "losses": [result.loss for result in results],
        "num_samples": [result.num_samples for result in results],
        "users": users,
        "work": work,
        "figures": figures,
    }


@pytest.mark.parametrize("count", [16, 19, 25])
def test_balancing_changes_who_computes_and_nothing_else(
    run_folder: str, two_ranks: TwoRanks, count: int
) -> None:
    """19 users are 8, 8 and 3; of 25 the last one is alone."""
    plain = two_ranks.run(_train, run_folder, False, count)
    balanced = two_ranks.run(_train, run_folder, True, count)
    assert plain[0]["users"] != balanced[0]["users"]
    for step, ids in enumerate(zip(plain[0]["users"], plain[1]["users"], strict=True)):
        dealt = balanced[0]["users"][step] + balanced[1]["users"][step]
        assert sorted(dealt) == sorted(sum(ids, []))
    for name in ("losses", "num_samples"):
        assert balanced[0][name] == balanced[1][name]
        assert balanced[0][name] == pytest.approx(plain[0][name], rel=1e-5)
    assert balanced[0]["figures"]["num_events"] == plain[0]["figures"]["num_events"]
    for name, value in plain[0]["figures"].items():
        assert balanced[1]["figures"][name] == pytest.approx(value, rel=1e-5), name

    def slowest(found: list[dict[str, Any]]) -> float:
        return float(np.maximum(found[0]["work"], found[1]["work"]).sum())

    assert slowest(balanced) < slowest(plain)
