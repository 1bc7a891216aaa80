"""Pipelines on two ranks: they end together, whatever number of samples there is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from data.batch import SequenceBatch
from data.loader import Datasets
from tests.support.experiments import (
    FirstSamples,
    cpu_world,
    synthetic_experiment,
    users_of_one_length,
)
from tests.support.two_ranks import TwoRanks
from training import step as step_module
from training.distributed import World
from training.pipeline import build_pipeline
from training.step import StepResult, TrainStep
from training.trainer import Trainer

NUM_CANDIDATES = 3


class ShortTrainer(Trainer):
    """A trainer whose folds hold the first `count` samples only."""

    count = 0

    def _datasets(self) -> Datasets:
        whole = super()._datasets()
        folds = {
            fold: FirstSamples(getattr(whole, fold), self.count)
            for fold in ("train", "validation", "test")
        }
        return dataclasses.replace(whole, **folds)


def _epoch_of(
    rank: int,
    world_size: int,
    folder: str,
    pipeline_type: str,
    count: int,
    shard_by: str = "row_wise",
) -> Any:
    """One epoch over `count` samples at 2 a rank, with an evaluation after every step."""
    settings = {
        "train_batch_size": 2,
        "eval_batch_size": 2,
        "max_train_iters": None,
        "num_epochs": 1,
        "eval_interval": 1,
        "ckpt_save_interval": 0,
        "pipeline_type": pipeline_type,
    }
    experiment = synthetic_experiment(folder, trainer=settings, dataset=users_of_one_length())
    tables = tuple(
        dataclasses.replace(table, shard_by=shard_by)
        for table in experiment.dataset.embedding_args or ()
    )
    dataset = dataclasses.replace(experiment.dataset, embedding_args=tables)
    experiment = dataclasses.replace(experiment, dataset=dataset)
    trainer_class = type("Short", (ShortTrainer,), {"count": count})
    seen: list[int] = []
    steps: list[StepResult] = []
    plain = TrainStep.__call__

    def watched(self: TrainStep, batch: SequenceBatch, **options: Any) -> StepResult:
        seen.extend(batch.sample_ids_B[batch.is_real].tolist())
        steps.append(plain(self, batch, **options))
        return steps[-1]

    TrainStep.__call__ = watched
    try:
        trainer = trainer_class(experiment, world=cpu_world(rank, world_size))
        figures = trainer.fit()
    finally:
        TrainStep.__call__ = plain
    return {
        "seen": seen,
        "losses": [step.loss for step in steps],
        "num_samples": [step.num_samples for step in steps],
        "num_events": figures["num_events"],
        "figures": figures,
        "dense": [p.detach().clone() for p in trainer.model.module.trunk.parameters()],
    }


@pytest.mark.parametrize("count", range(1, 10))
def test_ranks_end_at_the_same_step_and_lose_no_sample(
    two_ranks: TwoRanks, run_folder: str, count: int
) -> None:
    """5 samples are 2 + 2 and 1 + 0: the second rank joins the last step without any."""
    outcomes = {}
    for pipeline_type in ("none", "native", "prefetch"):
        first, second = outcomes[pipeline_type] = two_ranks.run(
            _epoch_of, run_folder, pipeline_type, count
        )
        num_steps = -(-count // 4)
        assert len(first["losses"]) == len(second["losses"]) == num_steps
        assert sorted(first["seen"] + second["seen"]) == list(range(count))
        assert first["num_samples"] == second["num_samples"]
        assert sum(first["num_samples"]) == count
        assert first["num_events"] == second["num_events"] == NUM_CANDIDATES * count
    for overlapped in ("native", "prefetch"):  # without caches the latter prefetches nothing
        for plain, ahead in zip(outcomes["none"], outcomes[overlapped], strict=True):
            for name in ("seen", "losses"):
                assert plain[name] == ahead[name]
            assert all(map(torch.equal, plain["dense"], ahead["dense"]))


@pytest.mark.parametrize("shard_by", ["table_wise", "column_wise", "planner"])
def test_a_rank_without_users_waits_for_nobody(
    two_ranks: TwoRanks, run_folder: str, shard_by: str
) -> None:
    """Five users at two a rank, however the tables are cut."""
    plain = two_ranks.run(_epoch_of, run_folder, "none", 5, shard_by)
    ahead = two_ranks.run(_epoch_of, run_folder, "native", 5, shard_by)
    assert plain[0]["num_samples"] == ahead[1]["num_samples"] == [4, 1]
    assert [found["losses"] for found in plain] == [found["losses"] for found in ahead]
    assert plain[0]["figures"] == ahead[1]["figures"]


def test_the_next_batch_is_collated_while_the_device_works(
    run_folder: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches fill the pipeline; each later one comes before a step's wait, not after it."""
    told: list[str] = []
    plain = step_module.finite_flag_wait

    def wait(rows_of_ranks: torch.Tensor) -> list[list[float]]:
        told.append("wait")
        return plain(rows_of_ranks)

    monkeypatch.setattr(step_module, "finite_flag_wait", wait)
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    step = TrainStep(trainer.model.module, trainer.optimizer)
    pipeline = build_pipeline(
        "native", step, model=trainer.model, optimizer=trainer.optimizer, device=world.device
    )

    def four() -> Iterator[SequenceBatch]:
        for batch in itertools.islice(trainer.loaders["train"].epoch(0), 4):
            told.append("fetch")
            yield batch

    feed = four()
    while True:
        try:
            pipeline.progress(feed)
        except StopIteration:
            break
    assert told == ["fetch", "fetch", "fetch", "wait", "fetch", "wait", "wait", "wait"]
