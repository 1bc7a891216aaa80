"""Trainer: whole runs, and the ways to run them that must not change a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import ExperimentArgs
from tests.support.experiments import (
    cpu_world,
    movielens_experiment,
    replicated_items,
    synthetic_experiment,
    write_movielens,
)
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.step import TrainStep
from training.trainer import Trainer

DROPOUT = {"hidden_dropout": 0.2, "input_dropout": 0.1}


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("movielens"))


def records(folder: str | Path, split: str) -> list[dict[str, Any]]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]


def losses(folder: str | Path) -> list[float]:
    return [record["loss"] for record in records(folder, "train")]


def watch_samples(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Sample ids of every batch that a step trains on, in order."""
    seen: list[list[int]] = []
    plain = TrainStep.__call__

    def watched(self: TrainStep, batch: Any, **options: Any) -> Any:
        seen.append([sample for sample in batch.sample_ids_B.tolist() if sample >= 0])
        return plain(self, batch, **options)

    monkeypatch.setattr(TrainStep, "__call__", watched)
    return seen


def test_run_folder_tells_the_run(run_folder: str, world: World) -> None:
    experiment = synthetic_experiment(
        run_folder, trainer={"eval_interval": 3, "max_train_iters": 6, "log_interval": 2}
    )
    figures = Trainer(experiment, world=world).fit()
    folder = Path(run_folder)
    assert (folder / "operative_config.gin").exists()
    assert (folder / "checkpoints" / "step-00000006" / "state.json").exists()
    assert list((folder / "tensorboard").iterdir())
    train = records(folder, "train")
    assert [record["step"] for record in train] == [2, 4, 6]
    expected = {"tokens_per_s", "samples_per_s", "lr", "grad_norm", "peak_mem_bytes", "loss"}
    assert expected <= set(train[0])
    assert [record["step"] for record in records(folder, "validation")] == [3, 6]
    (test,) = records(folder, "test")
    assert list(test)[:7] == ["step", "split", "loss", "auc", "gauc", "ne", "logloss"]
    assert test["auc"] == pytest.approx(figures["auc"])


def test_a_used_folder_is_never_overwritten(run_folder: str, world: World) -> None:
    experiment = synthetic_experiment(run_folder, trainer={"max_train_iters": 1})
    folders = []
    for _ in range(3):
        trainer = Trainer(experiment, world=world)
        trainer.fit()
        folders.append(str(trainer.folder))
    assert folders == [run_folder, f"{run_folder}-2", f"{run_folder}-3"]


def test_learns_the_planted_signal(run_folder: str, world: World) -> None:
    experiment = synthetic_experiment(
        run_folder,
        trainer={"max_train_iters": 120, "train_batch_size": 32, "log_interval": 20},
        dataset={"num_generated_batches": 30},
    )
    figures = Trainer(experiment, world=world).fit()
    assert losses(run_folder)[-1] < losses(run_folder)[0] - 0.1
    assert figures["auc"] > 0.65


@pytest.mark.parametrize(
    ("pipeline_type", "train_windows", "batch_size"), [("none", "all", 8), ("native", "random", 11)]
)
def test_resume_repeats_the_straight_run(
    movielens: Path,
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    pipeline_type: str,
    train_windows: str,
    batch_size: int,
) -> None:
    """12 steps = 7 + 5 in a new trainer, over an epoch end, with dropout and shuffling."""
    seen = watch_samples(monkeypatch)

    def experiment(folder: Path, **trainer: Any) -> ExperimentArgs:
        settings = {
            "max_train_iters": 12,
            "train_batch_size": batch_size,
            "pipeline_type": pipeline_type,
            "ckpt_save_interval": 7,
        }
        return movielens_experiment(
            movielens,
            str(folder),
            trainer=settings | trainer,
            dataset={"train_windows": train_windows},
            network=DROPOUT,
        )

    straight = Trainer(experiment(tmp_path / "straight"), world=world)
    batches_per_epoch = straight.loaders["train"].num_batches
    assert 7 < batches_per_epoch < 12, "the resumed part must cross an epoch end"
    expected = straight.fit()
    straight_samples = list(seen)
    assert straight_samples[:batches_per_epoch] != straight_samples[batches_per_epoch:]

    # A run that is interrupted after step 9: the file has records that the resume takes back.
    seen.clear()
    interrupted = Trainer(experiment(tmp_path / "resumed"), world=world)
    interrupted.num_steps = 9
    interrupted.fit()
    (tmp_path / "resumed/checkpoints/step-00000009/state.json").unlink()
    torch.manual_seed(99)
    resumed = Trainer(experiment(tmp_path / "resumed", resume="latest"), world=world)
    assert resumed.first_step == 7
    assert resumed.folder == (tmp_path / "resumed").resolve()
    del seen[7:]
    figures = resumed.fit()
    assert seen == straight_samples
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")
    assert figures == expected


def test_pipelines_agree_and_keep_folds_apart(
    movielens: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = {}
    for pipeline_type in ("none", "native"):
        seen = watch_samples(monkeypatch)
        settings = {
            "pipeline_type": pipeline_type,
            "num_epochs": 2,
            "max_train_iters": None,
            "eval_interval": 2,
            "max_eval_iters": 1,
        }
        folder = tmp_path / pipeline_type
        experiment = movielens_experiment(movielens, str(folder), trainer=settings)
        trainer = Trainer(experiment, world=world)
        figures = trainer.fit()
        train = trainer.loaders["train"]
        every_sample = sorted(range(train.num_samples))
        first, second = seen[: train.num_batches], seen[train.num_batches :]
        assert sorted(sum(first, [])) == every_sample
        assert sorted(sum(second, [])) == every_sample
        outcomes[pipeline_type] = (losses(folder), seen, figures)
        monkeypatch.undo()
    assert outcomes["none"] == outcomes["native"]


def test_evaluation_leaves_training_alone(tmp_path: Path, world: World, movielens: Path) -> None:
    found = []
    for interval in (100, 2):
        folder = tmp_path / str(interval)
        experiment = movielens_experiment(
            movielens, str(folder), trainer={"eval_interval": interval}, network=DROPOUT
        )
        Trainer(experiment, world=world).fit()
        found.append(losses(folder))
    assert found[0] == found[1]


def test_evaluating_twice_gives_the_same(run_folder: str, world: World) -> None:
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    assert trainer.evaluate("test") == trainer.evaluate("test")


def test_evaluation_does_not_depend_on_the_batch_size(run_folder: str, world: World) -> None:
    found = []
    for size in (1, 5, 64):
        experiment = synthetic_experiment(run_folder, trainer={"eval_batch_size": size})
        found.append(Trainer(experiment, world=world).evaluate("test"))
    for other in found[1:]:
        assert other["num_events"] == found[0]["num_events"]
        assert other == pytest.approx(found[0], rel=1e-6)


def _train_on_two(rank: int, world_size: int, folder: str, data: str) -> dict[str, Any]:
    trainer = Trainer(union_experiment(folder, data, batch_size=4), world=cpu_world(rank, 2))
    figures = trainer.fit()
    dense = {n: p.detach().clone() for n, p in trainer.model.module.trunk.named_parameters()}
    return {"figures": figures, "dense": dense}


def union_experiment(folder: str, data: str, *, batch_size: int) -> ExperimentArgs:
    return movielens_experiment(
        Path(data),
        folder,
        trainer={
            "max_train_iters": 20,
            "train_batch_size": batch_size,
            "eval_batch_size": 5,
            "eval_interval": 7,
        },
    )


def test_two_processes_equal_one_on_the_union_batch(
    movielens: Path, tmp_path: Path, world: World, two_ranks: TwoRanks
) -> None:
    one = Trainer(
        union_experiment(str(tmp_path / "one"), str(movielens), batch_size=8), world=world
    )
    expected = one.fit()
    results = two_ranks.run(_train_on_two, str(tmp_path / "two"), str(movielens))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert len(losses(tmp_path / "two")) == 20
    for result in results:
        assert result["figures"] == results[0]["figures"]
        assert result["figures"]["num_events"] == expected["num_events"]
        for name in ("auc", "gauc", "auc_multiclass"):
            assert result["figures"][name] == pytest.approx(expected[name], abs=1e-6)
        _assert_equal(result["dense"], results[0]["dense"])


def _assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"replicas of {name} drifted apart"


def test_leave_one_out_scores_the_held_out_event_of_each_user(
    movielens: Path, tmp_path: Path, world: World
) -> None:
    """Also without candidates in training, where the history is supervised."""
    for max_num_candidates in (0, 1):
        dataset = {"split": "leave_one_out", "max_num_candidates": max_num_candidates}
        experiment = movielens_experiment(
            movielens, str(tmp_path / f"run{max_num_candidates}"), dataset=dataset
        )
        figures = Trainer(experiment, world=world).evaluate("test")
        assert figures["num_events"] == 24


@pytest.mark.parametrize("pipeline_type", ["none", "native"])
def test_runs_without_any_sharded_table(tmp_path: Path, world: World, pipeline_type: str) -> None:
    experiment = synthetic_experiment(
        str(tmp_path / "run"), trainer={"pipeline_type": pipeline_type, "max_train_iters": 3}
    )
    Trainer(replicated_items(experiment), world=world).fit()
    assert len(losses(tmp_path / "run")) == 3


def test_final_figures_cover_the_whole_fold(tmp_path: Path, world: World) -> None:
    def experiment(limit: int | None) -> ExperimentArgs:
        trainer = {"max_train_iters": 2, "eval_interval": 1, "max_eval_iters": limit}
        return synthetic_experiment(str(tmp_path / str(limit)), trainer=trainer)

    for limit in (None, 1):
        Trainer(experiment(limit), world=world).fit()
    during, final = records(tmp_path / "1", "validation")
    assert during["num_events"] < final["num_events"]
    assert records(tmp_path / "1", "test") == records(tmp_path / "None", "test")


def test_evaluation_under_another_split_is_refused(
    movielens: Path, tmp_path: Path, world: World
) -> None:
    plain = movielens_experiment(movielens, str(tmp_path / "run"), trainer={"max_train_iters": 1})
    expected = Trainer(plain, world=world).fit()
    checkpoint = tmp_path / "run/checkpoints/step-00000001"
    found = Trainer(plain, world=world).evaluate_checkpoint(checkpoint)
    assert found["test"] == expected
    assert set(found) == {"validation", "test"}
    for changed in ({"split": "by_user"}, {"train_on_validation": True}):
        (field,) = changed
        other = movielens_experiment(movielens, str(tmp_path / "run"), dataset=changed)
        with pytest.raises(ValueError, match=rf"DatasetArgs.{field} must be .* as in"):
            Trainer(other, world=world).evaluate_checkpoint(checkpoint)


def test_validation_that_was_trained_on_is_not_reported(
    movielens: Path, tmp_path: Path, world: World
) -> None:
    experiment = movielens_experiment(
        movielens,
        str(tmp_path / "run"),
        trainer={"max_train_iters": 2, "eval_interval": 1},
        dataset={"train_on_validation": True},
    )
    Trainer(experiment, world=world).fit()
    assert records(tmp_path / "run", "validation") == []
    assert len(records(tmp_path / "run", "test")) == 1


@pytest.mark.parametrize(("start", "end"), [(1, 3), (2, 4), (3, 99)])
def test_profiled_steps_leave_a_trace(tmp_path: Path, world: World, start: int, end: int) -> None:
    trainer = {
        "max_train_iters": 4,
        "profile": True,
        "profile_step_start": start,
        "profile_step_end": end,
        "ckpt_save_interval": 0,
    }
    Trainer(synthetic_experiment(str(tmp_path / "run"), trainer=trainer), world=world).fit()
    trace = json.loads((tmp_path / "run/profile/rank0.json").read_text())
    names = [event["name"] for event in trace["traceEvents"]]
    num_steps = min(end, 5) - start
    assert sum(name.startswith("Optimizer.step#Adam") for name in names) == num_steps


def test_data_that_ends_early_is_an_error_not_a_shorter_run(tmp_path: Path, world: World) -> None:
    trainer = Trainer(
        synthetic_experiment(str(tmp_path / "run"), trainer={"max_train_iters": 4}), world=world
    )
    dataset = trainer.loaders["train"].dataset
    batches = iter([dataset.batch] * 2)

    def two_batches(*arguments: Any, **options: Any) -> Any:
        return next(batches)(*arguments, **options)

    dataset.batch = two_batches
    with pytest.raises(RuntimeError, match="ended after step 2, where batches up to step 4"):
        trainer.fit()
