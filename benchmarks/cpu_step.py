"""Speed of our CPU train step against the plain yardstick, in one process, interleaved.

    python benchmarks/cpu_step.py --gin-config-file movielens_ranking.gin

The losses of both on the same batches and weights must agree before anything is timed. Prints one
JSON line: median seconds a step of each and the ratio (above 1: ours is faster).
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.plain_hstu import PlainHSTU
from configs.loader import load_experiment
from data.batch import SequenceBatch
from model.build import table_specs
from training.distributed import process_group
from training.pipeline import build_pipeline
from training.step import TrainStep
from training.trainer import Trainer


def main() -> None:
    """Compares, then times."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gin-config-file", default="movielens_ranking.gin")
    parser.add_argument("--gin-binding", action="append", default=[])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    experiment = load_experiment(
        arguments.gin_config_file, bindings=arguments.gin_binding, task="ranking"
    )
    with tempfile.TemporaryDirectory() as folder, process_group() as world:
        trainer_args = dataclasses.replace(experiment.trainer, output_dir=f"{folder}/run")
        trainer = Trainer(dataclasses.replace(experiment, trainer=trainer_args), world=world)
        loader = trainer.loaders["train"]
        batches = list(itertools.islice(loader.epoch(0), arguments.steps))
        plain = PlainHSTU(experiment, trainer.model.module, _item_rows(trainer))
        _check_losses(trainer, plain, batches[:3])
        ours, theirs = _times(trainer, plain, batches)
    print(
        json.dumps(
            {
                "gin": arguments.gin_config_file,
                "threads": arguments.threads,
                "steps": len(ours),
                "ours_seconds": statistics.median(ours),
                "plain_seconds": statistics.median(theirs),
                "ratio": statistics.median(t / o for o, t in zip(ours, theirs, strict=True)),
                "total_ratio": sum(theirs) / sum(ours),
                "torch": torch.__version__,
            }
        )
    )


def _item_rows(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Rows of the sharded tables by feature (one process holds them whole)."""
    weights = {
        name.split(".")[-2]: value
        for name, value in trainer.model.state_dict().items()
        if hasattr(value, "local_shards")
    }
    return {
        feature: weights[spec.module_name].local_shards()[0].tensor
        for spec in table_specs(trainer.experiment, trainer.datasets.facts)
        if spec.is_sharded
        for feature in spec.feature_names
    }


def _check_losses(trainer: Trainer, plain: PlainHSTU, batches: list[SequenceBatch]) -> None:
    trainer.model.eval()
    plain.eval()
    with torch.no_grad():
        for batch in batches:
            ours = float(trainer.model.module(batch).loss_sum)
            theirs = float(plain(batch)[0])
            if abs(ours - theirs) > 1e-4 * abs(theirs):
                raise SystemExit(f"the models differ: summed loss {ours} against {theirs}")


def _times(
    trainer: Trainer, plain: PlainHSTU, batches: list[SequenceBatch]
) -> tuple[list[float], list[float]]:
    """Seconds of each step after five warm-up steps, ours and the yardstick's in turn."""
    trainer.model.train()
    plain.train()
    arguments = trainer.experiment
    step = TrainStep(
        trainer.model.module, trainer.optimizer, clip_grad=arguments.optimizer.clip_grad
    )
    pipeline = build_pipeline(
        arguments.trainer.pipeline_type,
        step,
        model=trainer.model,
        optimizer=trainer.optimizer,
        device=trainer.world.device,
    )
    adam = torch.optim.Adam(plain.parameters(), lr=arguments.optimizer.learning_rate)
    ours: list[float] = []
    theirs: list[float] = []
    feed = iter(batches)
    for batch in batches:
        begin = time.perf_counter()
        pipeline.progress(feed)
        middle = time.perf_counter()
        adam.zero_grad()
        loss, logits = plain(batch)
        (loss / len(logits)).backward()
        adam.step()
        ours.append(middle - begin)
        theirs.append(time.perf_counter() - middle)
    return ours[5:], theirs[5:]


if __name__ == "__main__":
    main()
