"""The retrieval entry as a user starts it: whole processes, exit codes, figures on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.loader import experiment_to_gin
from tests.support.commands import CommandResult, metric_records, start_entry
from tests.support.experiments import retrieval_experiment, users_of_one_length, write_movielens

ENTRY = "pretrain_gr_retrieval.py"
NUM_STEPS = 90


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gin file of synthetic retrieval with planted transitions among 60 items."""
    folder = tmp_path_factory.mktemp("config")
    experiment = retrieval_experiment(
        str(folder / "run"),
        trainer={
            "max_train_iters": NUM_STEPS,
            "train_batch_size": 32,
            "eval_interval": 15,
            "log_interval": 15,
            "early_stopping_metric": "ndcg@10",
            "early_stopping_patience": 2,
            "gradient_accumulation_steps": 2,
        },
        dataset={"num_generated_batches": 30} | users_of_one_length(),
        network={"embedding_init_std": 0.1},
        optimizer={"learning_rate": 2e-2, "sparse_learning_rate": 0.3},
        retrieval={"eval_metrics": ("HR@10", "NDCG@10", "MRR")},
    )
    path = folder / "synthetic_retrieval.gin"
    path.write_text(experiment_to_gin(experiment))
    return path


@pytest.fixture(scope="module")
def run(config: Path) -> tuple[Path, CommandResult]:
    """A finished run, started with plain python."""
    result = start_entry(ENTRY, config, {})
    assert result.returncode == 0, result.stderr
    return config.parent / "run", result


def by_split(result: CommandResult) -> dict[str, dict[str, Any]]:
    return {(line := json.loads(text))["split"]: line for text in result.stdout.splitlines()}


def test_a_run_beats_chance_and_tells_its_figures(run: tuple[Path, CommandResult]) -> None:
    folder, result = run
    figures = by_split(result)["test"]
    assert figures["hr@10"] > 0.45, "chance is 10 of 60"
    assert figures["ndcg@10"] > 0.25
    (test,) = [record for record in metric_records(folder) if record["split"] == "test"]
    for name in ("loss", "hr@10", "ndcg@10", "hr@50", "mrr", "num_events", "best_step"):
        assert test[name] == figures[name]
    assert f"HR@10 {figures['hr@10']:.4f}  NDCG@10 {figures['ndcg@10']:.4f}  MRR" in result.stderr
    assert f"final figures are those of step {test['best_step']}" in result.stderr
    assert (folder / "operative_config.gin").exists()


def test_a_fresh_process_scores_the_best_checkpoint_as_training_did(
    run: tuple[Path, CommandResult],
) -> None:
    folder, _ = run
    config = folder / "operative_config.gin"
    result = start_entry(ENTRY, config, {}, "--evaluate", str(folder / "checkpoints/best"))
    assert result.returncode == 0, result.stderr
    logged = {r["split"]: r for r in metric_records(folder) if "best_step" in r}
    printed = by_split(result)
    assert set(printed) == set(logged) == {"validation", "test"}
    for split, figures in logged.items():
        for name in ("step", "split", "best_step"):
            del figures[name]
        for name in ("split", "run"):
            del printed[split][name]
        assert printed[split] == pytest.approx(figures, rel=1e-6)


def test_two_processes_run_to_the_end(config: Path, tmp_path: Path) -> None:
    values = {
        "TrainerArgs.output_dir": str(tmp_path / "run"),
        "TrainerArgs.max_train_iters": 10,
        "TrainerArgs.train_batch_size": 4,
        "TrainerArgs.log_interval": 1,
        "TrainerArgs.eval_interval": 5,
        "RetrievalArgs.negatives_sampler": "random",
        "RetrievalArgs.num_negatives": 20,
    }
    result = start_entry(ENTRY, config, values, processes=2)
    assert result.returncode == 0, result.stderr
    assert result.processes_left == 0
    records = metric_records(tmp_path / "run")
    assert [r["step"] for r in records if r["split"] == "train"] == list(range(1, 11))
    assert result.stderr.count("test: HR@10") == 1, "only rank 0 speaks"


def test_a_metric_without_validation_is_refused_in_one_message(
    config: Path, tmp_path: Path
) -> None:
    data = write_movielens(tmp_path / "movielens")
    experiment = retrieval_experiment(str(tmp_path / "run"), data=data)
    path = tmp_path / "movielens.gin"
    path.write_text(experiment_to_gin(experiment))
    values = {
        "TrainerArgs.early_stopping_metric": "ndcg@10",
        "DatasetArgs.train_on_validation": True,
    }
    result = start_entry(ENTRY, path, values)
    assert result.returncode != 0
    assert "TrainerArgs.early_stopping_metric" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()
