"""The shipped FP8 files run from data to figures, made small, on the emulated backend."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from configs.loader import load_experiment
from modules.linear.engine import LinearEngine
from tests.support.experiments import write_movielens
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
