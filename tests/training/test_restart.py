"""Processes that torchrun starts again find the run folder of their own job, and no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from configs.schema import ExperimentArgs
from tests.support.experiments import synthetic_experiment
from training.distributed import World
from training.restart import resumed_after_restart
from training.startup import check_checkpoints
from training.trainer import Trainer


def train(experiment: ExperimentArgs, world: World, launcher: str) -> Trainer:
    """A run of another launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", launcher)
        trainer = Trainer(experiment, world=world)
        trainer.fit()
    return trainer


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


SHORT = {"max_train_iters": 2, "ckpt_save_interval": 1}


def test_a_first_start_is_left_as_it_is(
    run_folder: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = synthetic_experiment(run_folder, trainer=SHORT)
    train(experiment, world, "ours")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    assert resumed_after_restart(experiment, world=world) is experiment


@pytest.mark.usefixtures("restarted")
def test_a_restarted_job_goes_on_from_its_own_newest_checkpoint(
    run_folder: str, world: World
) -> None:
    experiment = synthetic_experiment(run_folder, trainer=SHORT)
    train(experiment, world, "ours")
    train(experiment, world, "another")  # runs/run-2: newer, but not this job's
    resumed = resumed_after_restart(experiment, world=world)
    assert resumed.trainer.resume == str(Path(run_folder) / "checkpoints/step-00000002")
    assert dataclasses.replace(resumed.trainer, resume=None) == experiment.trainer


@pytest.mark.usefixtures("restarted")
def test_without_a_checkpoint_it_starts_as_the_first_did(
    run_folder: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = synthetic_experiment(run_folder, trainer=SHORT)
    train(experiment, world, "another")
    assert resumed_after_restart(experiment, world=world) is experiment
    assert "it starts anew" in caplog.text


@pytest.mark.usefixtures("restarted")
def test_a_named_checkpoint_may_be_gone_after_a_restart(run_folder: str, world: World) -> None:
    """keep-last has dropped it, and --resume still names it."""
    train(synthetic_experiment(run_folder, trainer={"max_train_iters": 1}), world, "before")
    named = Path(run_folder) / "checkpoints/step-00000001"
    values = {"max_train_iters": 4, "ckpt_save_interval": 1, "resume": str(named)}
    experiment = synthetic_experiment("elsewhere", trainer=values)
    train(experiment, world, "ours")
    assert not named.exists()
    check_checkpoints(experiment, evaluate=None)
    resumed = resumed_after_restart(experiment, world=world)
    assert resumed.trainer.resume == str(named.with_name("step-00000004"))


@pytest.mark.usefixtures("restarted")
def test_a_warm_start_is_not_made_twice(run_folder: str, world: World) -> None:
    first = synthetic_experiment(run_folder, trainer={"max_train_iters": 1})
    train(first, world, "before")
    weights = str(Path(run_folder) / "checkpoints/step-00000001")
    warm = synthetic_experiment(f"{run_folder}-warm", trainer=SHORT | {"ckpt_load_dir": weights})
    train(warm, world, "ours")
    resumed = resumed_after_restart(warm, world=world).trainer
    assert resumed.ckpt_load_dir is None
    assert resumed.resume == f"{run_folder}-warm/checkpoints/step-00000002"
