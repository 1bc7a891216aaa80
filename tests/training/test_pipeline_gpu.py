"""Pipelines on a GPU, with the rows in host memory behind a cache: the same losses."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.experiments import synthetic_experiment
from training.checkpoint import load_weights
from training.distributed import World, process_group
from training.pipeline import build_pipeline
from training.step import TrainStep
from training.trainer import Trainer

pytestmark = pytest.mark.gpu

NUM_EPOCHS = 6


def losses(folder: str, world: World, pipeline_type: str, placement: str) -> list[float]:
    plain = synthetic_experiment(
        folder,
        trainer={"pipeline_type": pipeline_type},
        optimizer={"sparse_optimizer_str": "rowwise_adagrad"},
    )
    tables = tuple(
        dataclasses.replace(
            table, item_vocab_size_or_capacity=5000, placement=placement, cache_ratio=0.1
        )
        if table.table_name == "item"
        else table
        for table in plain.dataset.embedding_args or ()
    )
    dataset = dataclasses.replace(plain.dataset, embedding_args=tables)
    trainer = Trainer(dataclasses.replace(plain, dataset=dataset), world=world)
    trainer.model.train()
    pipeline = build_pipeline(
        pipeline_type,
        TrainStep(trainer.model.module, trainer.optimizer),
        model=trainer.model,
        optimizer=trainer.optimizer,
        device=world.device,
    )
    found: list[float] = []
    for epoch in range(NUM_EPOCHS):  # the pipeline drains after each
        feed = trainer.loaders["train"].epoch(epoch)
        with suppress(StopIteration):
            while True:
                found.append(pipeline.progress(feed).loss)
        pipeline.detach()
    return found


def test_the_same_losses_under_each_pipeline(run_folder: str) -> None:
    assert "RANK" not in os.environ
    with process_group() as world:
        expected = losses(run_folder, world, "none", "device")
        assert len(expected) == 4 * NUM_EPOCHS
        for pipeline_type in ("none", "native", "prefetch"):
            for placement in ("device", "host", "host_cached"):
                found = losses(run_folder, world, pipeline_type, placement)
                assert found == pytest.approx(expected, rel=1e-5), (pipeline_type, placement)


def test_a_checkpoint_replaces_rows_that_are_cached(run_folder: str) -> None:
    """Figures after six steps, four more, and a return to the six."""
    plain = synthetic_experiment(
        run_folder,
        trainer={"pipeline_type": "prefetch", "ckpt_save_interval": 6, "max_train_iters": 6},
        optimizer={"sparse_optimizer_str": "rowwise_adagrad", "learning_rate": 0.05},
    )
    tables = tuple(
        dataclasses.replace(table, placement="host_cached", cache_ratio=0.5)
        if table.table_name == "item"
        else table
        for table in plain.dataset.embedding_args or ()
    )
    dataset = dataclasses.replace(plain.dataset, embedding_args=tables)
    with process_group() as world:
        trainer = Trainer(dataclasses.replace(plain, dataset=dataset), world=world)
        expected = trainer.fit()
        trainer.model.train()
        step = TrainStep(trainer.model.module, trainer.optimizer, num_steps=6)
        for batch in trainer.loaders["train"].epoch(3):
            step(batch.to(world.device))
        assert trainer.evaluate("test")["loss"] != pytest.approx(expected["loss"], rel=1e-4)
        load_weights(trainer.model, Path(run_folder) / "checkpoints" / "step-00000006")
        assert trainer.evaluate("test") == pytest.approx(expected, rel=1e-6)
