"""Early stopping: when a run ends, whose weights are scored, and that a resume changes neither."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import ExperimentArgs
from data.loader import Datasets
from tests.support.experiments import (
    FirstSamples,
    cpu_world,
    retrieval_experiment,
    synthetic_experiment,
)
from tests.support.two_ranks import TwoRanks
from training.checkpoint import read_state
from training.distributed import World
from training.early_stopping import EarlyStopping
from training.step import TrainStep
from training.trainer import Trainer

# Validations after steps 2, 4, 6, ...: step 4 is the best, step 8 the second after it.
VALUES = [1.0, 0.5, 0.7, 0.6, 0.4, 0.8, 0.9, 0.9]


@pytest.mark.parametrize(
    ("metric", "values", "improves"),
    [
        ("auc", [0.5, 0.6, 0.6, 0.55, 0.7], [True, True, False, False, True]),
        ("ndcg@10", [0.1, 0.2], [True, True]),
        ("loss", [2.0, 1.0, 1.0, 1.5, 0.5], [True, True, False, False, True]),
        ("ne", [1.0, 0.9], [True, True]),
        ("logloss", [0.7, 0.8], [True, False]),
    ],
)
def test_a_metric_improves_in_its_own_direction(
    metric: str, values: list[float], improves: list[bool]
) -> None:
    stopping = EarlyStopping(metric, patience=9)
    assert [stopping.update(step, value) for step, value in enumerate(values)] == improves


def test_patience_counts_validations_in_a_row() -> None:
    stopping = EarlyStopping("auc", patience=2)
    over = []
    for step, value in enumerate([0.5, 0.4, 0.6, 0.5, 0.5]):
        stopping.update(step, value)
        over.append(stopping.is_over)
    assert over == [False, False, False, False, True]
    assert stopping.best_step == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_without_a_value_is_an_error_that_names_it(value: float) -> None:
    stopping = EarlyStopping("gauc", patience=2)
    stopping.update(1, 0.5)
    with pytest.raises(
        ValueError, match=r"early_stopping_metric .*'gauc' = (nan|inf) after step 2"
    ):
        stopping.update(2, value)


def test_a_metric_that_is_not_a_figure_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="'hr@7'.*choose one of these"):
        EarlyStopping("hr@7", patience=1).check({"loss": 1.0, "hr@10": 0.5, "num_events": 3})


def test_state_goes_on_and_another_metric_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    first = EarlyStopping("auc", patience=3)
    for step, value in enumerate([0.5, 0.7, 0.6]):
        first.update(step, value)
    state = json.loads(json.dumps(first.state_dict()))
    again = EarlyStopping("auc", patience=3)
    again.load_state_dict(state)
    assert again.state_dict() == first.state_dict()
    assert not again.update(3, 0.69)
    other = EarlyStopping("loss", patience=3)
    other.load_state_dict(state)
    assert other.best_step is None
    assert "'auc'" in caplog.text


def script(monkeypatch: pytest.MonkeyPatch, values: Iterable[float]) -> None:
    """Lets the validations of the next run have these values, one after the other."""
    given = iter(values)
    monkeypatch.setattr("training.trainer.from_main", lambda value, *, world: next(given))


def stopping_experiment(folder: Path, **trainer: Any) -> ExperimentArgs:
    settings = {
        "max_train_iters": 16,
        "eval_interval": 2,
        "early_stopping_metric": "loss",
        "early_stopping_patience": 2,
        "ckpt_keep_last": 1,
    }
    return synthetic_experiment(
        str(folder),
        trainer=settings | trainer,
        network={"hidden_dropout": 0.2},
        dataset={"num_generated_batches": 3},
    )


def records(folder: Path, *splits: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] in splits]


def story(folder: Path) -> list[dict[str, Any]]:
    """All records without what depends on the clock and the machine."""
    measured = ("tokens_per_s", "samples_per_s", "peak_mem_bytes")
    return [
        {key: value for key, value in record.items() if key not in measured}
        for record in records(folder, "train", "validation", "test")
    ]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_run_ends_when_it_should_and_scores_the_best_weights(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, VALUES)
    folder = tmp_path / "run"
    trainer = Trainer(stopping_experiment(folder), world=world)
    figures = trainer.fit()
    assert [record["step"] for record in records(folder, "train")] == list(range(1, 9))
    *during, validation = records(folder, "validation")
    (test,) = records(folder, "test")
    assert [record["step"] for record in during] == [2, 4, 6, 8]
    assert not any("best_step" in record for record in during)
    assert (validation["step"], validation["best_step"]) == (8, 4)
    assert (test["step"], test["best_step"]) == (8, 4)
    assert figures["best_step"] == 4
    assert figures["loss"] == test["loss"]
    assert validation["loss"] == pytest.approx(during[1]["loss"], rel=1e-6)
    assert validation["loss"] != pytest.approx(during[3]["loss"], rel=1e-6)

    assert names(folder) == ["best", "step-00000004", "step-00000008"]
    best = folder / "checkpoints" / "best"
    assert best.resolve().name == "step-00000004"
    evaluated = Trainer(stopping_experiment(folder), world=world).evaluate_checkpoint(best)
    assert evaluated["test"] | {"best_step": 4} == pytest.approx(figures, rel=1e-6)


def test_the_weights_of_the_last_step_can_be_the_best(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [0.9, 0.8])
    experiment = stopping_experiment(tmp_path / "run", max_train_iters=3)
    figures = Trainer(experiment, world=world).fit()
    assert figures["best_step"] == 3
    assert [r["step"] for r in records(tmp_path / "run", "validation")] == [2, 3, 3]
    assert names(tmp_path / "run") == ["best", "step-00000003"]


class InterruptionError(Exception):
    """What ends a run in the middle."""


@pytest.mark.parametrize("interrupted_after", [5, 6, 7])
def test_a_resume_before_the_stop_repeats_the_straight_run(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, interrupted_after: int
) -> None:
    def experiment(folder: str, **trainer: Any) -> ExperimentArgs:
        return stopping_experiment(tmp_path / folder, ckpt_save_interval=5, **trainer)

    script(monkeypatch, VALUES)
    expected = Trainer(experiment("straight"), world=world).fit()

    with monkeypatch.context() as patch:
        plain = TrainStep.__call__

        def interrupted(self: TrainStep, batch: Any, **options: Any) -> Any:
            if self.num_steps == interrupted_after:
                raise InterruptionError
            return plain(self, batch, **options)

        patch.setattr(TrainStep, "__call__", interrupted)
        script(monkeypatch, VALUES)
        with pytest.raises(InterruptionError):
            Trainer(experiment("resumed"), world=world).fit()
    resumed = Trainer(experiment("resumed", resume="latest"), world=world)
    assert resumed.first_step == 5
    script(monkeypatch, VALUES[2:])
    assert resumed.fit() == expected
    assert story(tmp_path / "resumed") == story(tmp_path / "straight")
    assert names(tmp_path / "resumed") == names(tmp_path / "straight")


def test_a_resume_after_the_stop_says_the_same_or_goes_on_with_more_patience(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, VALUES)
    patient = {"early_stopping_patience": 3}
    straight = Trainer(stopping_experiment(tmp_path / "straight", **patient), world=world)
    expected = straight.fit()
    assert expected["best_step"] == 10

    script(monkeypatch, VALUES)
    folder = tmp_path / "run"
    stopped = Trainer(stopping_experiment(folder), world=world).fit()
    before = story(folder)
    script(monkeypatch, [])
    again = Trainer(stopping_experiment(folder, resume="latest"), world=world)
    assert again.fit() == stopped
    assert story(folder) == before

    script(monkeypatch, VALUES[4:])
    longer = Trainer(stopping_experiment(folder, resume="latest", **patient), world=world)
    assert longer.first_step == 8
    assert longer.fit() == expected
    assert longer.model.module.trunk.norm.weight.equal(straight.model.module.trunk.norm.weight)


def test_going_back_takes_the_best_checkpoint_along(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    settings = {"ckpt_save_interval": 1, "ckpt_keep_last": 9}
    script(monkeypatch, VALUES)
    expected = Trainer(stopping_experiment(folder, **settings), world=world).fit()
    older = str(folder / "checkpoints/step-00000007")
    branch = Trainer(stopping_experiment(folder, resume=older, **settings), world=world)
    script(monkeypatch, VALUES[3:])
    plain = TrainStep.__call__

    def forgetful(self: TrainStep, batch: Any, **options: Any) -> Any:
        shutil.rmtree(folder, ignore_errors=True)
        return plain(self, batch, **options)

    monkeypatch.setattr(TrainStep, "__call__", forgetful)
    assert branch.fit() == expected
    assert branch.folder == tmp_path / "run-2"
    assert names(tmp_path / "run-2") == ["best", "step-00000004", "step-00000008"]
    state = read_state(tmp_path / "run-2/checkpoints/step-00000004")
    assert state["run"] == str((tmp_path / "run-2").resolve())


def test_a_damaged_newest_checkpoint_leaves_one_that_can_go_on(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of the one before stays, though the damaged one has found a better one."""
    folder = tmp_path / "run"
    settings = {"max_train_iters": 8, "ckpt_keep_last": 2, "ckpt_save_interval": 3}
    script(monkeypatch, [0.9, 1.0, 1.1, 0.8])
    long = {"early_stopping_patience": 9}
    Trainer(stopping_experiment(folder, **settings, **long), world=world).fit()
    assert names(folder) == ["best", "step-00000002", "step-00000006", "step-00000008"]
    (folder / "checkpoints/step-00000008/state.json").unlink()
    resumed = Trainer(stopping_experiment(folder, resume="latest", **settings, **long), world=world)
    assert resumed.first_step == 6
    assert resumed.early_stopping.best_step == 2
    shutil.rmtree(folder / "checkpoints/step-00000002")
    with pytest.raises(ValueError, match=r"TrainerArgs\.resume .*step-00000002"):
        Trainer(stopping_experiment(folder, resume="latest", **settings, **long), world=world)


class NoValidation(Trainer):
    """A trainer whose validation fold is empty."""

    def _datasets(self) -> Datasets:
        whole = super()._datasets()
        return dataclasses.replace(whole, validation=FirstSamples(whole.validation, 0))


def test_without_a_validation_fold_it_is_refused_before_step_one(
    tmp_path: Path, world: World
) -> None:
    experiment = stopping_experiment(tmp_path / "run")
    with pytest.raises(ValueError, match=r"early_stopping_metric .*validation.* got 'loss'"):
        NoValidation(experiment, world=world)
    assert not (tmp_path / "run").exists()


def test_a_metric_that_validations_lack_is_refused_before_step_one(
    tmp_path: Path, world: World
) -> None:
    experiment = stopping_experiment(
        tmp_path / "run", early_stopping_metric="auc_multiclass", early_stopping_patience=1
    )
    Trainer(experiment, world=world)
    binary = dataclasses.replace(experiment.ranking, prediction_head_arch=(16, 1))
    with pytest.raises(ValueError, match="one of loss.*got 'auc_multiclass'"):
        Trainer(dataclasses.replace(experiment, ranking=binary), world=world)
    assert not (tmp_path / "run").exists()


def test_a_metric_that_is_nan_stops_the_run_by_its_name(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [0.5, math.nan])
    trainer = Trainer(stopping_experiment(tmp_path / "run"), world=world)
    with pytest.raises(ValueError, match="'loss' = nan after step 4"):
        trainer.fit()
    assert names(tmp_path / "run") == ["best", "step-00000002"]


class Disagreeing(Trainer):
    """The second rank sees other figures, as if its last digits differed."""

    def evaluate(self, fold: str, *, max_batches: int | None = None) -> dict[str, float]:
        figures = super().evaluate(fold, max_batches=max_batches)
        if fold == "validation" and self.world.rank == 1:
            figures["loss"] = -figures["loss"]
        return figures


def _disagree(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    experiment = stopping_experiment(Path(folder), train_batch_size=4, ckpt_keep_last=9)
    trainer = Disagreeing(experiment, world=cpu_world(rank, world_size))
    figures = trainer.fit()
    assert trainer.early_stopping is not None
    return {"figures": figures, "state": trainer.early_stopping.state_dict()}


def test_all_ranks_decide_alike(tmp_path: Path, two_ranks: TwoRanks) -> None:
    first, second = two_ranks.run(_disagree, str(tmp_path / "run"))
    assert first == second
    during = records(tmp_path / "run", "validation")[:-1]
    assert first["state"]["best_value"] == min(record["loss"] for record in during)


def test_retrieval_stops_on_its_own_metric(tmp_path: Path, world: World) -> None:
    """No script: at this rate the model gets worse again, and the best weights win."""
    settings = {
        "max_train_iters": 60,
        "eval_interval": 5,
        "early_stopping_metric": "ndcg@10",
        "early_stopping_patience": 2,
        "log_interval": 5,
    }
    experiment = retrieval_experiment(
        str(tmp_path / "run"), trainer=settings, optimizer={"learning_rate": 0.3}
    )
    figures = Trainer(experiment, world=world).fit()
    *during, validation = records(tmp_path / "run", "validation")
    best = max(during, key=lambda record: record["ndcg@10"])
    assert validation["best_step"] == best["step"] == figures["best_step"]
    assert validation["ndcg@10"] == pytest.approx(best["ndcg@10"], rel=1e-6)
    assert during[-1]["step"] == best["step"] + 10
