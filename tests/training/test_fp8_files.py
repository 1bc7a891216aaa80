"""The shipped FP8 files run from data to figures, made small, on the emulated backend."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from configs.loader import load_experiment
from modules.linear.engine import LinearEngine
from tests.support.commands import run_command
from tests.support.experiments import write_movielens
from training.checkpoint_tensors import fp8_tensors
from training.distributed import World
from training.trainer import Trainer

SMALL = {
    "benchmark_ranking_fp8": [
        "events/FeatureArgs.max_sequence_length = 24",
        "lengths/RandomDistribution.mean = 16",
        "lengths/RandomDistribution.std = 4",
        "lengths/RandomDistribution.low = 12",
        "NetworkArgs.hidden_size = 32",
        "NetworkArgs.kv_channels = 16",
        "BenchmarkDatasetArgs.num_generated_batches = 4",
    ],
    "movielens_ranking_fp8": ["DatasetArgs.max_num_candidates = 3"],
    "movielens_retrieval_fp8": ["RetrievalArgs.num_negatives = 20"],
}


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("movielens"))


@pytest.mark.parametrize("name", SMALL)
def test_a_shipped_file_runs_on_a_cpu_once_it_is_emulated(
    tmp_path: Path, world: World, movielens: Path, name: str
) -> None:
    folder = tmp_path / "run"
    bindings = [
        *SMALL[name],
        "MixedPrecisionArgs.linear_backend = 'emulated'",
        "MixedPrecisionArgs.fp8_log_interval = 3",
        "TrainerArgs.train_batch_size = 4",
        "TrainerArgs.max_train_iters = 3",
        f"TrainerArgs.output_dir = {str(folder)!r}",
    ]
    if "movielens" in name:
        bindings.append(f"DatasetArgs.dataset_path = {str(movielens)!r}")
    task = "retrieval" if "retrieval" in name else "ranking"
    trainer = Trainer(load_experiment(f"{name}.gin", bindings=bindings, task=task), world=world)
    engines = [module for module in trainer.model.modules() if isinstance(module, LinearEngine)]
    assert len(engines) == 2 * trainer.experiment.network.num_layers
    assert math.isfinite(trainer.fit()["loss"])
    records = [json.loads(line) for line in (folder / "fp8.jsonl").read_text().splitlines()]
    assert {(record["module"], record["operand"]) for record in records} == {
        (engine.name, operand) for engine in engines for operand in ("x", "w", "dy")
    }


def test_a_checkpoint_with_fp8_state_is_scored_where_no_fp8_linear_can_run(
    tmp_path: Path, world: World, movielens: Path
) -> None:
    """By the file as it is shipped: native linears, which this CPU has not, and no fp8_eval."""
    name, folder = "movielens_ranking_fp8.gin", tmp_path / "run"
    bindings = [
        *SMALL["movielens_ranking_fp8"],
        "TrainerArgs.train_batch_size = 4",
        "TrainerArgs.max_train_iters = 2",
        f"TrainerArgs.output_dir = {str(folder)!r}",
        f"DatasetArgs.dataset_path = {str(movielens)!r}",
    ]
    emulated = [*bindings, "MixedPrecisionArgs.linear_backend = 'emulated'"]
    trainer = Trainer(load_experiment(name, bindings=emulated, task="ranking"), world=world)
    figures = trainer.fit()
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    assert list(fp8_tensors(trainer.model)) == ["fp8"]

    command = [sys.executable, "pretrain_gr_ranking.py", "--gin-config-file", name]
    command += [f"--gin-binding={line}" for line in bindings]
    # hides a GPU, where there is one
    done = run_command(
        [*command, "--evaluate", str(checkpoint)],
        env={"CUDA_VISIBLE_DEVICES": ""},
        timeout_seconds=150,
    )
    assert done.returncode == 0, done.stderr
    assert "FP8 scales, which nothing here uses" in done.stderr
    printed = {(line := json.loads(text))["split"]: line for text in done.stdout.splitlines()}
    assert printed["test"]["loss"] == pytest.approx(figures["loss"], rel=1e-5)
