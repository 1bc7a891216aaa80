"""Losses of short runs on this process's device, for comparisons between devices.

    python -m tests.support.loss_curves ranking:float32:pytorch:20 retrieval:bfloat16:triton:1
    CUDA_VISIBLE_DEVICES= python -m tests.support.loss_curves ranking:float32:pytorch:20

Each case is task:dtype:kernel_backend:steps, with ":resumed" behind it for a run that is stopped
half-way and goes on from its checkpoint. Prints one JSON line: case -> training loss of every step.
No dropout, one table optimizer that every device has, weights drawn on the CPU.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.schema import ExperimentArgs, FeatureArgs
from tests.support.experiments import retrieval_experiment, synthetic_experiment
from training.distributed import World, process_group
from training.trainer import Trainer

_NETWORK = {
    "hidden_size": 64,
    "kv_channels": 32,
    "use_time_bias": True,
    "use_relative_position_bias": True,
}
_OPTIMIZER = {"learning_rate": 1e-3, "sparse_optimizer_str": "rowwise_adagrad"}
_EVENTS = (
    FeatureArgs(feature_names=("item", "action"), max_sequence_length=70, is_jagged=True),
    FeatureArgs(feature_names=("user_id", "age"), max_sequence_length=1),
)


def experiment_of(case: str, folder: str) -> ExperimentArgs:
    """The experiment of a case: users of up to 70 events, their last ones candidates."""
    task, dtype, backend, steps = case.split(":")[:4]
    build = {"ranking": synthetic_experiment, "retrieval": retrieval_experiment}[task]
    return build(
        folder,
        trainer={
            "train_batch_size": 16,
            "eval_batch_size": 16,
            "max_train_iters": int(steps),
            "max_eval_iters": 1,
        },
        dataset={"feature_args": _EVENTS, "num_generated_batches": 8},
        network=_NETWORK | {"dtype_str": dtype, "kernel_backend": backend},
        optimizer=_OPTIMIZER,
    )


def loss_curve(case: str, *, world: World) -> list[float]:
    """Training loss of every step of a case."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = experiment_of(case, f"{folder}/run")
        if case.endswith(":resumed"):
            half = (experiment.trainer.max_train_iters or 0) // 2
            Trainer(_with(experiment, max_train_iters=half), world=world).fit()
            experiment = _with(experiment, resume="latest")
        Trainer(experiment, world=world).fit()
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if record["split"] == "train"]


def _with(experiment: ExperimentArgs, **settings: Any) -> ExperimentArgs:
    trainer = dataclasses.replace(experiment.trainer, **settings)
    return dataclasses.replace(experiment, trainer=trainer)


def main(cases: Sequence[str]) -> None:
    """Runs the cases in turn and prints their losses."""
    warnings.simplefilter("ignore", FutureWarning)
    with process_group() as world:
        print(json.dumps({case: loss_curve(case, world=world) for case in cases}))


if __name__ == "__main__":
    main(sys.argv[1:])
